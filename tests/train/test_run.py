"""Whole runs: what they leave behind, and that nothing can make them differ."""

import json
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

import prunex_jax.train.records.scores
from prunex_jax.base.command import EXIT_STOPPED
from prunex_jax.base.errors import TrainingDivergedError, UserError
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.records.checkpoint import Checkpointer, saved_steps
from prunex_jax.train.records.folder import SUMMARY_KEYS, RunFolder
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import (
    SETTINGS,
    merged,
    rows_of,
    settings,
    start,
    wait_for_rows,
)


def final_params(values: dict, workdir: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, read in this process."""
    config = resolve_config(values)
    experiment = make_experiment(config, make_topology(config.topology.layout))
    with Checkpointer(workdir / "checkpoints", keep=9) as checkpointer:
        state, extra = checkpointer.restore(
            experiment.current.programs.abstract_state()
        )
    assert extra["step"] == config.run.steps, "the run has not ended"
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """One run of a tiny network without interruption, in this process."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return train(SETTINGS, workdir), workdir


def test_summary_says_what_the_contract_asks(whole_run):
    result, workdir = whole_run
    summary = json.loads((workdir / "summary.json").read_text())
    assert set(SUMMARY_KEYS) <= set(summary)
    assert (summary["hosts"], summary["devices_per_host"]) == (2, 4)
    assert summary["steps"] == 26
    assert summary["num_rounds"] == 7, "six whole rounds and a short one at the end"
    assert summary["params_kept"] == sum(
        leaf.size for leaf in jax.tree.leaves(result.network.params)
    )
    assert summary["params_kept"] / summary["params_dense"] < 0.3
    assert summary["channel_sparsity"] == 0.5
    assert summary["shrink_max_abs_error"] < 1e-4
    # The compact payload is exactly the parameters that are kept.
    assert summary["host_payload_bytes_steady"] == 4 * summary["params_kept"]


def test_bytes_add_up_from_the_formulas(whole_run):
    result, _ = whole_run
    summary = result.summary
    # Payload 2 (M - 1) / M = 1 per host; padded to a multiple of four devices.
    smallest = summary["host_payload_bytes_steady"] * summary["num_rounds"]
    dense = summary["params_dense"] * 4 * summary["num_rounds"]
    assert smallest < summary["host_wire_bytes"] < dense
    padded = 4 * -(-summary["params_dense"] // 4)
    assert summary["host_wire_bytes_dense"] == 4 * padded * summary["steps"]


def test_metrics_are_one_row_per_logged_step(whole_run):
    _, workdir = whole_run
    rows = rows_of(workdir)
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 21, 24, 26]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"host_drift", "primal_residual", "sparsity"} <= set(rows[0])


@pytest.mark.slow
def test_same_command_again_changes_nothing(whole_run, monkeypatch):
    """Neither files nor figures; the test split is read once."""
    result, workdir = whole_run
    names = ("summary.json", "metrics.jsonl", "config.json")
    before = {name: (workdir / name).read_bytes() for name in names}
    with monkeypatch.context() as patched:
        patched.setattr("prunex_jax.train.records.scores.evaluation_batches", None)
        again = train(SETTINGS, workdir)
    assert before == {name: (workdir / name).read_bytes() for name in names}
    assert again.summary == json.loads(before["summary.json"])
    for found, wanted in zip(
        *(jax.tree.leaves(r.network.params) for r in (again, result)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    # A run that ended while its summary was not written yet says the same.
    (workdir / "summary.json").unlink()
    same = train(SETTINGS, workdir).summary
    timed = [key for key in same if "second" in key or key == "num_compilations"]
    for key in same.keys() - set(timed):
        assert same[key] == result.summary[key], key


@pytest.mark.slow
def test_resumed_run_equals_one_never_stopped(tmp_path):
    """Asked to stop, then killed, then finished: the same bits as in one go."""
    reference_dir = tmp_path / "whole"
    train(SETTINGS, reference_dir)
    values = settings(topology={"cpu_devices": 8})
    workdir = tmp_path / "run"

    stopped = start(tmp_path, values, workdir)
    wait_for_rows(stopped, workdir, 2)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == EXIT_STOPPED, output
    assert "stopped at step" in output

    killed = start(tmp_path, values, workdir)
    wait_for_rows(killed, workdir, 5)
    killed.kill()
    killed.communicate(timeout=120)
    assert not (workdir / "summary.json").exists(), "it was to be killed before the end"

    finished = start(tmp_path, values, workdir)
    output, _ = finished.communicate(timeout=240)
    assert finished.returncode == 0, output
    assert "resumed at step" in output

    expected = final_params(SETTINGS, reference_dir)
    actual = final_params(SETTINGS, workdir)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)
    steps = [row["step"] for row in rows_of(workdir)]
    assert steps == [3, 6, 9, 12, 15, 18, 21, 24, 26], "no row twice, none missing"


VARIANTS = {
    "global budget": {"sparsity": {"budget": "global"}},
    "global budget of what gradients say": {
        "sparsity": {
            "budget": "global",
            "criterion": "taylor",
            "max_group_sparsity": 0.75,
        }
    },
    "norms over a host": {"model": {"norm_scope": "host"}},
    "paper, copy per device": {
        "method": {
            "hsadmm": {
                "preset": "paper",
                "device_level": "consensus",
            }
        }
    },
    "leaky, adamw, float16 wire": {
        "method": {"hsadmm": {"preset": "leaky"}, "wire_dtype": "float16"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 1.0},
    },
    "int8 wire in buckets": {"method": {"wire_dtype": "int8", "bucket_bytes": 4000}},
    "the largest in two bits": {
        "method": {"wire_dtype": "int2", "rounds": {"top_k": 256}}
    },
    "bfloat16, one host": {
        "model": {"compute_dtype": "bfloat16"},
        "topology": {"layout": "1"},
    },
    "dense, eight hosts": {"method": {"name": "dense"}, "topology": {"layout": "8"}},
    "dense, flat int8": {
        "method": {"name": "dense", "dense": {"levels": "flat"}, "wire_dtype": "int8"}
    },
    "vgg": {
        "model": {"name": "vgg16", "width": 0.125},
        "data": {"name": "synthetic", "image_size": 32},
    },
}


QUICKER = (
    *("int8 wire in buckets", "the largest in two bits"),
    *("dense, eight hosts", "vgg"),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow if name in QUICKER else pytest.mark.rotates,
        )
        for name in VARIANTS
    ],
)
def test_variants_train_to_the_end(variant, tmp_path):
    values = settings(**VARIANTS[variant])
    result = train(values, tmp_path / "run")
    summary = result.summary
    assert np.isfinite(summary["test_loss"])
    assert summary["shrink_max_abs_error"] < 0.05, "bfloat16 rounds to 3 digits"
    if summary["method"] == "dense":
        assert summary["params_kept"] == summary["params_dense"]
    else:
        assert summary["params_kept"] / summary["params_dense"] < 0.4
    if summary["hosts"] == 1:
        assert summary["host_wire_bytes"] == 0


