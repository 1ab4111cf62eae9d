"""PyTorch's side of a study: networks, gradients, steps, processes at gates."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers.common import ROOT, free_port, make_mesh

torch = pytest.importorskip("torch")

from benchmarks.links import host as bench_host  # noqa: E402
from benchmarks.links.gates import Spec, write_specs  # noqa: E402
from benchmarks.links.part import part_of  # noqa: E402
from benchmarks.torch import models as torch_models  # noqa: E402
from benchmarks.torch import objectives as torch_objectives  # noqa: E402
from benchmarks.torch import training as torch_training  # noqa: E402
from prunex_jax.base.errors import TrainingDivergedError, UserError  # noqa: E402
from prunex_jax.base.settings import OptimizerConfig  # noqa: E402
from prunex_jax.base.trees import flatten_by_path  # noqa: E402
from prunex_jax.data import EXAMPLE  # noqa: E402
from prunex_jax.data.shards import make_shards  # noqa: E402
from prunex_jax.mesh import make_topology  # noqa: E402
from prunex_jax.models import (  # noqa: E402
    MODELS,
    Form,
    Model,
    make_language_model,
    make_model,
    make_resnet,
    make_vgg,
)
from prunex_jax.models.resnet import make_resnet_spec  # noqa: E402
from prunex_jax.models.settings import GptConfig, ModelConfig  # noqa: E402
from prunex_jax.models.vgg import make_vgg_spec  # noqa: E402
from prunex_jax.processes import LaunchFlags  # noqa: E402
from prunex_jax.tasks import Language  # noqa: E402
from prunex_jax.train.build.config import config_to_dict, resolve_config  # noqa: E402
from prunex_jax.train.build.experiment import make_experiment  # noqa: E402
from prunex_jax.train.build.optimizer import make_inner  # noqa: E402
from prunex_jax.train.records.scores import evaluate_split  # noqa: E402

SMALL = {
    "basic": (
        # Below 8 channels PyTorch writes past its memory in the shortcut's gradient, on
        # CPUs without AVX-512 (https://github.com/uxlfoundation/oneDNN/issues/6035).
        make_resnet_spec("cifar", stage_blocks=(2, 2), stage_widths=(9, 11)),
        (8, 8, 3),
    ),
    "bottleneck": (
        make_resnet_spec(
            "imagenet", stage_blocks=(1, 2), stage_widths=(4, 3), expansion=4
        ),
        (32, 24, 3),
    ),
    "vgg": (
        make_vgg_spec("imagenet", stage_convs=(2, 2, 3, 3, 3), scale=1 / 32),
        (32, 64, 2),
    ),
}
SETTINGS = {
    "seed": 7,
    "model": {"name": "resnet20", "width": 0.5},
    "data": {"batch_size": 32, "validation_share": 0.2},
    "optimizer": {
        "learning_rate": 0.2,
        "warmup_share": 0.25,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.01,
        "clip_norm": 0.8,
        "label_smoothing": 0.1,
    },
    "method": {"name": "dense", "powersgd": {"rank": 1}},
    "run": {"steps": 24},
}
# Two query heads to a key head.
WIDTHS = {
    **{"layers": 2, "width": 16, "heads": 4, "key_heads": 2},
    **{"head_width": 6, "hidden": 24},
}
TEXT_SETTINGS = {
    "seed": 7,
    "model": {"name": "gpt", "gpt": WIDTHS},
    "data": {
        **{"name": "stdlib", "sequence_length": 16},
        **{"batch_size": 8, "eval_batch_size": 128},
    },
    "optimizer": {
        **{"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1},
        "clip_norm": 1.0,
    },
    "method": {"name": "dense"},
    "run": {"steps": 24},
}


def small_model(name: str) -> Model:
    spec, image_shape = SMALL[name]
    make = make_vgg if name == "vgg" else make_resnet
    return make(name, spec, Form(), image_shape, 5)


def random_state(model: Model):
    """Parameters and statistics with no zeros or ones, so that none can be mixed up."""
    rng = np.random.default_rng(0)

    def draw(x):
        if x.ndim == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype)
        size = np.prod(x.shape[:-1]) ** -0.5
        return jnp.asarray(rng.normal(scale=1.4 * size, size=x.shape), x.dtype)

    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))


def named(tree) -> dict[str, torch.Tensor]:
    """Leaves of a tree of ours under the names and in the layout of PyTorch."""
    return {
        torch_models.torch_name(path): torch_models.torch_value(path, leaf)
        for path, leaf in flatten_by_path(tree).items()
    }


def assert_close(found, wanted, tolerance):
    """Compares tensors relative to their largest entry, if that is not tiny."""
    assert found.keys() == wanted.keys()
    sizes = {name: float(value.abs().max()) for name, value in wanted.items()}
    smallest = 0.01 * max(sizes.values())
    for name, size in sizes.items():
        error = float((found[name] - wanted[name]).abs().max())
        assert error <= tolerance * max(size, smallest), (name, error, size)


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", MODELS)
def test_architectures_have_our_names_and_shapes(name, stem):
    model = make_model(ModelConfig(name=name, width=0.3, stem=stem), (64, 32, 3), 10)
    with torch.device("meta"):
        network = torch_models.make_torch_model(model)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    ours = {}
    for path, leaf in {
        **flatten_by_path(abstract[0]),
        **flatten_by_path(abstract[1]),
    }.items():
        axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[len(leaf.shape)]
        ours[torch_models.torch_name(path)] = tuple(leaf.shape[axis] for axis in axes)
    theirs = {name: tuple(x.shape) for name, x in network.state_dict().items()}
    counters = [name for name in theirs if name.endswith("num_batches_tracked")]
    assert {k: v for k, v in theirs.items() if k not in counters} == ours


@pytest.mark.parametrize("name", SMALL)
def test_networks_are_the_same(name):
    model = small_model(name)
    params, statistics = random_state(model)
    network = torch_models.make_torch_model(model)
    torch_models.load_params(network, params, statistics)
    rng = np.random.default_rng(1)
    images = rng.normal(size=(6, *model.example().shape[1:])).astype(np.float32)
    labels = np.arange(6) % 5
    theirs = torch.from_numpy(images).permute(0, 3, 1, 2)

    with torch.no_grad():
        logits = network.eval()(theirs)
    wanted = jax.jit(model.apply)(params, statistics, images)
    np.testing.assert_allclose(logits, wanted, rtol=2e-4, atol=2e-4)

    def loss_of(params):
        logits, new = model.apply_train(params, statistics, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits, new)

    grads, (wanted, new) = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    logits = network.train()(theirs)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
    np.testing.assert_allclose(logits.detach(), wanted, rtol=1e-3, atol=1e-3)
    found = {name: param.grad for name, param in network.named_parameters()}
    # Biases in front of batch norm have no gradient but rounding.
    for name in [n for n in found if n.endswith("conv.bias")]:
        assert found.pop(name).abs().max() < 1e-4
    wanted = {key: value for key, value in named(grads).items() if key in found}
    assert_close(found, wanted, 2e-3)
    means = {k: v for k, v in named(new).items() if k.endswith("mean")}
    buffers = dict(network.named_buffers())
    assert_close({k: buffers[k] for k in means}, means, 1e-3)


def test_running_variance_differs_by_the_factor_that_is_documented():
    model = small_model("basic")
    params, statistics = random_state(model)
    network = torch_models.make_torch_model(model)
    torch_models.load_params(network, params, statistics)
    images = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(np.float32)
    _, new = jax.jit(model.apply_train)(params, statistics, images)
    network(torch.from_numpy(images).permute(0, 3, 1, 2))
    old, count = np.asarray(statistics["stem"]["norm"]["var"]), 4 * 8 * 8
    ours = (np.asarray(new["stem"]["norm"]["var"]) - 0.9 * old) * count / (count - 1)
    theirs = network.stem.norm.running_var.numpy() - 0.9 * old
    np.testing.assert_allclose(theirs, ours, rtol=1e-4)


def test_loading_wants_every_parameter():
    model = small_model("basic")
    params, statistics = random_state(model)
    network = torch_models.make_torch_model(model)
    del params["classifier"]["bias"]
    with pytest.raises(RuntimeError, match=r"classifier\.bias"):
        torch_models.load_params(network, params, statistics)


def spec_of(tmp_path, boundaries, values=SETTINGS, **changes) -> Spec:
    config = config_to_dict(resolve_config(values))
    for key, value in changes.pop("settings", {}).items():
        section, name = key.split(".")
        config[section][name] = value
    return Spec(config, str(tmp_path), tuple(boundaries), **changes)


def address() -> str:
    return f"127.0.0.1:{free_port()}"


def seat(process: int = 0, processes: int = 1) -> LaunchFlags:
    return LaunchFlags(address(), processes, process)


def our_run(spec: Spec, shape, steps):
    """Losses of our own dense run, its network after the steps, and its measures."""
    config = resolve_config(spec.config)
    topology = dataclasses.replace(make_topology("1"), mesh=make_mesh(*shape))
    experiment = make_experiment(config, topology)
    programs, losses = experiment.current.programs, []
    state = programs.init(jax.random.key(config.seed))
    with experiment.batches() as batches:
        for _ in range(steps):
            state, _ = programs.local_step(state, next(batches))
            losses.append(float(programs.report(state).measures["loss"]))
            state = programs.clear(state)
    network = programs.network(state)
    split = part_of(experiment.task.dataset.validation, spec.scored_examples)
    result = evaluate_split(experiment, programs.evaluate, network, split)
    return losses, network[0], result


def test_steps_are_ours(tmp_path):
    """Clipping, decay, momentum, schedule and smoothing, parameter by parameter.

    At a rate at which steps do not make differences of rounding much larger.
    """
    spec = spec_of(tmp_path, [4], settings={"optimizer.learning_rate": 0.005})
    own = seat()
    with torch_training.joined(own):
        with torch_training.Trainer(
            torch_training.make_job(spec, own), "dense"
        ) as trainer:
            losses = [trainer.step() for _ in range(4)]
            found = {k: v.detach() for k, v in trainer.network.named_parameters()}
    wanted_losses, params, _ = our_run(spec, (1, 1), 4)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-4)
    assert_close(found, named(params), 1e-3)


def test_processes_of_a_host_train_on_its_shard(tmp_path):
    spec = spec_of(tmp_path, [1], settings={"data.shards": "label_sorted"}, num_hosts=2)
    job = torch_training.make_job(spec, seat(3, 4))
    with torch_training.joined(seat()):
        with torch_training.Trainer(job, "dense") as trainer:
            batches = [next(trainer._batches) for _ in range(40)]
    labels = job.task.dataset.train.labels()
    own = labels[make_shards(labels, 2, job.config.data)[1]]
    assert {*np.concatenate([batch["label"] for batch in batches])} == {*own}


def test_language_models_are_the_same():
    """Query heads that share key heads, and positions, in logits and gradients."""
    model = make_language_model(
        ModelConfig(name="gpt", gpt=GptConfig(**WIDTHS)), 50, 12
    )
    params, _ = random_state(model)
    network = torch_models.make_torch_model(model)
    torch_models.load_params(network, params, {})
    tokens = np.random.default_rng(1).integers(0, 50, (3, 13)).astype(np.int32)
    objective = Language(12)

    def loss_of(params):
        logits = model.apply(params, {}, objective.inputs({EXAMPLE: tokens}))
        return objective.loss(logits, {EXAMPLE: tokens}), logits

    grads, logits = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    theirs = torch_objectives.make_torch_objective(objective)
    inputs, targets = theirs.tensors({EXAMPLE: tokens})
    outputs = network(inputs)
    np.testing.assert_allclose(outputs.detach(), logits, rtol=1e-4, atol=1e-4)
    assert np.abs(logits).max() > 1, "weights are not so small that all is alike"
    theirs.loss(outputs, targets).backward()
    found = {name: param.grad for name, param in network.named_parameters()}
    assert_close(found, named(grads), 1e-4)


def test_a_network_without_a_form_in_pytorch_is_refused():
    model = make_language_model(
        ModelConfig(name="gpt", gpt=GptConfig(**WIDTHS)), 50, 12
    )
    functions = model.functions

    def init(key):
        params, statistics = functions.init(key)
        return {**params, "positions": jnp.ones((12, 16))}, statistics

    other = dataclasses.replace(functions, init=init)
    with pytest.raises(UserError, match="this network is none of them"):
        torch_models.make_torch_model(Model(other))


def test_steps_of_adamw_are_those_of_optax():
    """Moments, epsilon, and which parameters decay, where gradients are tiny too."""
    config = OptimizerConfig(name="adamw", learning_rate=0.01, weight_decay=0.3)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 3)), "scale": rng.normal(size=7)}
    params = {name: x.astype(np.float32) for name, x in params.items()}
    inner = make_inner(config, optax.constant_schedule(0.01))
    ours, state = params, inner.init(params)
    network = torch.nn.ParameterDict({k: torch.tensor(x) for k, x in params.items()})
    optimizer = torch_training._make_optimizer(network, config)
    for size in (1.0, 1e-7, 1e-9):
        grads = {
            name: (size * rng.normal(size=x.shape)).astype(np.float32)
            for name, x in params.items()
        }
        updates, state = inner.update(grads, state, ours)
        ours = optax.apply_updates(ours, updates)
        for name, grad in grads.items():
            network[name].grad = torch.tensor(grad)
        optimizer.step()
    for name in params:
        np.testing.assert_allclose(network[name].detach(), ours[name], rtol=1e-5)


def test_steps_on_text_are_ours(tmp_path):
    """Text, its order, clipping, decay, moments and score, parameter by parameter."""
    scored = {"metric": "bits_per_byte", "scored_examples": 300}
    spec = spec_of(tmp_path, [3], TEXT_SETTINGS, **scored)
    own = seat()
    with torch_training.joined(own):
        with torch_training.Trainer(
            torch_training.make_job(spec, own), "dense"
        ) as trainer:
            losses = [trainer.step() for _ in range(3)]
            found = {k: v.detach() for k, v in trainer.network.named_parameters()}
            value = trainer.score()
    wanted_losses, params, measures = our_run(spec, (1, 1), 3)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert value == pytest.approx(measures["bits_per_byte"], rel=1e-4)
    assert_close(found, named(params), 1e-3)


class Reached:
    """A runner of one process: remembers what is said at gates and lets it on."""

    def __init__(self):
        self.said = []

    def arrive(self, **facts):
        self.said.append(facts)
        return {}


def test_steps_are_timed_between_gates_with_their_pause(tmp_path):
    gate, scores = Reached(), iter([0.25, 0.5])
    spec = spec_of(tmp_path, [0, 2], metric="accuracy", stand_in_seconds=0.02)
    bench_host.pass_gates(
        spec, gate, lambda: 1.0, lambda steps: {}, lambda: next(scores)
    )
    first, _, second, last = gate.said
    assert (first["event"], first["step"], first["seconds"]) == ("pause", 0, [])
    assert (second["step"], len(second["seconds"])) == (2, 2)
    assert min(second["seconds"]) >= 0.02
    assert last == {"event": "resume", "value": 0.5}


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    spec = spec_of(tmp_path, [1])
    with pytest.raises(TrainingDivergedError, match="step 1"):
        bench_host.pass_gates(spec, Reached(), lambda: float("nan"), lambda steps: {})


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("optimizer.name", "lion", "name='lion' is not supported.*sgd, adamw"),
        ("optimizer.micro_batches", 2, "micro_batches=2 is not supported"),
        ("model.compute_dtype", "bfloat16", "'bfloat16' is not supported"),
        ("model.name", "mine:Network", "name='mine:Network' is a network of your own"),
        ("distill.teacher", "self", "distill.teacher='self' is not supported"),
        ("data.batch_size", 33, "batch_size=33 does not divide"),
        ("run.steps", 3, "after step 4"),
    ],
)
def test_what_torch_does_not_have_is_refused(tmp_path, setting, value, message):
    spec = spec_of(tmp_path, [4], settings={setting: value})
    with pytest.raises(UserError, match=message):
        torch_training.make_job(spec, seat(0, 2))


def test_torch_that_is_missing_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "specs.json"
    write_specs(path, [spec_of(tmp_path, [1])])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = [
        f"--spec={path}",
        "--runtime=torch",
        "--gate=0,0",
        "--coordinator=localhost:1",
    ]
    assert bench_host.main(command) == 2
    error = capsys.readouterr().err
    assert "pip install 'prunex-jax[torch]'" in error and error.count("\n") == 1


@contextlib.contextmanager
def processes(tmp_path, specs, count=2):
    """Real processes at the far ends of pipes."""
    path = tmp_path / "specs.json"
    write_specs(path, specs)
    where, logs = address(), []
    running, ends = [], []
    for number in range(count):
        news, theirs = os.pipe()
        their_orders, orders = os.pipe()
        logs.append(tmp_path / f"{number}.log")
        command = [
            *(sys.executable, "-W", "error", "-m", "benchmarks.links.host"),
            *(f"--spec={path}", f"--gate={theirs},{their_orders}"),
            *(f"--coordinator={where}", f"--process_id={number}"),
            *(f"--num_processes={count}", "--interface=lo", "--runtime=torch"),
        ]
        with open(logs[-1], "w") as log:
            running.append(
                subprocess.Popen(
                    command,
                    pass_fds=(theirs, their_orders),
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            )
        os.close(theirs)
        os.close(their_orders)
        ends.append((open(news), open(orders, "w")))
    try:
        yield lambda event: [meet(end, event, logs) for end in ends]
        assert [process.wait(60) for process in running] == [0] * count
    finally:
        for process in running:
            process.kill()
            process.wait()
        for end in [end for pair in ends for end in pair]:
            end.close()


def meet(end, event, logs):
    """Reads what a process says at a gate, and lets it on."""
    line = end[0].readline()
    assert line, "\n".join(log.read_text() for log in logs)
    facts = json.loads(line)
    assert facts["event"] == event
    end[1].write("{}\n")
    end[1].flush()
    return facts


@pytest.mark.slow
def test_two_processes_follow_our_dense_run(tmp_path):
    """Dense, then other hooks and the bare exchange, in the same processes."""
    dense = spec_of(tmp_path, [0, 8, 24], metric="accuracy")
    hooks = [dataclasses.replace(dense, hook=hook) for hook in ("fp16", "powersgd")]
    bare = dataclasses.replace(dense, exchange_only=True, boundaries=(2,), metric="")
    losses, accuracies = {}, {}
    with processes(tmp_path, [dense, *hooks, bare]) as meet_all:
        for spec in (dense, *hooks):
            facts = [meet_all(event) for event in ("pause", "resume") * 3]
            meet_all("done")
            pauses, resumes = facts[::2], facts[1::2]
            assert pauses[0][0]["digest"] != pauses[1][0]["digest"]
            for first, second in pauses:
                assert first["digest"] == second["digest"]
                assert min(first["seconds"], default=1) > 0
            assert [len(first["seconds"]) for first, _ in pauses] == [0, 8, 16]
            for first, second in resumes:
                assert first["value"] == second["value"]
            assert resumes[-1][0]["value"] > resumes[0][0]["value"] + 0.1
            parts = [[x for p in pauses for x in p[host]["losses"]] for host in (0, 1)]
            accuracies[spec.hook] = [first["value"] for first, _ in resumes]
            losses[spec.hook] = np.mean(parts, axis=0)
            assert losses[spec.hook][-3:].mean() < 0.8 * losses[spec.hook][:3].mean()
        first, second = meet_all("pause")
        assert len(first["seconds"]) == 2 and second["losses"] == [0.0, 0.0]
        meet_all("resume")
        meet_all("done")
    ours, _, measures = our_run(dense, (2, 1), 8)
    assert abs(accuracies["dense"][1] - measures["accuracy"]) < 0.01
    np.testing.assert_allclose(losses["dense"][:8], ours, rtol=1e-4)
    # Half precision stays near, and two steps go by before PowerSGD compresses.
    np.testing.assert_allclose(losses["fp16"][:4], ours[:4], rtol=1e-3)
    np.testing.assert_allclose(losses["powersgd"][:3], ours[:3], rtol=1e-4)
    assert abs(losses["powersgd"][3] / ours[3] - 1) > 1e-3
