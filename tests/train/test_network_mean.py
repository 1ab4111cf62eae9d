"""The mean of a run's own networks that it learns from."""

import itertools
import shutil

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.comm import wire_bytes
from prunex_jax.mesh import make_topology
from prunex_jax.models import from_moments, to_moments
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.changes.transitions import experiment_at, saved_shapes
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.run import train
from prunex_jax.train.steps.position import RunPosition
from tests.helpers.tiny_runs import settings

# Channels go from step 12 on, and are cut out after step 20, of 32.
PRUNED = {"num_stairs": 1, "start_share": 0.37, "freeze_share": 0.5}
RUN = {
    "steps": 32,
    "log_every_steps": 8,
    "checkpoint_every_steps": 4,
    "checkpoints_kept": 20,
}
# Networks of steps 4, 8 and 12, learned from until step 28.
TAUGHT = {"teacher": "self", "average_share": 0.25, "until_share": 0.875}


def of_itself(**changes):
    """Settings of a run that learns from itself."""
    method = {"name": "hsadmm", "hsadmm": {"sync_period": 4}}
    pruned = {**PRUNED, "shrink_share": 0.6}
    parts = {"method": method, "sparsity": pruned, "run": RUN, "distill": TAUGHT}
    return settings(**{**parts, **changes})


def logits_of(result):
    images = np.random.default_rng(0).normal(size=(40, 8, 8, 1))
    return result.network.logits(np.asarray(images, np.float32))


def saved_at(folder, step):
    """The run, and what its checkpoint of a step holds."""
    config = resolve_config(of_itself())
    experiment = make_experiment(config, make_topology(config.topology.layout))

    def shapes(extra, leaves):
        del leaves
        position = RunPosition.from_dict(extra)
        return saved_shapes(experiment_at(experiment, position), position)

    with Checkpointer(folder / "checkpoints", read_only=True) as checkpointer:
        saved, _ = checkpointer.restore(shapes, step)
    return experiment, saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on one host, all its checkpoints, and its networks before channels go."""
    folder = tmp_path_factory.mktemp("own_teacher") / "whole"
    networks = {}

    def look(progress, state):
        if progress.step in (4, 8, 12):
            networks[progress.step] = jax.device_get(state.opt_state.global_consensus)
        if progress.step <= 12:
            assert all(mask.all() for mask in state.opt_state.masks.values())

    result = train(of_itself(), folder, after_step=[look])
    return folder, result, networks


def assert_mean(mean, networks, experiment, model, step):
    """It is that of the networks, with batch statistics from batches after a step."""
    wanted = flatten_by_path(jax.tree.map(lambda *x: np.mean(x, 0), *networks))
    for path, leaf in flatten_by_path(mean.params).items():
        np.testing.assert_allclose(leaf, wanted[path], atol=1e-6)
    # Its statistics are its own: of every device's images, then the mean.
    with experiment.batches(step) as batches:
        images = np.stack([x["image"] for x in itertools.islice(batches, 32)])
    reestimate, moments = jax.jit(model.reestimate), []
    for of_device in np.split(images, 8, axis=1):
        statistics = mean.statistics
        for number, batch in enumerate(of_device):
            statistics = reestimate(mean.params, statistics, batch, number)
        moments.append(to_moments(statistics))
    wanted = from_moments(jax.tree.map(lambda *x: np.mean(x, 0), *moments))
    found = flatten_by_path(mean.statistics)
    for path, leaf in flatten_by_path(wanted).items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-3, atol=1e-5)


@pytest.mark.rotates
def test_the_teacher_is_the_mean_of_the_last_networks_before_channels_go(whole):
    folder, _, networks = whole
    for step, is_there in ((4, True), (8, True), (24, True), (28, False)):
        assert (saved_at(folder, step)[1].own_teacher is not None) == is_there
    experiment, saved = saved_at(folder, 12)
    own, before = saved.own_teacher, [networks[step] for step in (4, 8, 12)]
    assert_mean(own, before, experiment, experiment.task.model, 12)
    # It stays as it is while the run learns from it.
    later = saved_at(folder, 24)[1].own_teacher
    jax.tree.map(np.testing.assert_array_equal, own, later)


@pytest.mark.slow
def test_it_is_learned_from_and_sends_one_mean_of_statistics(whole, tmp_path):
    folder, taught, _ = whole
    alone = train(of_itself(distill={"teacher": ""}), tmp_path)
    assert np.abs(logits_of(alone) - logits_of(taught)).max() > 1e-2
    programs = saved_at(folder, 12)[0].current.programs
    sent = wire_bytes(
        programs.network.collectives(programs.abstract_state()),
        dict(host=2, device=4),
    )
    more = taught.summary["host_wire_bytes"] - alone.summary["host_wire_bytes"]
    assert more == sent["host"] > 0


@pytest.mark.slow
def test_its_answers_are_work_of_the_run(whole):
    """It is asked in steps 12 to 27; channels are cut out after step 20 of 32."""
    summary = whole[1].summary
    dense, kept = summary["macs_dense"], summary["macs_kept"]
    assert summary["shrink_step"] == 20
    assert summary["training_macs"] == 32 * ((20 + 16) * dense + 12 * kept)
    assert summary["training_macs_dense"] == 32 * 32 * dense


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", [8, 16, 24])
@pytest.mark.slow
def test_a_run_goes_on_with_the_teacher_it_had(whole, tmp_path, step):
    """While it gathers networks, learns from them at full width, and small."""
    folder, result, _ = whole
    part = shutil.copytree(folder, tmp_path / "part")
    (part / "summary.json").unlink()
    for checkpoint in (part / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    assert load_trained(part).step == step
    resumed = train(of_itself(), part)
    np.testing.assert_array_equal(logits_of(result), logits_of(resumed))


@pytest.mark.rotates
def test_any_mesh_learns_alike(whole, tmp_path):
    values = of_itself(topology={"simulated": "2x4"})
    found = logits_of(train(values, tmp_path))
    np.testing.assert_allclose(found, logits_of(whole[1]), atol=2e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"name": "local_sgd"}, "sparsity": PRUNED}, "removes none"),
        ({"sparsity": {"sparsity": 0.0}}, "removes none"),
        ({"sparsity": {**PRUNED, "start_share": 0.0}}, "sparsity.start_share"),
        ({"distill": {**TAUGHT, "until_share": 0.3}}, "distill.until_share=0.3"),
        ({"distill": {**TAUGHT, "average_share": 2.0}}, "average_share=2.0"),
    ],
)
def test_means_that_cannot_be_are_refused(tmp_path, changes, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        train(of_itself(**changes), tmp_path / "x")
    assert not (tmp_path / "x").exists()
