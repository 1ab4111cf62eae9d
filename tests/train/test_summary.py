"""The summary of a run: its keys in their order, and how its numbers follow."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.environment import environment
from prunex_jax.base.errors import TrainingDivergedError
from prunex_jax.mesh import HOST_AXIS, make_topology, peak_flops
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.build.work import speed_of
from prunex_jax.train.changes.transitions import experiment_at
from prunex_jax.train.console import start_screen
from prunex_jax.train.records.folder import SUMMARY_KEYS
from prunex_jax.train.records.scores import evaluate_split
from prunex_jax.train.records.summary import finish
from prunex_jax.train.steps.clock import Clock, ClockTotals
from prunex_jax.train.steps.position import Handover, RunPosition
from tests.helpers.tiny_runs import merged, settings

# As other programs find them in summary.json.
KEYS = """method steps seed hosts devices_per_host validation_accuracy validation_loss
test_accuracy test_loss params_dense params_kept macs_dense macs_kept training_macs
training_macs_dense examples_seen channels_kept channel_sparsity shrink_max_abs_error
shrink_step
host_wire_bytes host_wire_bytes_dense device_wire_bytes host_wire_ratio
host_payload_bytes_steady host_payload_bytes_dense host_payload_ratio num_rounds
num_compilations seconds_total seconds_per_step_median
seconds_per_step_median_masked flops_per_second flops_utilisation
warnings""".split()
CLOCK = ClockTotals(50.0, 6.0, 12, (0.5, 0.25, 0.25))


def experiment_of(**changes):
    config = resolve_config(merged(settings(data={"batch_size": 8}), changes))
    return make_experiment(config, make_topology("2", devices=jax.devices()[:4]))


def finished(experiment, **position):
    """The result of a run that has only been born."""
    state = experiment.current.programs.init(jax.random.key(0))
    counts = position.pop("keep_counts", experiment.channels.sizes)
    place = RunPosition(counts, step=experiment.num_steps, **position)
    clock = Clock(CLOCK, now=lambda: 7.0)
    return finish(experiment, place, clock, state, Path("run"))


@pytest.fixture(scope="module")
def dense():
    experiment = experiment_of(method={"name": "dense"})
    experiment.ledger.wire_bytes[HOST_AXIS] = 1000.0
    return experiment, finished(experiment, num_rounds=26)


def test_keys_are_those_that_others_read(dense):
    _, result = dense
    assert list(result.summary) == KEYS
    assert set(SUMMARY_KEYS) <= set(KEYS)


def test_sizes_and_bytes_of_a_dense_run(dense):
    experiment, result = dense
    summary = result.summary
    count = sum(leaf.size for leaf in jax.tree.leaves(result.network.params))
    assert summary["params_dense"] == summary["params_kept"] == count
    assert summary["macs_dense"] == summary["macs_kept"] > 0
    assert summary["training_macs"] == 26 * 8 * summary["macs_dense"]
    assert summary["training_macs"] == summary["training_macs_dense"]
    assert summary["channel_sparsity"] == summary["shrink_max_abs_error"] == 0.0
    assert summary["shrink_step"] is None and result.masks == {}
    assert summary["host_wire_bytes_dense"] == 26 * experiment.dense_host_bytes_per_step
    ratio = summary["host_wire_bytes"] / summary["host_wire_bytes_dense"]
    assert summary["host_wire_ratio"] == ratio
    assert summary["host_wire_bytes"] > 1000.0, "evaluation is counted too"
    assert summary["host_payload_bytes_steady"] == 4 * count
    assert summary["host_payload_ratio"] == 1.0
    assert summary["num_rounds"] == 26
    assert summary["num_compilations"] == experiment.ledger.num_compilations > 0


def test_times_go_on_from_the_clock(dense):
    summary = dense[1].summary
    assert summary["seconds_total"] == 50.0
    assert summary["seconds_per_step_median"] == 0.25
    assert summary["seconds_per_step_median_masked"] is None


def test_both_splits_are_scored(dense):
    experiment, result = dense
    for split in ("validation", "test"):
        data = getattr(experiment.task.dataset, split)
        images = data.normalization.apply(data.read(np.arange(len(data)))[0])
        logits = np.asarray(result.network.logits(jnp.asarray(images)))
        right = np.argmax(logits, axis=-1) == data.labels()
        accuracy = result.summary[f"{split}_accuracy"]
        assert accuracy == pytest.approx(right.mean(), abs=2 / len(data))


def test_a_loss_of_held_out_examples_that_is_no_number_ends_the_run(dense):
    experiment, _ = dense
    split = experiment.task.dataset.validation

    def broken(batch):
        return {"loss": jnp.nan, "correct": 1.0, "examples": 8.0}

    with pytest.raises(TrainingDivergedError, match="loss of the validation split is"):
        evaluate_split(experiment, broken, (), split)


def test_rounding_that_moves_the_share_is_a_warning():
    experiment = experiment_of(sparsity={"sparsity": 0.3, "round_to": 32})
    (warning,) = experiment.warnings
    assert "sparsity.sparsity=0.3 asks for 30.0%" in warning
    assert f"warning   {warning}" in start_screen_of(experiment)
    assert finished(experiment).summary["warnings"] == [warning]
    (nothing,) = experiment_of(sparsity={"sparsity": 0.01}).warnings
    assert nothing.startswith("0.0% of the channels will be removed")
    assert experiment_of(sparsity={"sparsity": 0.5}).warnings == ()
    dense = experiment_of(sparsity={"sparsity": 0.3}, method={"name": "dense"})
    assert dense.warnings == ()


def test_a_result_is_printed_as_a_short_table(dense):
    experiment = experiment_of(method={"name": "pactrain"})
    result = finished(experiment)
    first, *groups, size, sent = str(result).splitlines()
    assert first.startswith("pactrain, 26 steps: test accuracy 0.")
    for line, (name, (kept, total)) in zip(
        groups, result.summary["channels_kept"].items(), strict=True
    ):
        assert line.split() == [name, str(kept), "of", str(total)]
    assert f"{result.summary['params_kept']:,} of" in size and "dense" in sent
    assert repr(result) == str(result), "in a notebook, too"
    _, other = dense
    assert f"{other.summary['host_wire_bytes']:,.0f} bytes sent per host" in str(other)


def start_screen_of(experiment):
    described = environment(experiment.topology.describe())
    return start_screen(experiment, "run", described, "no launcher found")


def test_the_start_screen_says_what_every_group_keeps():
    experiment = experiment_of(sparsity={"sparsity": 0.5})
    said, counts = start_screen_of(experiment), experiment.final_counts
    for name, size in experiment.channels.sizes.items():
        assert f"{counts[name]} of {size} {name}" in said
    deeper = experiment_of(model={"name": "resnet20"})
    grouped = "8 of 16 in 4 groups, 16 of 32 in 4 groups, 32 of 64 in 4 groups"
    assert f"kept      channels at the end: {grouped}" in start_screen_of(deeper)
    ranked = experiment_of(sparsity={"budget": "global", "criterion": "taylor"})
    assert "kept      ranked over all groups in training" in start_screen_of(ranked)
    dense = experiment_of(method={"name": "dense"})
    assert "\nkept " not in start_screen_of(dense)


def test_a_test_split_that_is_not_read_is_null(dense):
    experiment, _ = dense
    run = dataclasses.replace(experiment.config.run, read_test=False)
    config = dataclasses.replace(experiment.config, run=run)
    summary = finished(dataclasses.replace(experiment, config=config)).summary
    assert (summary["test_accuracy"], summary["test_loss"]) == (None, None)
    assert summary["validation_accuracy"] is not None
    assert list(summary) == KEYS


@pytest.mark.slow
def test_a_run_after_its_cut_says_when_and_how_exact():
    full = experiment_of(
        sparsity={"shrink_share": 0.8, "freeze_share": 0.4, "num_stairs": 1}
    )
    kept = {
        name: tuple(range(count)) for name, count in full.channels.keep_counts.items()
    }
    handover = Handover(20, kept, 3e-6, 0.75)
    counts = full.channels.keep_counts
    position = RunPosition(counts, handover=handover)
    small = experiment_at(full, position)
    result = finished(small, keep_counts=counts, handover=handover)
    summary = result.summary
    assert summary["shrink_step"] == 20
    assert summary["shrink_max_abs_error"] == 3e-6
    assert summary["seconds_per_step_median_masked"] == 0.75
    assert summary["channel_sparsity"] == 0.5
    assert summary["params_kept"] < 0.35 * summary["params_dense"]
    assert summary["macs_kept"] < 0.5 * summary["macs_dense"]
    assert summary["host_payload_bytes_steady"] == 4 * summary["params_kept"]
    assert {n: m.sum() for n, m in result.masks.items()} == dict(counts)
    dense, kept_macs = summary["macs_dense"], summary["macs_kept"]
    assert summary["training_macs"] == 8 * (20 * dense + 6 * kept_macs)
    assert summary["training_macs_dense"] == 8 * 26 * dense


def test_speed_is_that_of_forward_and_backward_passes(dense, monkeypatch):
    summary = dense[1].summary
    flops = 6 * 8 * summary["macs_dense"]  # of a step, with 8 examples
    assert summary["flops_per_second"] == pytest.approx(flops / 0.25)
    assert summary["flops_utilisation"] is None, "nothing is known of CPUs"
    assert summary["examples_seen"] == 26 * 8
    monkeypatch.setattr("prunex_jax.train.build.work.peak_flops", lambda kind: 1e9)
    found = speed_of(dense[0], 0.25)["flops_utilisation"]
    assert found == pytest.approx(flops / 0.25 / 4e9)  # of 4 devices


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_names_of_devices(kind, tera):
    found = peak_flops(kind)
    assert found == (None if tera is None else pytest.approx(tera * 1e12))
