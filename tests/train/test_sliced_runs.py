"""Runs whose state lies in slices go as others do, and go on in other slices."""

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.train import train
from tests.helpers.tiny_runs import (
    THROUGH_A_CUT,
    StopAtOnce,
    merged,
    rows_of,
    stop_after,
)

VALUES = merged(
    THROUGH_A_CUT,
    {
        "topology": {"shard": "state"},
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "clip_norm": 1.0},
    },
)
# Losses of runs that differ in how they round; they part slowly.
ROUNDING = 2e-3


def losses(workdir):
    return {row["step"]: row["loss"] for row in rows_of(workdir)}


def assert_alike(workdir, other, since=0):
    found, wanted = losses(workdir), losses(other)
    assert set(found) <= set(wanted) and max(found) == max(wanted)
    for step, loss in found.items():
        if step > since:
            assert loss == pytest.approx(wanted[step], rel=ROUNDING), step


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sliced")
    return workdir, train(VALUES, workdir)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "params"])
def test_a_run_through_moving_masks_and_a_cut_is_the_same(sliced, shard, tmp_path):
    workdir, result = sliced
    whole = train(merged(VALUES, {"topology": {"shard": shard}}), tmp_path)
    assert_alike(workdir, tmp_path)
    for key in ("params_kept", "macs_kept", "num_rounds"):
        assert result.summary[key] == whole.summary[key], key


def gone_on(workdir, before, after, stopped_at=18):
    """A run that is stopped on one mesh, in some slices, and goes on in others."""
    with pytest.raises(StopAtOnce):
        chosen = merged(VALUES, {"topology": before})
        train(chosen, workdir, after_step=[stop_after(stopped_at)])
    train(merged(VALUES, {"topology": after}), workdir)
    return workdir


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["state", "none", "params"])
@pytest.mark.parametrize("stopped_at", [18, 27])
def test_a_run_goes_on_in_other_slices(sliced, shard, stopped_at, tmp_path):
    """Before the cut, and after it; checkpoints are of every fifth step."""
    gone_on(tmp_path, {}, {"shard": shard}, stopped_at)
    assert_alike(tmp_path, sliced[0])


@pytest.mark.rotates
@pytest.mark.parametrize("shard", ["params", "state"])
@pytest.mark.parametrize("meshes", [("", "2x2"), ("2x2", "")], ids=["fewer", "more"])
def test_a_run_goes_on_with_other_devices(meshes, shard, tmp_path):
    """As without slices: batch statistics are those of a device, so runs differ."""
    before, after = ({"simulated": mesh} for mesh in meshes)
    whole, in_slices = (
        gone_on(
            tmp_path / "-".join(pair),
            {**before, "shard": pair[0]},
            {**after, "shard": pair[1]},
        )
        for pair in (("none", "none"), ("state", shard))
    )
    assert_alike(in_slices, whole)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["params", "state"])
def test_the_next_method_takes_slices_over(shard, tmp_path):
    """The inner optimizer's moments are handed on, slice by slice."""
    values = merged(VALUES, {"method": {"schedule": ("dense", "local_sgd @ 0.5")}})
    values = merged(values, {"sparsity": {"sparsity": 0.0, "shrink_share": 1.0}})
    for each in (shard, "none"):
        train(merged(values, {"topology": {"shard": each}}), tmp_path / each)
    assert_alike(tmp_path / shard, tmp_path / "none")


@pytest.mark.slow
def test_optimizers_and_methods_of_whole_parameters_are_refused(tmp_path):
    muon = merged(VALUES, {"optimizer": {"name": "muon", "clip_norm": 0.0}})
    with pytest.raises(UserError, match="looks at whole parameters"):
        train(muon, tmp_path)
    weights = {"name": "pactrain", "pactrain": {"structure": "weights"}}
    with pytest.raises(UserError, match="structure='weights'"):
        train(merged(VALUES, {"method": weights}), tmp_path)


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["powersgd", "topk", "dgc", "importance", "pactrain"])
def test_methods_that_send_in_every_step_go_on_in_other_slices(name, tmp_path):
    """Slices choose entries of their own, so that such runs differ somewhat."""
    values = merged(
        VALUES,
        {
            "method": {"name": name, "importance": {"refresh_period": 4}},
            "optimizer": {"name": "sgd", "clip_norm": 0.0, "learning_rate": 0.05},
            "run": {"steps": 24},
        },
    )
    sparsity = 0.5 if name == "pactrain" else 0.0
    at_end = {"sparsity": sparsity, "shrink_share": 1.0}
    values = merged(values, {"sparsity": at_end})
    train(values, tmp_path / "state")
    train(merged(values, {"topology": {"shard": "none"}}), tmp_path / "none")
    for before, after in (("params", "none"), ("none", "state")):
        folder = tmp_path / f"{before}-{after}"
        with pytest.raises(StopAtOnce):
            chosen = merged(values, {"topology": {"shard": before}})
            train(chosen, folder, after_step=[stop_after(12)])
        train(merged(values, {"topology": {"shard": after}}), folder)
        rounding = 0.3 if name in ("topk", "dgc", "importance") else ROUNDING
        found, wanted = losses(folder), losses(tmp_path / "none")
        for step, loss in found.items():
            assert loss == pytest.approx(wanted[step], rel=rounding), step
    fewer = tmp_path / "fewer"
    with pytest.raises(StopAtOnce):
        train(values, fewer, after_step=[stop_after(12)])
    train(merged(values, {"topology": {"simulated": "2x2"}}), fewer)
    assert max(losses(fewer)) == 24
