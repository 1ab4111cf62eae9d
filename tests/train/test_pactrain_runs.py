"""Whole runs with PacTrain: pruned once, packed once that is safe, small at the end."""

import importlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import merged, rows_of, settings

NUM_STEPS = 8
RESUMED_AT = 4


def pactrain(**changes):
    """Settings of a short run on 2 x 4 devices."""
    values = settings(
        run={
            "steps": NUM_STEPS,
            "log_every_steps": 1,
            "checkpoint_every_steps": 4,
            "checkpoints_kept": 9,
        },
    )
    values["method"] = {"name": "pactrain"}
    return merged(values, changes)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pactrain") / "run"
    return train(pactrain(), workdir), workdir


def step_bytes(workdir):
    """Bytes over the host axis that each step after the first has sent."""
    sent = [row["host_wire_bytes"] for row in rows_of(workdir) if "loss" in row]
    return np.diff(sent)


@pytest.mark.slow
def test_network_is_small_at_the_end(whole_run):
    summary = whole_run[0].summary
    assert summary["channel_sparsity"] == 0.5
    assert summary["params_kept"] / summary["params_dense"] < 0.3
    assert summary["host_payload_bytes_steady"] == 4 * summary["params_kept"]
    assert summary["shrink_max_abs_error"] < 1e-4
    assert summary["num_rounds"] == NUM_STEPS
    assert {row["sparsity"] for row in rows_of(whole_run[1])} == {0.5}


@pytest.mark.slow
def test_first_step_is_dense_and_the_others_are_packed(whole_run):
    result, workdir = whole_run
    dense, packed = (4 * result.summary[key] for key in ("params_dense", "params_kept"))
    # Of two hosts, each sends as much as it has; reports are a few numbers more.
    assert np.all(step_bytes(workdir) - packed >= 0)
    assert np.all(step_bytes(workdir) - packed < 300)
    first = rows_of(workdir)[0]["host_wire_bytes"]
    # One gradient and the scores of channels for the choice, one gradient of the step.
    assert 2 * dense < first < 2 * dense + 1500


@pytest.mark.slow
def test_a_resumed_run_is_not_pruned_again(whole_run, tmp_path):
    result, workdir = whole_run
    again = tmp_path / "again"
    shutil.copytree(workdir, again)
    (again / "summary.json").unlink()
    for folder in (again / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > RESUMED_AT:
            shutil.rmtree(folder)
    resumed = train(pactrain(), again)
    for a, b in zip(
        jax.tree.leaves(resumed.network.params),
        jax.tree.leaves(result.network.params), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    for key in ("test_loss", "host_wire_bytes", "num_rounds", "channel_sparsity"):
        assert resumed.summary[key] == result.summary[key], key


@pytest.mark.slow
def test_hosts_that_disagree_go_on_densely(monkeypatch, tmp_path):
    module = importlib.import_module("prunex_jax.methods.pactrain.method")
    monkeypatch.setattr(module, "hosts_agree", lambda *args: jnp.zeros((), bool))
    values = pactrain(run={"steps": 4}, method={"pactrain": {"stable_steps": 2}})
    result = train(values, tmp_path / "run")
    dense = 4 * result.summary["params_dense"]
    assert np.all(step_bytes(tmp_path / "run") >= dense)
    assert result.summary["channel_sparsity"] == 0.5


@pytest.mark.slow
def test_tracker_waits_as_long_as_it_is_told(tmp_path):
    values = pactrain(run={"steps": 5}, method={"pactrain": {"stable_steps": 3}})
    result = train(values, tmp_path / "run")
    dense = 4 * result.summary["params_dense"]
    is_dense = step_bytes(tmp_path / "run") >= dense
    assert is_dense.tolist() == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "score", [pytest.param("grasp", marks=pytest.mark.slow), "magnitude"]
)
def test_single_weights_stay_dead(score, tmp_path):
    method = {"pactrain": {"structure": "weights", "density": 0.25, "score": score}}
    values = pactrain(run={"steps": 3}, method=method)
    result = train(values, tmp_path / "run")
    kernels = [x for x in jax.tree.leaves(result.network.params) if np.ndim(x) > 1]
    alive = sum(int(np.sum(x != 0)) for x in kernels)
    assert alive == round(0.25 * sum(x.size for x in kernels))
    assert result.summary["channel_sparsity"] == 0.0
    assert result.summary["params_kept"] == result.summary["params_dense"]


@pytest.mark.slow
def test_methods_before_and_after(tmp_path):
    """Momentum that the first method leaves is masked; the last trains what is left."""
    schedule = ("dense", "pactrain @ step 3", "local_sgd @ step 5")
    result = train(pactrain(method={"schedule": schedule}), tmp_path / "run")
    summary = result.summary
    assert summary["channel_sparsity"] == 0.5
    assert summary["shrink_max_abs_error"] < 1e-4
    found = {row["step"]: row["sparsity"] for row in rows_of(tmp_path / "run")}
    assert [found[step] for step in (3, 4, 5, 8)] == [0.0, 0.5, 0.5, 0.5]


def test_a_global_budget_is_refused():
    config = resolve_config(pactrain(sparsity={"budget": "global"}))
    with pytest.raises(UserError, match="budget='global'"):
        make_experiment(config, make_topology(config.topology.layout))


def test_shrinking_in_mid_run_is_refused_with_the_reason():
    config = resolve_config(pactrain(sparsity={"shrink_share": 0.5}))
    with pytest.raises(UserError, match="prunes before its first step"):
        make_experiment(config, make_topology(config.topology.layout))


@pytest.mark.slow
def test_summary_is_complete(whole_run):
    saved = json.loads((whole_run[1] / "summary.json").read_text())
    assert saved["method"] == "pactrain"
    assert saved["macs_kept"] < 0.35 * saved["macs_dense"]
