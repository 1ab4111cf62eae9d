"""Methods whose state lies in slices over devices do what they do with all of it."""

import functools
import math

import jax
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.comm import Slicing, wire_bytes
from prunex_jax.comm.formulas import dense_size, device_sum
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods import METHODS, method_config
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.inner import check_sliceable, make_inner
from prunex_jax.methods.local_sgd import LocalSgdConfig
from prunex_jax.methods.method import RoundsConfig
from tests.helpers.consensus_cases import START
from tests.methods.test_contract import (
    FINAL,
    RECIPES,
    ROWS,
    SHAPES,
    Runner,
    _targets,
    batch_of,
    check_formula_bytes,
    pairs_of,
    runner_of,
    train,
)

AXES = MeshAxes("host", None, "device")
# Why rows cannot be in slices, in words of the refusal.
REFUSED = {
    "dense flat": "one sum over all devices",
    "hsadmm per device": "device_level='consensus'",
    "hsadmm leaky per device": "device_level='consensus'",
    "hsadmm paper per device": "device_level='consensus'",
    "hsadmm top_k int2 per device": "device_level='consensus'",
    "hsadmm mixture": "criterion='mixture'",
    "local_sgd moved channels int8": "channel_share",
    "local_sgd clipped channels int8": "channel_share",
    "diloco channels in turn": "channel_share",
}
SLICED = [
    row
    for row, config in ROWS.items()
    if METHODS[config.name].takes_slices and row not in REFUSED
]
# Rows whose sums over hosts are rounded, or leave something out, by what is beside it.
ROUNDED = {"float16", "bfloat16", "int8", "int4", "int2"}
EXACT = [
    row
    for row in SLICED
    if ROWS[row].wire_dtype not in ROUNDED and not ROWS[row].rounds.top_k
]


@functools.cache
def sliced_runner(row, shape=(2, 2), shard="state"):
    return Runner(row, shape, shard, **RECIPES.get(row, {}))


def networks(runner, targets):
    return runner.programs.network(train(runner, targets))[0]


def test_what_cannot_be_in_slices_is_refused_with_the_remedy():
    others = {
        row: "needs whole parameters"
        for row, config in ROWS.items()
        if not METHODS[config.name].takes_slices
    }
    assert set(others) and set(REFUSED) <= set(ROWS)
    for row, words in {**REFUSED, **others}.items():
        with pytest.raises(UserError, match=words) as refusal:
            sliced_runner(row)
        assert "topology.shard=none" in str(refusal.value)


@functools.cache
def whole_network(row, shape):
    return networks(runner_of(row, shape), batch_of(_targets(shape[0] * shape[1])))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", ["state", "params"])
@pytest.mark.parametrize(
    "shape",
    [(2, 2), *(pytest.param(s, marks=pytest.mark.slow) for s in [(2, 4), (4, 2)])],
)
@pytest.mark.parametrize("row", EXACT)
def test_the_network_is_the_same(row, shape, shard):
    """Through all kinds of rounds, and a mask that moves."""
    targets = batch_of(_targets(shape[0] * shape[1]))
    sliced = networks(sliced_runner(row, shape, shard), targets)
    for found, wanted in pairs_of(sliced, whole_network(row, shape)):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", sorted(set(SLICED) - set(EXACT)))
def test_other_wires_round_and_choose_in_every_slice(row):
    """Networks differ by no more than two runs with other random numbers do."""
    targets = batch_of(_targets(4))
    whole = networks(runner_of(row), targets)
    noise = {"int4": 0.06, "int2": 0.5}.get(ROWS[row].wire_dtype, 0.02)
    noise = 0.05 if ROWS[row].rounds.average == "radial" else noise
    for found, wanted in pairs_of(networks(sliced_runner(row), targets), whole):
        np.testing.assert_allclose(found, wanted, atol=noise)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (3, 2)])
@pytest.mark.parametrize("row", SLICED)
def test_formula_bytes_are_traced_bytes(row, shape):
    check_formula_bytes(sliced_runner(row, shape))