def test_divergence_names_the_step_and_keeps_the_last_checkpoint(tmp_path):
    values = settings(
        optimizer={"learning_rate": 1e30, "warmup_share": 0.5},
        run={"checkpoint_every_steps": 1},
    )
    message = r"since step \d+; the checkpoint of step (\d+)"
    with pytest.raises(TrainingDivergedError, match=message) as raised:
        train(values, tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    newest = max(saved_steps(tmp_path / "run" / "checkpoints"))
    named = re.search(message, str(raised.value))
    assert named is not None and int(named[1]) == newest, "also one in flight"


@pytest.mark.slow
def test_copies_that_leave_their_consensus_stop_the_run(tmp_path):
    """Every loss is finite here; only the drift says that the run is lost."""
    values = settings(
        optimizer={"learning_rate": 0.5},
        run={"checkpoint_every_steps": 1, "max_host_drift": 1e-3},
    )
    with pytest.raises(TrainingDivergedError, match=r"left their consensus.*most of"):
        train(values, tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert all(row["host_drift"] <= 1e-3 for row in rows_of(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_that_chooses_settings_leaves_the_test_split_alone(tmp_path, monkeypatch):
    def refuse(split, *args, **kwargs):
        assert split.name != "test"
        return evaluation_batches(split, *args, **kwargs)

    evaluation_batches = prunex_jax.train.records.scores.evaluation_batches
    monkeypatch.setattr("prunex_jax.train.records.scores.evaluation_batches", refuse)
    values = settings(run={"steps": 4, "read_test": False}, method={"name": "dense"})
    summary = train(values, tmp_path / "run").summary
    assert (summary["test_accuracy"], summary["test_loss"]) == (None, None)
    assert 0 <= summary["validation_accuracy"] <= 1
    with pytest.raises(UserError, match="nothing to score"):
        train(merged(values, {"data": {"validation_share": 0.0}}), tmp_path / "other")


def test_masks_moving_between_rounds_compile_nothing(whole_run):
    """One exchange per keep count and kind, however often the masks move."""
    result, _ = whole_run
    # init, local step, report, clear, network, evaluate; and exchanges: dense, two
    # stairs at most, freeze, frozen.
    assert result.summary["num_compilations"] <= 11


def test_another_run_in_the_folder_is_refused(whole_run):
    _, workdir = whole_run
    with pytest.raises(UserError, match="seed"):
        train({**SETTINGS, "seed": 1}, workdir)


@pytest.mark.slow
def test_a_folder_that_is_trained_into_is_left_alone(tmp_path):
    """By a second run, and for as long as the first one lives."""
    values = settings(run={"steps": 4, "log_every_steps": 2})
    refused = []

    def intrude(loop, state):
        if loop.step == 2:
            with pytest.raises(UserError, match="in use") as error:
                train(values, tmp_path / "run")
            refused.append(error.value)
        if loop.step == 3 and len(refused) == 1:
            refused.append(None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(values, tmp_path / "run", after_step=[intrude])
    result = train(values, tmp_path / "run", after_step=[intrude])
    assert result.summary["host_wire_bytes"] > 0
    steps = [row["step"] for row in RunFolder(tmp_path / "run", True).read_rows()]
    assert steps == [2, 4] and len(refused) == 3
