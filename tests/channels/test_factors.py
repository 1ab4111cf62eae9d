"""Axes made of several, of which all are cut: what is left is a full box."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.channels import (
    ChannelGroup,
    ChannelSlice,
    layouts_of,
    mask_channels,
    put_channels,
    sum_squares_by_channel,
    take_channels,
    trace_channels,
)
from prunex_jax.comm import compact_size
from prunex_jax.shrink import make_cut
from prunex_jax.shrink.cost import count_params, macs_cost, size_costs
from prunex_jax.sparsity import CountLimits, Target, solve_keep_counts
from tests.helpers.channel_checks import assert_exact, draw

HEADS, FEATURES, WIDTH = 4, 6, 5
FLAT = HEADS * FEATURES
X = draw({"x": (2, 3, WIDTH)}, seed=1)["x"]
SHAPES = {
    **{name: (WIDTH, FLAT) for name in "qkv"},
    **{name: (FLAT,) for name in ("q_bias", "v_bias")},
    "o": (FLAT, WIDTH),
}


def split(h):
    return h.reshape(*h.shape[:-1], HEADS, FEATURES)


def merged(h):
    return h.reshape(*h.shape[:-2], FLAT)


def mixed(q, k, v):
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / FEATURES**0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def attention(p, x):
    """Kernels and biases are flat."""
    q = split(x @ p["q"] + p["q_bias"][None, None])
    v = split(x @ p["v"] + p["v_bias"][None, None])
    return x + merged(mixed(q, split(x @ p["k"]), v)) @ p["o"]


def packed(p, x):
    """Queries, keys and values in one kernel, heads first."""
    qkv = (x @ p["qkv"]).reshape(*x.shape[:2], HEADS, 3, FEATURES)
    return merged(mixed(*(qkv[..., i, :] for i in range(3)))) @ p["o"]


def head_major(p, x):
    """The same with features of values apart from those of queries and keys."""
    qkv = (x @ p["qkv"]).reshape(*x.shape[:2], HEADS, 3 * FEATURES)
    return merged(mixed(*jnp.split(qkv, 3, -1))) @ p["o"]


def padded(p, x):
    """An outer product with a row more than there are channels."""
    a = jnp.pad(jnp.tanh(x @ p["a"]), ((0, 0), (0, 0), (0, 1)))
    pairs = jnp.einsum("bti,btj->btij", a, x @ p["b"])
    return pairs.reshape(*x.shape[:2], 5 * FEATURES) @ p["o"]


def grouped(p, x):
    """Two queries for every key: heads of queries are themselves of two factors."""
    q = split(x @ p["q"]).reshape(*x.shape[:2], 2, 2, FEATURES)
    k, v = ((x @ p[n]).reshape(*x.shape[:2], 2, FEATURES) for n in "kv")
    shares = jax.nn.softmax(jnp.einsum("bqgrd,bkgd->bgrqk", q, k))
    out = jnp.einsum("bgrqk,bkgd->bqgrd", shares, v)
    return out.reshape(*x.shape[:2], FLAT) @ p["o"]


def as_many(p, x):
    """As many heads as features, so that both lie in the same places as often."""
    qkv = (x @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, HEADS)
    return mixed(*jnp.moveaxis(qkv, 2, 0)).reshape(*x.shape[:2], -1) @ p["o"]


def rotary(p, x):
    """Features in pairs, which leaves as many of them as there are heads."""
    qkv = (x @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, 8)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    return (
        mixed(turned(q) / jnp.sqrt(8.0), turned(k), v).reshape(*x.shape[:2], -1)
        @ p["o"]
    )


def turned(x):
    """Pairs of features, turned by angles that depend on the position."""
    a, b = jnp.split(x, 2, -1)
    angles = np.arange(x.shape[1])[None, :, None, None] / 10.0 ** np.arange(4)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def normed(p, x):
    """A root mean square over the flat axis; read flat, too."""
    h = x @ p["q"]
    h = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1.0)
    return merged(jnp.tanh(split(h)) * p["scale"][None, None]) @ p["o"] + h @ p["o"]


def outer(p, x):
    """A product of two layers, of every channel with every other."""
    pairs = jnp.einsum("bti,btj->btij", jnp.tanh(x @ p["a"]), x @ p["b"])
    return pairs.reshape(*x.shape[:2], HEADS * FEATURES) @ p["o"]


def with_itself(p, x):
    h = jnp.tanh(x @ p["a"])
    return jnp.einsum("bti,btj->btij", h, h).reshape(*x.shape[:2], -1) @ p["o"]


def two_ways(p, x):
    """Divided otherwise a second time: not all factors of both can be boxes."""
    h = split(x @ p["q"]) * p["scale"][None, None]
    other = merged(h).reshape(*x.shape[:2], 2 * HEADS, FEATURES // 2)
    return merged(jnp.tanh(other)) @ p["o"]


CASES = {
    "attention": (attention, SHAPES, [4, 6, 6]),
    "packed": (packed, {"qkv": (WIDTH, 3 * FLAT), "o": SHAPES["o"]}, [4, 6]),
    "head_major": (head_major, {"qkv": (WIDTH, 3 * FLAT), "o": (FLAT, 5)}, [4, 6, 6]),
    "padded": (padded, {"a": (5, 4), "b": (5, FEATURES), "o": (30, 5)}, [4, 6]),
    "grouped": (
        grouped,
        {**SHAPES, "k": (WIDTH, 2 * FEATURES), "v": (WIDTH, 2 * FEATURES)},
        [2, 2, 6, 6],
    ),
    "as_many": (as_many, {"qkv": (WIDTH, 48), "o": (16, WIDTH)}, [4, 4]),
    "rotary": (rotary, {"qkv": (WIDTH, 96), "o": (32, WIDTH)}, [4, 4]),
    "normed": (normed, {**SHAPES, "scale": (HEADS, FEATURES)}, [4, 6]),
    "outer": (outer, {"a": (WIDTH, 4), "b": (WIDTH, 6), "o": SHAPES["o"]}, [4, 6]),
    "with_itself": (with_itself, {"a": (WIDTH, 4), "o": (16, WIDTH)}, []),
    "two_ways": (two_ways, {**SHAPES, "scale": (HEADS, FEATURES)}, [4]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_all_factors_are_cut_and_nothing_changes(name):
    apply, shapes, sizes = CASES[name]
    trace = assert_exact(apply, draw(shapes), X, densities=(0.5,), factors="all")
    assert sorted(group.size for group in trace.groups) == sizes
    one = trace_channels(apply, draw(shapes), X)
    assert trace.prunable_share() >= one.prunable_share() - 1e-9


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_one_factor_alone_can_be_cut(dead):
    """With the others whole; and where all but one channel of it go."""

    def masks(groups, density, rng):
        found = {g.name: np.ones(g.size, bool) for g in groups}
        found[groups[dead].name] = np.arange(groups[dead].size) == 1
        return found

    assert_exact(
        attention, draw(SHAPES), X, densities=(0,), make_masks=masks, factors="all"
    )


def test_a_frozen_factor_leaves_the_other():
    def first_head_is_known(p, x):
        h = split(x @ p["q"])
        return merged(h.at[..., 0, :].add(1.0)) @ p["o"] + h.sum(2) @ p["more"]

    shapes = {"q": (WIDTH, FLAT), "o": (FLAT, 2), "more": (FEATURES, 2)}
    trace = assert_exact(
        first_head_is_known, draw(shapes), X, densities=(0.5,), factors="all"
    )
    assert all(group.size == FEATURES for group in trace.groups)


def trees_of(apply, shapes):
    params = draw(shapes)
    trace = trace_channels(apply, params, X, factors="all")
    return params, trace, layouts_of(trace.groups, shapes_by_path(params))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["attention", "head_major", "grouped", "outer"])
def test_trees_are_cut_as_channels_say(name):
    apply, shapes, _ = CASES[name]
    params, trace, layouts = trees_of(apply, shapes)
    rng = np.random.default_rng(0)
    kept = {
        g.name: np.sort(rng.permutation(g.size)[: g.size // 2]).astype(np.int32)
        for g in trace.groups
    }
    masks = {g.name: np.isin(np.arange(g.size), kept[g.name]) for g in trace.groups}
    small = take_channels(params, layouts, kept)
    counts = {name: len(which) for name, which in kept.items()}
    assert count_params(small) == compact_size(shapes, layouts, counts)
    assert count_params(small) == size_costs(trace)["params"](counts)
    assert small["o"].shape[0] == np.prod([1, *_owners(trace, counts, "o")])
    # Every owner of a position has a say; said once more, position by position.
    alive = np.ones(shapes["o"][0], bool)
    for own in trace.groups:
        for member in own.members:
            if (member.path, member.axis) == ("o", 0):
                alive[member.positions[~masks[own.name]]] = False
    masked = mask_channels(params, layouts, masks)
    np.testing.assert_array_equal(masked["o"], params["o"] * alive[:, None])
    for path, leaf in put_channels(small, layouts, kept).items():
        np.testing.assert_array_equal(leaf, masked[path])
    whole = {g.name: np.arange(g.size) for g in trace.groups}
    for path, leaf in take_channels(params, layouts, whole).items():
        np.testing.assert_array_equal(leaf, params[path])
    scores = sum_squares_by_channel(params, layouts)
    assert {name: score.shape for name, score in scores.items()} == {
        g.name: (g.size,) for g in trace.groups
    }


def _owners(trace, counts, path):
    """Kept counts of the groups on axis 0 of a parameter."""
    return [
        counts[group.name]
        for group in trace.groups
        if any((m.path, m.axis) == (path, 0) for m in group.members)
    ]


def test_costs_count_both_factors_and_targets_are_met():
    params, trace, _ = trees_of(attention, SHAPES)
    sizes = {g.name: g.size for g in trace.groups}
    costs = {**size_costs(trace), "macs": macs_cost(attention, trace, params, X)}
    halves = {name: size // 2 for name, size in sizes.items()}
    masks = {name: np.arange(size) < size // 2 for name, size in sizes.items()}
    small = make_cut(trace, masks, params).take(params)
    assert costs["params"](halves) == count_params(small)
    projections = 4 * 2 * 3 * WIDTH * FLAT
    products = 2 * 2 * HEADS * 3 * 3 * FEATURES
    assert costs["macs"](sizes) == projections + products
    assert costs["macs"](halves) == (projections + products) // 4
    for unit in ("params", "macs"):
        solution = solve_keep_counts(Target(unit, keep=0.4), costs, CountLimits(sizes))
        assert solution.achieved <= 0.4 * solution.dense


def test_what_was_traced_before_stays_the_default():
    one = trace_channels(attention, draw(SHAPES), X)
    same = trace_channels(attention, draw(SHAPES), X, factors="one")
    assert [(g.name, g.size) for g in one.groups] == [("q", 6), ("v", 6)]
    assert one.explain() == same.explain()
    with pytest.raises(UserError, match="factors='both' is unknown; use one or all"):
        trace_channels(attention, draw(SHAPES), X, factors="both")


def test_of_two_divisions_the_one_that_leaves_more_is_cut():
    """Six features are finer than four heads, but the second division ties them."""
    apply, shapes, _ = CASES["two_ways"]
    trace = assert_exact(apply, draw(shapes), X, densities=(0.5,))
    assert [(g.name, g.size) for g in trace.groups] == [("q", HEADS)]


def test_a_factor_that_must_stay_after_all_leaves_the_other():
    """Twelve heads are finer, but made of three and four, which are outputs."""

    def apply(p, x):
        h = (x @ p["q"]).reshape(*x.shape[:2], 12, 2)
        pairs = jnp.tanh(h).reshape(*x.shape[:2], 3, 4, 2)
        return pairs.sum((-1, -2)), pairs.sum((-1, -3)), h.sum(-2) @ p["o"]

    shapes = {"q": (WIDTH, 24), "o": (2, 2)}
    trace = assert_exact(apply, draw(shapes), X, densities=(0.5,))
    assert [(g.name, g.size) for g in trace.groups] == [("q", 2)]


def test_explanations_name_both_owners():
    trace = trace_channels(attention, draw(SHAPES), X, factors="all")
    assert trace.explain("o").splitlines()[:2] == [
        "o axis 0 (24): group q, 4 channels of 6 positions",
        "o axis 0 (24): group v, 6 channels of 4 positions",
    ]


def group(name, positions):
    member = ChannelSlice("w", 0, np.array(positions))
    return ChannelGroup(name, len(positions), (member,))


def test_groups_may_share_an_axis_where_what_is_left_is_a_box():
    rows, columns = [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]

    def layout_of(*positions):
        groups = [group(name, p) for name, p in zip("abc", positions, strict=False)]
        return layouts_of(groups, {"w": (7,)})["w"][0]

    assert layout_of(rows, columns).kept_size({"a": 1, "b": 2}) == 3
    # The last column stays, or is a channel of another group.
    assert layout_of(rows, columns[:2]).kept_size({"a": 1, "b": 1}) == 3
    counts = {"a": 1, "b": 1, "c": 1}
    assert layout_of(rows, columns[:2], columns[2:]).kept_size(counts) == 3
    for bad in ([[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 6]]):
        with pytest.raises(UserError, match=r"claimed twice \(groups a, b\)"):
            layout_of(rows, bad)