@pytest.mark.parametrize("row", ["dense", "hsadmm", "dense int4 with error"])
def test_sliced_parameters_are_gathered_at_most_twice(row):
    """The second time those that the backward pass reads; here it reads none."""
    mesh_shape = {"host": 2, "device": 4}
    runner = sliced_runner(row, (2, 4), "params")
    formula = wire_bytes(runner.method.step_formula(mesh_shape), mesh_shape)
    found = wire_bytes(runner.sent_by_step(), mesh_shape)
    once = wire_bytes(Slicing(SHAPES, 4).joining(), mesh_shape)
    assert found["host"] == formula["host"]
    assert found["device"] == formula["device"] - once["device"]
    if runner.method.exchange is not None:
        for kind in ("moving", "freeze", "frozen"):
            formula = runner.method.exchange_formula(mesh_shape, FINAL, kind)
            sent = runner.sent_by_exchange(kind, FINAL)
            assert wire_bytes(sent, mesh_shape) == wire_bytes(formula, mesh_shape)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_formula_bytes_of_streaming_rounds(delay):
    rounds = RoundsConfig(fragments=2, delay=delay, mixing=0.5)
    settings = HsadmmConfig(sync_period=4)
    config = method_config("hsadmm", hsadmm=settings, rounds=rounds)
    check_formula_bytes(Runner(config, (2, 4), shard="state"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("average, clip", [("radial", "none"), ("mean", "median")])
def test_norms_over_hosts_are_those_of_whole_arrays(average, clip):
    config = method_config(
        "local_sgd",
        local_sgd=LocalSgdConfig(sync_period=2),
        rounds=RoundsConfig(average=average, clip=clip),
    )
    targets = batch_of(_targets(4))
    whole = networks(Runner(config, (2, 2)), targets)
    sliced = Runner(config, (2, 2), shard="state")
    check_formula_bytes(sliced)
    for found, wanted in pairs_of(networks(sliced, targets), whole):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("row", ["dense", "hsadmm", "local_sgd"])
def test_a_step_sends_inside_a_host_what_a_sum_sends(row):
    """But for what fills up the last slices, and single numbers."""
    mesh_shape = {"host": 2, "device": 4}
    sent = wire_bytes(sliced_runner(row, (2, 4)).sent_by_step(), mesh_shape)
    plain = wire_bytes(device_sum(dense_size(SHAPES), mesh_shape), mesh_shape)
    slicing = Slicing(SHAPES, 4)
    filled = 4 * sum(math.prod(shape) for shape in slicing.own_shapes.values())
    assert sent["device"] == plain["device"] * filled / dense_size(SHAPES)


@pytest.mark.parametrize("shard", ["state", "params"])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("row", ["dense int4 with error", "diloco", "hsadmm paper"])
def test_a_device_has_its_part_of_the_state(row, parts, shard):
    """Of every array that is like a parameter; the rest does not grow with these."""

    def own_bytes(runner):
        state = runner.programs.abstract_state()
        parts = (state.params if shard == "params" else (), state.opt_state)
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(parts)
        )

    whole, sliced = runner_of(row, (1, parts)), sliced_runner(row, (1, parts), shard)
    own = 4 * sum(math.prod(s) for s in Slicing(SHAPES, parts).own_shapes.values())
    copies = (own_bytes(whole) - own_bytes(sliced)) / (4 * dense_size(SHAPES) - own)
    assert copies == round(copies) >= 1, "something else has changed"
    rest = own_bytes(sliced) - copies * own
    assert 0 <= rest < 200


def test_clipping_looks_at_the_whole_gradient():
    config = OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0, clip_norm=1.0)
    inner = make_inner(config, optax.constant_schedule(1.0), axes=AXES)
    grads = {"w": np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)}

    def update(grads):
        return inner.update(grads, inner.init(grads), grads)[0]

    found = jax.vmap(update, axis_name="device")(grads)["w"]
    np.testing.assert_allclose(found, [[-0.6, 0.0], [0.0, -0.8]], rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "optax:adagrad"])
def test_optimizers_of_single_entries_are_taken(name):
    config = OptimizerConfig(name=name, clip_norm=0.5)
    inner = make_inner(config, optax.constant_schedule(0.1), axes=AXES)
    check_sliceable(inner, START, AXES)


@pytest.mark.parametrize("name", ["muon", "optax:lamb", "optax:adafactor"])
def test_optimizers_of_whole_arrays_are_refused(name):
    rate = optax.constant_schedule(0.1)
    inner = make_inner(OptimizerConfig(name=name), rate, axes=AXES)
    with pytest.raises(UserError, match="looks at whole parameters"):
        check_sliceable(inner, START, AXES)
