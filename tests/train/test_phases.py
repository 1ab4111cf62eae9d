"""Runs of several methods: what schedules may say, and what they do."""

import json
import shutil

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.mesh import make_topology
from prunex_jax.methods import method_config
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.build.rounds import Trigger, parse_phases
from prunex_jax.train.changes.transitions import change_method
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import merged, rows_of, settings

METRICS = ("loss", "accuracy")
NUM_STEPS = 24
CHANGE = 8


def scheduled(*schedule, **changes):
    """Settings of a short run on 2 x 2 devices with these methods."""
    values = settings(
        sparsity={"start_share": 0.4, "freeze_share": 0.6, "num_stairs": 1},
        run={
            "steps": NUM_STEPS,
            "log_every_steps": 4,
            "checkpoint_every_steps": 4,
            "checkpoints_kept": 9,
        },
    )
    values["method"] = {"schedule": schedule, "local_sgd": {"sync_period": 4}}
    return merged(values, changes)


def assert_same_bits(found, wanted):
    wanted = flatten_by_path(wanted)
    assert flatten_by_path(found).keys() == wanted.keys()
    for path, leaf in flatten_by_path(found).items():
        assert np.asarray(leaf).tobytes() == np.asarray(wanted[path]).tobytes(), path


def wire_bytes_by_step(workdir):
    return {row["step"]: row["host_wire_bytes"] for row in rows_of(workdir)}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("dense", "hsadm @ 0.5"), "did you mean 'hsadmm'"),
        (("dense @ 0.5",), "starts the run, so it takes no trigger"),
        (("dense", "hsadmm"), "needs a trigger"),
        (("dense", "hsadmm @ 1.5"), "between 0 and 1"),
        (("dense", "hsadmm @ often"), "'often' is not a number"),
        (("dense", "hsadmm @ los < 1"), "did you mean 'loss'"),
        (("dense", "hsadmm @ step 100"), "before the end, step 100"),
        (("dense", "diloco @ 0.5", "dense @ 0.2"), "after step 50"),
        (("dense", "hsadmm @@ 0.5"), "is not a number"),
        (("a-b",), "write method or method @ trigger"),
    ],
)
def test_what_means_nothing_is_refused(entries, message):
    with pytest.raises(UserError, match=message):
        parse_phases(method_config(schedule=entries), 100, METRICS)


def test_metrics_trigger_when_they_are_known():
    phases = parse_phases(
        method_config(schedule=("dense", "diloco@loss<0.5")), 100, METRICS
    )
    trigger = phases[1].trigger
    assert trigger == Trigger(None, "loss", False, 0.5)
    assert not trigger.is_due(10, {}) and not trigger.is_due(10, {"accuracy": 0.1})
    assert not trigger.is_due(10, {"loss": 0.5}) and trigger.is_due(10, {"loss": 0.4})


def refusal(values):
    config = resolve_config(values)
    with pytest.raises(UserError) as refused:
        make_experiment(config, make_topology(config.topology.layout))
    return str(refused.value)


def test_schedules_that_contradict_themselves_are_refused():
    twice = refusal(scheduled("hsadmm", "dense @ 0.3", "hsadmm @ 0.6"))
    assert "prunes twice" in twice
    early = refusal(scheduled("pactrain", "hsadmm @ 0.3"))
    assert "prunes twice, in pactrain and hsadmm" in early
    late = refusal(scheduled("dense", "hsadmm @ 0.9"))
    assert "starts at step 22; raise sparsity.start_share" in late
    never = refusal(scheduled("dense", "none @ 0.5", sparsity={"shrink_share": 0.7}))
    assert "method dense, none prunes none" in never


def test_parameters_that_are_not_there_are_refused():
    values = scheduled("topk")
    values["method"]["send_whole"] = ("bias", "nrom")
    assert "has 'nrom', which is part of no path" in refusal(values)


