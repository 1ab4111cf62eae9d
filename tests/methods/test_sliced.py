"""Methods whose state lies in slices over devices do what they do with all of it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.comm import Slicing, wire_bytes
from prunex_jax.comm.formulas import dense_size
from prunex_jax.mesh import MeshAxes
from prunex_jax.methods import METHODS, low_rank, method_config
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.method import RoundsConfig
from prunex_jax.methods.powersgd import powersgd
from prunex_jax.train.build.optimizer import check_sliceable, make_inner
from tests.helpers.consensus_cases import START
from tests.helpers.formulas.means import device_sum
from tests.helpers.formulas.slices import joining
from tests.methods.test_contract import (
    FINAL,
    LIMITS,
    RECIPES,
    ROWS,
    SHAPES,
    Runner,
    _hsadmm,
    _targets,
    assert_same,
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
    "pactrain weights": "structure='weights'",
}
SLICED = [
    row
    for row, config in ROWS.items()
    if METHODS[config.name].takes_slices and row not in REFUSED
]
# Rows whose sums over hosts are rounded, or leave something out, by what is beside it.
ROUNDED = {"float16", "bfloat16", "int8", "int4", "int2"}
CHOOSING = {"topk", "dgc", "importance"}
EXACT = [
    row
    for row in SLICED
    if ROWS[row].wire_dtype not in ROUNDED
    and not ROWS[row].rounds.top_k
    and ROWS[row].name not in CHOOSING
    and not ROWS[row].pactrain.is_ternary
]
# Where rounding grows: factors are found by iteration.
ROUNDING = {"powersgd": 1e-4}


@functools.lru_cache(maxsize=8)  # All that they compile would take gigabytes.
def sliced_runner(row, shape=(2, 2), shard="state"):
    return Runner(row, shape, shard, **RECIPES.get(row, {}))


def networks(runner, targets):
    return runner.programs.network(train(runner, targets))[0]


def test_what_cannot_be_in_slices_is_refused_with_the_remedy():
    assert set(REFUSED) <= set(ROWS)
    for row, words in REFUSED.items():
        with pytest.raises(UserError, match=words) as refusal:
            sliced_runner(row)
        assert "topology.shard=none" in str(refusal.value)


def test_methods_that_know_nothing_of_slices_are_refused(monkeypatch):
    """As those of users are, unless they say that they do."""
    row = dataclasses.replace(METHODS["dense"], takes_slices=False)
    monkeypatch.setitem(METHODS, "dense", row)
    with pytest.raises(UserError, match="needs whole parameters") as refusal:
        Runner("dense", (2, 2), "state")
    assert "topology.shard=none" in str(refusal.value)


@functools.cache
def whole_network(row, shape):
    return networks(runner_of(row, shape), batch_of(_targets(shape[0] * shape[1])))


@pytest.mark.sampled(8)
@pytest.mark.slow
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
    atol = ROUNDING.get(ROWS[row].name, 2e-6)
    for found, wanted in pairs_of(sliced, whole_network(row, shape)):
        np.testing.assert_allclose(found, wanted, atol=atol)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(set(SLICED) - set(EXACT)))
def test_other_wires_round_and_choose_in_every_slice(row):
    """Networks differ by no more than two runs with other random numbers do."""
    targets = batch_of(_targets(4))
    whole = networks(runner_of(row), targets)
    noise = {"int4": 0.06, "int2": 0.5}.get(ROWS[row].wire_dtype, 0.02)
    noise = max(noise, 0.05) if ROWS[row].name in CHOOSING else noise
    noise = 0.15 if ROWS[row].pactrain.is_ternary else noise
    for found, wanted in pairs_of(networks(sliced_runner(row), targets), whole):
        np.testing.assert_allclose(found, wanted, atol=noise)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", ["state", "params"])
@pytest.mark.parametrize("name", ["topk", "topk chunks", "dgc", "importance"])
def test_where_all_entries_are_chosen_slices_make_no_difference(name, shard):
    """Clipped, as that takes the norm of the whole gradient."""
    sgd = OptimizerConfig(momentum=0.5, weight_decay=0.0, clip_norm=1.5)
    targets = batch_of(_targets(4))

    def ends(shard):
        runner = Runner(LIMITS[name], (2, 2), shard, optimizer=sgd)
        state = runner.init()
        for _ in range(4):
            state = runner.step(state, targets)
        return runner.programs.network(state)[0]

    for found, wanted in pairs_of(ends(shard), ends("none")):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("rank", [4, 1])
def test_powersgd_factors_whole_matrices(rank, parts):
    """Cut along either side of a matrix, along either of its axes, and not evenly."""
    shapes = {
        "bias": (7,),
        "long_rows": (2, 9, 5),
        "short_rows": (5, 2, 9),
        "cut_short": (3, 3, 5, 6),
        "same_view": (9, 5, 6),
        "wide": (4, 11),
    }
    shapes = dict(sorted(shapes.items()))
    plan = low_rank.make_plan(list(shapes.values()), rank, 0.0)
    slicing = Slicing(shapes, parts)
    paths = list(shapes)
    sides = [
        low_rank.side_of(view, shapes[paths[i]], slicing.dims[paths[i]], parts)
        for view, at in plan.batches
        for i in at
    ]
    assert len({(side.is_rows, side.is_short) for side in sides}) == 4
    assert len(plan.batches) < len(sides), "two of a view, cut along different sides"
    rng = np.random.default_rng(3)
    grads = {
        path: rng.normal(size=(3, 2, *shape)).astype(np.float32)
        for path, shape in shapes.items()
    }
    zeros = {path: jnp.zeros(shape) for path, shape in shapes.items()}
    settings = {"rank": rank, "min_gain": 0.0}
    whole = powersgd(**settings, axes=MeshAxes("host", None))
    sliced = powersgd(**settings, axes=AXES, slicing=slicing)

    def steps(tx, take, join, grads):
        state, seen = tx.init(take(zeros)), []
        for step in range(3):
            own = take({path: g[step] for path, g in grads.items()})
            direction, state = tx.update(own, state)
            seen.append((join(direction), join(state.residual), state.queries))
        return seen

    def on_hosts(fn):
        return jax.vmap(fn, in_axes=({path: 1 for path in shapes},), axis_name="host")

    wanted = on_hosts(lambda g: steps(whole, lambda x: x, lambda x: x, g))(grads)
    found = jax.vmap(
        lambda _: on_hosts(lambda g: steps(sliced, slicing.take, slicing.join, g))(
            grads
        ),
        axis_name="device",
    )(jnp.arange(parts))
    for a, b in pairs_of(found, wanted):
        for device in range(parts):
            np.testing.assert_allclose(a[device], b, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["taylor", "scale"])
def test_criteria_rank_whole_channels(criterion):
    config = _hsadmm(rounds=RoundsConfig(error_decay=1.0))
    targets = batch_of(_targets(4))
    runners = [
        Runner(config, (2, 2), shard, criterion=criterion)
        for shard in ("none", "state")
    ]
    check_formula_bytes(runners[1])
    states = [train(runner, targets) for runner in runners]
    whole, sliced = (
        r.programs.network(s)[0] for r, s in zip(runners, states, strict=True)
    )
    for found, wanted in pairs_of(sliced, whole):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    masks = [
        r.method.pruning.masks(s.opt_state)
        for r, s in zip(runners, states, strict=True)
    ]
    assert_same(*masks, "other channels are kept")


@pytest.mark.parametrize("name", ["dgc", "importance"])
def test_formula_bytes_where_gradients_are_clipped(name):
    sgd = OptimizerConfig(momentum=0.5, weight_decay=0.0, clip_norm=1.5)
    check_formula_bytes(Runner(name, (2, 4), "state", optimizer=sgd))


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
    formula = wire_bytes(runner.formulas.step(mesh_shape), mesh_shape)
    found = wire_bytes(runner.sent_by_step(), mesh_shape)
    once = wire_bytes(joining(Slicing(SHAPES, 4)), mesh_shape)
    assert found["host"] == formula["host"]
    assert found["device"] == formula["device"] - once["device"]
    if runner.method.rounds is not None:
        for kind in ("moving", "freeze", "frozen"):
            formula = runner.formulas.exchange(mesh_shape, FINAL, kind)
            sent = runner.sent_by_exchange(kind, FINAL)
            assert wire_bytes(sent, mesh_shape) == wire_bytes(formula, mesh_shape)


@pytest.mark.parametrize("delay", [0, 1])
def test_formula_bytes_of_streaming_rounds(delay):
    rounds = RoundsConfig(fragments=2, delay=delay, mixing=0.5)
    settings = HsadmmConfig(sync_period=4)
    config = method_config("hsadmm", hsadmm=settings, rounds=rounds)
    check_formula_bytes(Runner(config, (2, 4), shard="state"))


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
@pytest.mark.parametrize(
    "row",
    ["dense int4 with error", "diloco", "hsadmm paper", "topk", "dgc"],
)
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
