"""Projections against the problem that their docstring states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from prunex_jax.channels.groups import ChannelGroup, ChannelSlice, layouts_of
from prunex_jax.channels.slicing import mask_channels, sum_squares_by_channel
from prunex_jax.sparsity import (
    choose_keep_indices,
    masks_of,
    project_channels,
)
from prunex_jax.sparsity.choice import group_sizes

# float32 sums of at most a few hundred squares.
ROUNDING = 1e-5


def shared_paths(layouts):
    """Leaves whose entries belong to more than one channel."""
    return tuple(sorted(path for path, axes in layouts.items() if len(axes) > 1))


def project(tree, layouts, keep_counts):
    return project_channels(tree, layouts, keep_counts).tree


def group(name, size, *members):
    plain = np.arange(size)[:, None]
    return ChannelGroup(name, size, tuple(ChannelSlice(*m, plain) for m in members))


def random_tree(shapes, seed=0):
    """Channels of very different size, so that penalties kill some of them."""
    rng = np.random.default_rng(seed)
    leaves = {}
    for path, shape in shapes.items():
        leaf = rng.normal(size=shape)
        for axis in range(max(0, leaf.ndim - 2), leaf.ndim):
            scale = np.exp(rng.normal(size=shape[axis]))
            leaf = leaf * np.expand_dims(
                scale, [a for a in range(leaf.ndim) if a != axis]
            )
        leaves[path] = jnp.asarray(leaf, jnp.float32)
    return leaves


# Every entry carries at most one channel; "ab" is an axis shared by two groups side by
# side, as behind a concatenation.
SEPARATE = {"k1": (2, 3), "k2": (3, 2), "k3": (2, 4), "ab": (8, 2), "bias": (2,)}
# A ring of three layers: every kernel entry carries two channels.
SHARED = {"k1": (2, 3, 4), "k2": (2, 4, 3), "k3": (3, 3), "norm": (4,), "bias": (2,)}


def separate_layouts():
    tail = np.arange(3, 7)[:, None]
    groups = [
        group("a", 3, ("k1", 1), ("k2", 0), ("ab", 0)),
        ChannelGroup(
            "b",
            4,
            (
                ChannelSlice("k3", 1, np.arange(4)[:, None]),
                ChannelSlice("ab", 0, tail),
            ),
        ),
    ]
    return layouts_of(groups, SEPARATE)


def shared_layouts():
    groups = [
        group("a", 3, ("k1", 1), ("k3", 1)),
        group("b", 4, ("k1", 2), ("k2", 1), ("norm", 0)),
        group("c", 3, ("k2", 2), ("k3", 0)),
    ]
    return layouts_of(groups, SHARED)


def self_layouts():
    """One group on both axes of a recurrent kernel."""
    return layouts_of([group("a", 3, ("k3", 0), ("k3", 1))], SHARED)


CASES = [
    pytest.param(SEPARATE, separate_layouts(), id="separate"),
    pytest.param(SHARED, shared_layouts(), id="shared"),
    pytest.param(SHARED, self_layouts(), id="self"),
]


def squared_distance(x, y):
    return sum(float(jnp.sum((x[p] - y[p]) ** 2)) for p in x)


def norms_of(tree, layouts):
    return {
        n: np.sqrt(np.asarray(s))
        for n, s in sum_squares_by_channel(tree, layouts).items()
    }


def all_masks(layouts, keep_counts):
    """Every way to keep exactly the counts, as masks."""
    sizes = group_sizes(layouts)
    choices = [
        itertools.combinations(range(n), keep_counts[g]) for g, n in sizes.items()
    ]
    for choice in itertools.product(*choices):
        kept = {g: jnp.array(c) for g, c in zip(sizes, choice, strict=True)}
        yield masks_of(kept, sizes)


def count(layouts, number):
    return dict.fromkeys(group_sizes(layouts), number)


def test_cases_are_what_they_say():
    assert shared_paths(separate_layouts()) == ()
    assert shared_paths(shared_layouts()) == ("k1", "k2", "k3")
    assert shared_paths(self_layouts()) == ("k3",)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("shapes", "layouts"), CASES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_projection_is_feasible_and_idempotent(shapes, layouts, number):
    tree = random_tree(shapes)
    once = project(tree, layouts, count(layouts, number))
    for norms in norms_of(once, layouts).values():
        assert (norms > 0).sum() <= number
    twice = project(once, layouts, count(layouts, number))
    for path in tree:
        np.testing.assert_array_equal(once[path], twice[path])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [1, 2])
def test_no_subset_is_nearer_when_entries_are_not_shared(number, seed):
    tree, layouts = random_tree(SEPARATE, seed), separate_layouts()
    reached = squared_distance(tree, project(tree, layouts, count(layouts, number)))
    nearest = min(
        squared_distance(tree, mask_channels(tree, layouts, masks))
        for masks in all_masks(layouts, count(layouts, number))
    )
    assert reached <= nearest * (1 + ROUNDING)


@pytest.mark.parametrize(("shapes", "layouts"), CASES[1:])
@pytest.mark.parametrize("seed", range(2))
def test_shared_projection_is_within_twice_the_nearest(shapes, layouts, seed):
    tree = random_tree(shapes, seed)
    reached = squared_distance(tree, project(tree, layouts, count(layouts, 2)))
    nearest = min(
        squared_distance(tree, mask_channels(tree, layouts, masks))
        for masks in all_masks(layouts, count(layouts, 2))
    )
    assert nearest * (1 - ROUNDING) <= reached <= 2 * nearest


@pytest.mark.parametrize(("shapes", "layouts"), CASES)
def test_nothing_feasible_with_the_same_channels_is_nearer(shapes, layouts):
    tree, counts = random_tree(shapes), count(layouts, 2)
    kept = choose_keep_indices(sum_squares_by_channel(tree, layouts), counts)
    masks = masks_of(kept, group_sizes(layouts))
    projected = project(tree, layouts, counts)
    reached = squared_distance(tree, projected)
    for seed in range(20):
        noise = random_tree(shapes, 100 + seed)
        other = {p: projected[p] + 0.1 * noise[p] for p in projected}
        other = mask_channels(other, layouts, masks)
        assert reached < squared_distance(tree, other)


def test_keeping_everything_changes_nothing():
    tree, layouts = random_tree(SHARED), shared_layouts()
    kept = project(tree, layouts, group_sizes(layouts))
    for path in tree:
        np.testing.assert_array_equal(kept[path], tree[path])


def test_dead_entries_are_zero_even_where_they_were_not_finite():
    tree, layouts = random_tree(SEPARATE), separate_layouts()
    tree["k1"] = tree["k1"].at[0, 1].set(jnp.nan)
    projected = project(tree, layouts, count(layouts, 2))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in projected.values())
    assert not np.asarray(projected["k1"])[:, 1].any()


def test_everything_works_on_values_that_differ_per_device():
    """Choices inside `shard_map` must not mix replicated and varying."""
    tree, layouts = random_tree(SHARED), shared_layouts()
    mesh = jax.make_mesh(
        (1,),
        ("host",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:1],
    )

    def one(stacked):
        local = jax.tree.map(lambda x: x[0], stacked)
        found = project(local, layouts, count(layouts, 2))
        return jax.tree.map(lambda x: x[None], found)

    spec = PartitionSpec("host")
    mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))
    projected = mapped(jax.tree.map(lambda x: x[None], tree))
    for path in tree:
        expected = project(tree, layouts, count(layouts, 2))[path]
        np.testing.assert_array_equal(projected[path][0], expected)


def test_a_choice_may_follow_other_scores_and_never_revives():
    """What hosts agree on: scores of all of them, among the channels that live."""
    tree, layouts = random_tree(SHARED), shared_layouts()
    scores = {name: jnp.arange(float(n)) for name, n in group_sizes(layouts).items()}
    alive = {name: jnp.arange(len(x)) != len(x) - 1 for name, x in scores.items()}
    found = project_channels(
        tree, layouts, count(layouts, 1), scores=scores, alive=alive
    )
    for name, score in scores.items():
        assert found.keep_indices[name].tolist() == [len(score) - 2]
        assert np.flatnonzero(found.masks[name]).tolist() == [len(score) - 2]
    expected = mask_channels(tree, layouts, found.masks)
    jax.tree.map(np.testing.assert_array_equal, found.tree, expected)
