"""Taking channels out and putting them back, against plain indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.channels import (
    ChannelGroup,
    ChannelSlice,
    layouts_of,
    mask_channels,
    mask_of,
    put_channels,
    slicing,
    sum_squares_by_channel,
    take_channels,
)

RNG = np.random.default_rng(0)
# Two groups that share an axis with free positions, one with several positions per
# channel and out of order, one on both sides of a kernel.
GROUPS = [
    ChannelGroup(
        "a",
        3,
        (
            ChannelSlice("w", 0, np.array([[1], [4], [6]])),
            ChannelSlice("rows", 0, np.array([[0, 3], [1, 4], [2, 5]])),
        ),
    ),
    ChannelGroup(
        "b",
        4,
        (
            ChannelSlice("w", 0, np.array([[0], [2], [3], [7]])),
            ChannelSlice("square", 0, np.arange(4)[:, None]),
            ChannelSlice("square", 1, np.arange(4)[:, None]),
            ChannelSlice("middle", 1, np.arange(4)[:, None]),
            ChannelSlice("list/0", 0, np.array([[3], [1], [2], [0]])),
        ),
    ),
]
TREE = {
    "w": RNG.normal(size=(9, 2)),
    "rows": RNG.normal(size=(6, 5)),
    "square": RNG.normal(size=(4, 4)),
    "middle": RNG.normal(size=(3, 4, 2)),
    "list": [RNG.integers(1, 9, size=4), RNG.normal(size=3)],
}
TREE = jax.tree.map(lambda x: np.asarray(x, x.dtype.str.replace("8", "4")), TREE)
LAYOUTS = layouts_of(
    GROUPS,
    {
        "w": (9, 2),
        "rows": (6, 5),
        "square": (4, 4),
        "middle": (3, 4, 2),
        "list/0": (4,),
        "list/1": (3,),
    },
)
KEEP = {"a": np.array([0, 2]), "b": np.array([1, 3])}
MASKS = {"a": np.array([True, False, True]), "b": np.array([False, True, False, True])}
# Positions that stay: kept channels and free positions, in their old order.
W, ROWS, SQUARE, LIST = [1, 2, 5, 6, 7, 8], [0, 2, 3, 5], [1, 3], [0, 1]


def kept(x):
    return {
        "w": x["w"][W],
        "rows": x["rows"][ROWS],
        "square": x["square"][np.ix_(SQUARE, SQUARE)],
        "middle": x["middle"][:, SQUARE],
        "list": [x["list"][0][LIST], x["list"][1]],
    }


def zeroed(x):
    ones = jax.tree.map(np.zeros_like, x)
    ones["w"][W] = ones["rows"][ROWS] = ones["list"][0][LIST] = 1
    ones["middle"][:, SQUARE] = 1
    ones["square"][np.ix_(SQUARE, SQUARE)] = ones["list"][1][:] = 1
    return jax.tree.map(lambda a, b: a * b, x, ones)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_take_put_and_mask_do_what_indexing_does(wrap):
    taken = wrap(lambda x, keep: take_channels(x, LAYOUTS, keep))(TREE, KEEP)
    assert_trees_equal(taken, kept(TREE))
    put = wrap(lambda x, keep: put_channels(x, LAYOUTS, keep))(taken, KEEP)
    assert_trees_equal(put, zeroed(TREE))
    masked = wrap(lambda x, masks: mask_channels(x, LAYOUTS, masks))(TREE, MASKS)
    assert_trees_equal(masked, zeroed(TREE))


def test_arrays_beyond_the_reach_of_int32_lose_one_axis_after_the_other(monkeypatch):
    monkeypatch.setattr(slicing, "_LARGEST_INDEX", 7)
    taken = take_channels(TREE, LAYOUTS, KEEP)
    assert_trees_equal(taken, kept(TREE))
    assert_trees_equal(put_channels(taken, LAYOUTS, KEEP), zeroed(TREE))
    monkeypatch.undo()
    large = jax.ShapeDtypeStruct((2**16, 2**16), np.float32)
    group = ChannelGroup("a", 2**16, (ChannelSlice("x", 1, np.arange(2**16)[:, None]),))
    layouts = layouts_of([group], {"x": large.shape})
    found = jax.make_jaxpr(lambda x, keep: take_channels(x, layouts, {"a": keep}))(
        {"x": large}, jnp.arange(8)
    )
    assert [x.shape for x in found.out_avals] == [(2**16, 8)]
    assert "4294967296" not in str(found)  # It is never laid out in a row.


def test_keeping_everything_changes_nothing():
    everything = {group.name: np.arange(group.size) for group in GROUPS}
    assert_trees_equal(take_channels(TREE, LAYOUTS, everything), TREE)
    put = jax.jit(lambda x: put_channels(x, LAYOUTS, everything))
    assert_trees_equal(put(TREE), TREE)
    for move in (take_channels, put_channels):
        assert not jax.make_jaxpr(lambda x, f=move: f(x, LAYOUTS, everything))(
            TREE
        ).eqns


def test_keeping_nothing_leaves_the_free_positions():
    nothing = {group.name: np.zeros(0, int) for group in GROUPS}
    taken = take_channels(TREE, LAYOUTS, nothing)
    np.testing.assert_array_equal(taken["w"], TREE["w"][[5, 8]])
    assert taken["square"].shape == (0, 0)
    put = put_channels(taken, LAYOUTS, nothing)
    assert not put["square"].any()
    np.testing.assert_array_equal(np.asarray(put["w"])[[5, 8]], TREE["w"][[5, 8]])


def test_layouts_predict_the_sizes_of_what_is_taken():
    taken = take_channels(TREE, LAYOUTS, KEEP)
    counts = {name: len(keep) for name, keep in KEEP.items()}
    for path in ("w", "rows", "square"):
        for axis, layout in LAYOUTS[path].items():
            assert layout.kept_size(counts) == taken[path].shape[axis]


def test_moving_masks_do_not_compile_again():
    compiled = jax.jit(lambda x, keep: take_channels(x, LAYOUTS, keep))
    compiled(TREE, KEEP)
    compiled(TREE, {"a": np.array([1, 2]), "b": np.array([0, 3])})
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masking_clears_what_is_not_finite(bad):
    tree = {"square": np.full((4, 4), bad, np.float32)}
    layouts = {"square": LAYOUTS["square"]}
    masked = mask_channels(tree, layouts, {"b": np.zeros(4, bool)})
    assert not np.asarray(masked["square"]).any()


def test_gradients_flow_to_kept_channels_only():
    def loss(tree):
        leaves = jax.tree.leaves(take_channels(tree, LAYOUTS, KEEP))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

    floats = jax.tree.map(lambda x: x.astype(np.float32), TREE)
    assert_trees_equal(
        jax.jit(jax.grad(loss))(floats), zeroed(jax.tree.map(np.ones_like, floats))
    )


def test_sums_of_squares_count_every_place_of_a_channel():
    scores = jax.jit(lambda x: sum_squares_by_channel(x, LAYOUTS))(TREE)
    x = jax.tree.map(lambda x: np.square(x.astype(np.float64)), TREE)
    a = x["w"][[1, 4, 6]].sum(1) + x["rows"].reshape(2, 3, 5).sum((0, 2))
    b = x["w"][[0, 2, 3, 7]].sum(1) + x["square"].sum(0) + x["square"].sum(1)
    b += x["list"][0][[3, 1, 2, 0]] + x["middle"].sum((0, 2))
    np.testing.assert_allclose(scores["a"], a, rtol=1e-6)
    np.testing.assert_allclose(scores["b"], b, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 7])
def test_masks_are_true_where_kept(size):
    for count in {0, size // 2, size}:
        keep = np.sort(np.random.default_rng(size).permutation(size)[:count])
        mask = mask_of(jnp.asarray(keep, jnp.int32), size)
        np.testing.assert_array_equal(np.flatnonzero(mask), keep)
