"""Parameters in bfloat16 train as those in float32 do, but for noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.comm import Slicing, wire_bytes
from prunex_jax.train import train
from prunex_jax.train.steps.state import rounded_to_bfloat16
from tests.helpers.formulas.slices import joining
from tests.helpers.tiny_runs import (
    THROUGH_A_CUT,
    StopAtOnce,
    merged,
    rows_of,
    stop_after,
)
from tests.methods.test_contract import (
    FINAL,
    SHAPES,
    Runner,
    _targets,
    batch_of,
    pairs_of,
)
from tests.methods.test_contract import (
    train as train_contract,
)

# The spacing of bfloat16 between 2 and 4, where the largest parameters are.
SPACING = 2.0**-6
VALUES = merged(THROUGH_A_CUT, {"model": {"name": "tiny", "param_dtype": "bfloat16"}})

narrow_runner = functools.partial(Runner, param_dtype="bfloat16")


def test_rounding_keeps_the_mean_and_what_bfloat16_has():
    values = jnp.array([0.0, -0.0, 1.5, -3.0, jnp.inf, -jnp.inf, jnp.nan, 1e-39])
    found = rounded_to_bfloat16(values, jax.random.key(1)).astype(jnp.float32)
    np.testing.assert_array_equal(found[:-1], values[:-1])
    rng = np.random.default_rng(0)
    exact = rng.normal(size=50).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), 4000)
    drawn = jax.vmap(lambda key: rounded_to_bfloat16(exact, key))(keys)
    below, above = exact * (1 - 2**-7), exact * (1 + 2**-7)
    drawn = np.asarray(drawn.astype(jnp.float32))
    assert np.all(np.abs(drawn) <= np.maximum(np.abs(below), np.abs(above)))
    assert np.all(np.abs(drawn.mean(0) - exact) < np.abs(exact) * 2**-8 / 10)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", ["none", "state", "params"])
@pytest.mark.parametrize("row", ["dense", "hsadmm", "local_sgd", "pactrain"])
def test_only_parameters_are_narrow_and_they_settle_at_the_same_place(row, shard):
    targets = batch_of(_targets(4))
    narrow, wide = narrow_runner(row, (2, 2), shard), Runner(row, (2, 2), shard)
    states = [train_contract(runner, targets) for runner in (narrow, wide)]
    assert {x.dtype for x in jax.tree.leaves(states[0].params)} == {
        np.dtype("bfloat16")
    }
    kinds = [[x.dtype for x in jax.tree.leaves(s.opt_state)] for s in states]
    assert kinds[0] == kinds[1]
    networks = [
        runner.programs.network(state)[0]
        for runner, state in zip((narrow, wide), states, strict=True)
    ]
    for found, wanted in pairs_of(*networks):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=2 * SPACING)
        np.testing.assert_array_equal((found == 0), (wanted == 0), "revived, or died")


@pytest.mark.parametrize("row", ["dense", "hsadmm"])
def test_it_sends_the_same(row):
    mesh_shape = {"host": 2, "device": 2}
    narrow, wide = narrow_runner(row, (2, 2)), Runner(row, (2, 2))
    found, wanted = (
        wire_bytes(runner.sent_by_step(), mesh_shape) for runner in (narrow, wide)
    )
    assert found == wanted
    if narrow.method.rounds is not None:
        found, wanted = (
            wire_bytes(runner.sent_by_exchange("moving", FINAL), mesh_shape)
            for runner in (narrow, wide)
        )
        assert found == wanted


def test_slices_are_gathered_in_bfloat16():
    """Half of the bytes; here once, as the backward pass reads no parameters."""
    mesh_shape = {"host": 2, "device": 2}
    narrow, wide = (make("dense", (2, 2), "params") for make in (narrow_runner, Runner))
    found, wanted = (
        wire_bytes(runner.sent_by_step(), mesh_shape) for runner in (narrow, wide)
    )
    once = wire_bytes(joining(Slicing(SHAPES, 2), "bfloat16"), mesh_shape)
    assert found["host"] == wanted["host"]
    assert found["device"] == wanted["device"] - once["device"]


def test_updates_below_the_spacing_are_not_lost():
    """A hundred steps of a twentieth of it each move as far as in float32."""
    key = jax.random.key(0)
    params = jnp.full(2000, 1.0, jnp.bfloat16)
    for step in range(100):
        wide = params.astype(jnp.float32) + 2.0**-7 / 20
        params = rounded_to_bfloat16(wide, jax.random.fold_in(key, step))
    mean = float(jnp.mean(params.astype(jnp.float32)))
    assert mean == pytest.approx(1 + 100 * 2.0**-7 / 20, abs=2.0**-7 / 4)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [18, 33])
@pytest.mark.parametrize("shard", ["params", "none"])
def test_a_run_is_cut_and_goes_on_with_the_same_bits(shard, stopped_at, tmp_path):
    """Stopped before the cut or after it."""
    values = merged(VALUES, {"topology": {"shard": shard}})
    whole = train(values, tmp_path / "whole")
    with pytest.raises(StopAtOnce):
        train(values, tmp_path / "again", after_step=[stop_after(stopped_at)])
    again = train(values, tmp_path / "again")
    for found, wanted in pairs_of(again.network.params, whole.network.params):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.rotates
@pytest.mark.parametrize("shard", ["params", "none"])
def test_a_run_learns_as_in_float32(shard, tmp_path):
    values = merged(VALUES, {"topology": {"shard": shard}})
    narrow = train(values, tmp_path / "narrow")
    wide = train(merged(values, {"model": {"param_dtype": "float32"}}), tmp_path / "w")
    found, wanted = (rows_of(tmp_path / name)[-1]["loss"] for name in ("narrow", "w"))
    assert found == pytest.approx(wanted, rel=0.1)
    assert narrow.summary["params_kept"] == wide.summary["params_kept"]


@pytest.mark.rotates
def test_the_next_method_starts_in_float32(tmp_path):
    """Its moments too, as the parameters it is given are read before."""
    schedule = {"schedule": ("dense", "hsadmm @ 0.4")}
    values = merged(VALUES, {"method": schedule, "sparsity": {"start_share": 0.45}})
    train(values, tmp_path)
    assert rows_of(tmp_path)[-1]["step"] == 40
