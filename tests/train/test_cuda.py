"""Programs of every config lower for CUDA: GPUs are what users have, tests do not."""

import dataclasses
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest

from prunex_jax.data import VALID
from prunex_jax.mesh import make_topology
from prunex_jax.models import MODELS
from prunex_jax.train.build.config import ExperimentConfig, resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.changes.ahead import Call, calls_to_come
from prunex_jax.train.commands.command import load_config
from prunex_jax.train.steps.compiled import Ledger, Program
from prunex_jax.train.steps.position import RunPosition

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
# Side and classes of the sets that are not here; synthetic images take their place.
SETS = {"cifar10": (32, 10), "imagenet2012": (224, 1000)}
QUICK = "digits_resnet20_hsadmm"


def config_of(path: Path) -> ExperimentConfig:
    """A config on 2 x 2 devices, with images for those that are not here."""
    config = load_config(str(path))
    name = config.data.name
    config.topology.update(layout="2", cpu_devices=0, simulated="")
    if name in SETS:
        side, classes = SETS[name]
        config.data.update(
            name="synthetic",
            image_size=side,
            synthetic_classes=classes,
            synthetic_examples=64,
            augment="none",
            # Little memory: no program depends on how many images there are.
            batch_size=32,
            eval_batch_size=0,
            num_workers=0,
        )
    if config.model.name in MODELS:
        config.model.convolution = "direct"  # What `auto` means where there is a GPU.
    return resolve_config(config)


def calls_of(experiment: Experiment) -> list[Call]:
    """Everything that a run of a config calls, evaluation and mean networks too."""
    programs, method = experiment.current.programs, experiment.current.method
    state = programs.abstract_state()
    batch = experiment.batch_shapes()
    first = jax.tree.leaves(batch)[0]
    valid = jax.ShapeDtypeStruct(first.shape[:1], jnp.float32, sharding=first.sharding)
    evaluated = {**batch, VALID: valid}
    network = jax.eval_shape(programs._network(), state)
    key = jax.eval_shape(lambda: jax.random.key(0))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    position = RunPosition(keep_counts=experiment.channels.sizes)
    calls = [
        Call(programs.init, (key,), {}),
        Call(programs.network, (state,), {}),
        Call(programs.evaluate, (*network, evaluated), {}),
        Call(programs.average, (network[0], number, state), {}),
        Call(programs.reestimate, (state, batch, number), {}),
        Call(programs.scores, (state,), {}),
    ]
    if method.preparation is not None:
        batches = (batch,) * method.preparation.num_batches
        calls.append(Call(programs.prepare, (state, batches), {}))
    seen = []
    for step in range(min(experiment.num_steps, 200)):
        options = experiment.current.step_options(step, position.keep_counts)
        if options not in seen:
            seen.append(options)
            calls.append(Call(programs.local_step, (state, batch), options))
    return [*calls, *calls_to_come(experiment, position, state, batch, seen[-1])]


def export_for(platform, call):
    """Lowers a program for devices that need not be here."""
    program = call.program
    compiled = jax.jit(program._build(**call.static), donate_argnums=program._donate)
    return jax.export.export(compiled, platforms=[platform])(*call.args)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem == QUICK else pytest.mark.slow)
        for p in CONFIGS
    ],
)
def test_programs_lower_for_cuda(path):
    topology = make_topology("2", devices=jax.devices()[:4])
    experiment = make_experiment(config_of(path), topology)
    names = set()
    for call in calls_of(experiment):
        exported = export_for("cuda", call)
        assert exported.platforms == ("cuda",)
        names.add(call.program.name)
    assert {"init", "local_step", "evaluate", "report"} <= names
    assert ("exchange" in names) == (experiment.current.method.rounds is not None)


@pytest.mark.slow
def test_programs_of_slices_lower_for_cuda():
    (path,) = (path for path in CONFIGS if path.stem == QUICK)
    config = config_of(path)
    in_slices = dataclasses.replace(config.topology, shard="state")
    topology = make_topology("2", devices=jax.devices()[:4])
    experiment = make_experiment(
        dataclasses.replace(config, topology=in_slices), topology
    )
    assert experiment.current.method.placements.slicing is not None
    for call in calls_of(experiment):
        exported = export_for("cuda", call)
        assert exported.platforms == ("cuda",)


def test_what_has_no_form_for_cuda_is_found():
    """The check can fail: jax has this decomposition on CPUs only."""
    build = lambda: lambda x: jax.lax.linalg.hessenberg(x)[0]  # noqa: E731
    program = Program("decompose", build, {"host": 1, "device": 1}, Ledger())
    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    call = Call(program, (square,), {})
    assert export_for("cpu", call).platforms == ("cpu",)
    with pytest.raises(NotImplementedError, match="cuda"):
        export_for("cuda", call)