@pytest.mark.slow
def test_changing_to_the_same_method_changes_nothing(tmp_path):
    plain = train(scheduled("dense"), tmp_path / "plain")
    changed = train(scheduled("dense", f"dense @ step {CHANGE}"), tmp_path / "changed")
    assert_same_bits(changed.network.params, plain.network.params)
    assert changed.summary["method"] == "dense -> dense"
    assert changed.summary["num_rounds"] == NUM_STEPS


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Dense, pruned, and a small network that meets every four steps."""
    workdir = tmp_path_factory.mktemp("three") / "run"
    return train(three_methods(), workdir), workdir


def three_methods():
    return scheduled("dense", f"hsadmm @ step {CHANGE}", "diloco @ step 18")


@pytest.mark.slow
def test_what_is_pruned_is_cut_out_when_its_method_ends(three):
    result, workdir = three
    summary, sent = result.summary, wire_bytes_by_step(workdir)
    assert summary["method"] == "dense -> hsadmm -> diloco"
    assert summary["shrink_step"] == 18
    assert summary["shrink_max_abs_error"] < 1e-4
    assert summary["params_kept"] < 0.35 * summary["params_dense"]
    assert summary["channel_sparsity"] == 0.5
    # In every step; every 4 steps and at the end of the phase; every 4 steps.
    assert summary["num_rounds"] == 8 + 3 + 2
    dense = 4 * summary["params_dense"]
    assert 4 * dense <= sent[CHANGE] - sent[4] < 4 * dense + 2000
    # One exchange, and the mean of the momentum on the way to the next method.
    assert sent[12] - sent[CHANGE] < 2 * dense + 2000
    rows = [row for row in rows_of(workdir) if row["step"] >= 20]
    assert {row["sparsity"] for row in rows} == {0.5}


@pytest.mark.slow
def test_a_run_goes_on_from_any_of_its_phases(three, tmp_path):
    result, workdir = three
    for step in (4, CHANGE, 12, 20):
        again = tmp_path / str(step)
        shutil.copytree(workdir, again)
        (again / "summary.json").unlink()
        for folder in (again / "checkpoints").iterdir():
            if folder.name.isdigit() and int(folder.name) > step:
                shutil.rmtree(folder)
        resumed = train(three_methods(), again)
        assert_same_bits(resumed.network.params, result.network.params)
        summary = json.loads((again / "summary.json").read_text())
        for key in ("test_loss", "num_rounds", "host_wire_bytes", "shrink_step"):
            assert summary[key] == result.summary[key], (step, key)


@pytest.mark.slow
def test_what_is_pruned_at_birth_is_cut_out_when_its_method_ends(tmp_path):
    """Then the small network goes on, and moments and statistics with it."""
    schedule = ("pactrain", f"diloco @ step {CHANGE}")
    summary = train(scheduled(*schedule), tmp_path / "run").summary
    assert summary["shrink_step"] == CHANGE
    assert summary["shrink_max_abs_error"] < 1e-4
    assert summary["params_kept"] < 0.35 * summary["params_dense"]
    rows = [row for row in rows_of(tmp_path / "run") if "loss" in row]
    assert {row["sparsity"] for row in rows} == {0.5}


@pytest.mark.rotates
def test_a_metric_starts_a_phase(tmp_path):
    """At the first logged step: every loss is below a hundred."""
    schedule = ("dense", "local_sgd @ loss < 100")
    result = train(scheduled(*schedule), tmp_path / "run")
    sent = wire_bytes_by_step(tmp_path / "run")
    dense = 4 * result.summary["params_dense"]
    assert sent[4] >= 4 * dense
    assert sent[8] - sent[4] < 3 * dense, "one exchange, and the change of method"
    assert result.summary["num_rounds"] == 4 + 5


def test_momentum_and_schedules_go_on():
    """What the inner optimizer knows is the same before and after a change."""
    config = resolve_config(scheduled("dense", "local_sgd @ 0.5"))
    experiment = make_experiment(config, make_topology(config.topology.layout))
    state = experiment.current.programs.init(jax.random.key(0))
    stepped = jax.tree.map(
        lambda x: x + 3 if x.dtype == np.int32 else x + 0.25, state.opt_state
    )
    state = state._replace(opt_state=stepped)
    after, changed = change_method(experiment, state, "local_sgd")
    before = flatten_by_path(experiment.current.method.inner.get(stepped))
    found = flatten_by_path(after.current.method.inner.get(changed.opt_state))
    assert before.keys() == found.keys() and before
    for path, leaf in before.items():
        for copy in np.asarray(found[path]):
            np.testing.assert_array_equal(copy, leaf, path)
