"""Runs that refit what reads removed channels, on every mesh and resumed anywhere."""

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.comm import wire_bytes
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.changes.repair import sent_by_repair
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import ROUNDING, merged, rows_of, settings

# Half of the channels go at once, in the round that ends at step 68.
BEFORE, REMOVED, NUM_STEPS = 64, 68, 80
VALUES = settings(
    topology={"layout": "2"},
    sparsity={
        "start_share": 0.8,
        "freeze_share": 0.9,
        "num_stairs": 1,
        "repair_batches": 3,
    },
    method={"hsadmm": {"sync_period": 4}},
    optimizer={"learning_rate": 0.05},
    run={
        "steps": NUM_STEPS,
        "log_every_steps": 4,
        "eval_every_steps": 4,
        "checkpoint_every_steps": 4,
        "checkpoints_kept": 2,
    },
)


def states_of(values, folder):
    """The states after every fourth step, and the rows of the log."""
    states = {}

    def keep(progress, state):
        if progress.step % 4 == 0:
            states[progress.step] = jax.device_get(state)

    train(values, folder, after_step=[keep])
    return states, rows_of(folder)


@pytest.fixture(scope="module")
def repaired(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repaired")
    return *states_of(VALUES, folder), folder


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """The same run without repair."""
    values = merged(VALUES, {"sparsity": {"repair_batches": 0}})
    return states_of(values, tmp_path_factory.mktemp("never"))


def losses(rows):
    return {r["step"]: r["validation_loss"] for r in rows if "validation_loss" in r}


@pytest.mark.slow
def test_a_network_that_loses_channels_is_nearer_to_what_it_was(repaired, never):
    states, rows, _ = repaired
    others, other_rows = never
    kept = states[REMOVED].opt_state.masks
    for name, mask in kept.items():
        assert 0 < mask.sum() < mask.size
        np.testing.assert_array_equal(mask, others[REMOVED].opt_state.masks[name])
    before, after, without = (
        losses(found)[step]
        for found, step in ((rows, BEFORE), (rows, REMOVED), (other_rows, REMOVED))
    )
    assert losses(other_rows)[BEFORE] == before
    assert abs(after - before) < 0.5 * abs(without - before)


@pytest.mark.slow
def test_copies_are_at_the_consensus_and_what_went_is_zero(repaired):
    state = repaired[0][REMOVED]
    consensus = flatten_by_path(state.opt_state.global_consensus)
    for path, copies in flatten_by_path(state.params).items():
        np.testing.assert_array_equal(copies, np.stack([consensus[path]] * 2))
    kernel = consensus["blocks/0/conv1/kernel"]
    dead = ~state.opt_state.masks["blocks/0/conv1"]
    assert dead.any() and not kernel[..., dead].any() and kernel[..., ~dead].any()


@pytest.mark.slow
def test_its_bytes_are_in_the_ledger(repaired, never):
    """Half of (kept inputs)^2, and (kept inputs) x outputs; and statistics."""
    with_, without = (
        {row["step"]: row["host_wire_bytes"] for row in rows}
        for rows in (repaired[1], never[1])
    )
    assert with_[BEFORE] == without[BEFORE]
    state = repaired[0][REMOVED]
    num_sums = 0
    for path, leaf in flatten_by_path(state.opt_state.global_consensus).items():
        if path.endswith("kernel"):
            rows = leaf.reshape(-1, leaf.shape[-1])  # Taps and inputs.
            kept = int(rows.any(1).sum())
            if kept < len(rows):
                num_sums += (kept + 1) // 2 * (kept + 1) + kept * rows.shape[1]
    num_statistics = sum(x[0, 0].size for x in jax.tree.leaves(state.statistics))
    # Those of the network as it was, and those that it has of its own.
    sent = num_sums + 2 * num_statistics
    added = with_[REMOVED] - without[REMOVED]
    assert added == pytest.approx(4 * sent, rel=0.01)  # But for padding.
    experiment = make_experiment(resolve_config(VALUES), make_topology("2"))
    programs, counts = experiment.current.programs, experiment.channels.keep_counts
    listed = [
        *programs.network.collectives(programs.abstract_state()),
        *sent_by_repair(experiment, counts),
    ]
    assert added == wire_bytes(listed, dict(experiment.mesh.shape))["host"]


@pytest.mark.rotates
@pytest.mark.parametrize("stopped_at", [BEFORE, REMOVED])
def test_a_run_goes_on_to_the_same_bits(repaired, stopped_at, tmp_path):
    class Stopped(Exception):
        pass

    def stop(progress, state):
        if progress.step == stopped_at:
            raise Stopped

    with pytest.raises(Stopped):
        train(VALUES, tmp_path, after_step=[stop])
    states, _ = states_of(VALUES, tmp_path)
    wanted = flatten_by_path(repaired[0][NUM_STEPS].params)
    for path, leaf in flatten_by_path(states[NUM_STEPS].params).items():
        np.testing.assert_array_equal(leaf, wanted[path])


@pytest.mark.rotates
@pytest.mark.parametrize(
    "changes",
    [
        {"topology": {"shard": "state"}},
        {"topology": {"shard": "params"}},
        {"topology": {"layout": "1", "simulated": "2x4"}},
    ],
)
def test_it_is_the_same_on_other_meshes(repaired, changes, tmp_path):
    def networks(states):
        return [states[step].opt_state.global_consensus for step in (BEFORE, REMOVED)]

    states, rows = states_of(merged(VALUES, changes), tmp_path)
    found, wanted = losses(rows), losses(repaired[1])
    assert found[BEFORE] == pytest.approx(wanted[BEFORE], rel=1e-3)
    assert found[REMOVED] == pytest.approx(wanted[REMOVED], rel=0.02)
    if "simulated" in changes["topology"]:
        (_, before), (_, after) = map(networks, (states, repaired[0]))
        for path, leaf in flatten_by_path(before).items():
            apart = np.linalg.norm(leaf - flatten_by_path(after)[path])
            assert apart < 50 * ROUNDING * max(1.0, np.linalg.norm(leaf))


@pytest.mark.rotates
@pytest.mark.parametrize("preset", ["leaky", "paper"])
def test_forms_with_duals_are_repaired(preset, tmp_path):
    values = merged(
        VALUES, {"method": {"hsadmm": {"sync_period": 4, "preset": preset}}}
    )
    _, rows = states_of(values, tmp_path / "with")
    never = merged(values, {"sparsity": {"repair_batches": 0}})
    _, other_rows = states_of(never, tmp_path / "without")
    assert losses(rows)[REMOVED] < losses(other_rows)[REMOVED]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": {"name": "dense"}}, "method dense has none that do"),
        ({"method": {"name": "local_sgd"}}, "method local_sgd has none that do"),
        ({"sparsity": {"repair_batches": -1}}, "repair_batches"),
    ],
)
def test_repairs_that_mean_nothing_are_refused(changes, text):
    with pytest.raises(UserError, match=text):
        config = resolve_config(merged(VALUES, changes))
        make_experiment(config, make_topology("2"))
