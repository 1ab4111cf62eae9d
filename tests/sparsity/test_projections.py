"""Projections and proximal maps against the problems their docstrings state."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from prunex_jax.base.errors import UserError
from prunex_jax.channels.groups import ChannelGroup, ChannelSlice, layouts_of
from prunex_jax.channels.slicing import mask_channels
from prunex_jax.sparsity import (
    channel_scores,
    choose_keep_indices,
    group_sizes,
    masks_of,
    project_channels,
    prox_group_l0,
    prox_group_l2,
    shared_paths,
)
from prunex_jax.sparsity.proximal import root_entry_weights

# float32 sums of at most a few hundred squares.
ROUNDING = 1e-5
# What 100 dual steps leave of the error on trees this small.
CONVERGED = 2e-5


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
    return {n: np.sqrt(np.asarray(s)) for n, s in channel_scores(tree, layouts).items()}


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


@pytest.mark.parametrize(("shapes", "layouts"), CASES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_projection_is_feasible_and_idempotent(shapes, layouts, number):
    tree = random_tree(shapes)
    once = project_channels(tree, layouts, count(layouts, number))
    for norms in norms_of(once, layouts).values():
        assert (norms > 0).sum() <= number
    twice = project_channels(once, layouts, count(layouts, number))
    for path in tree:
        np.testing.assert_array_equal(once[path], twice[path])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [1, 2])
def test_no_subset_is_nearer_when_entries_are_not_shared(number, seed):
    tree, layouts = random_tree(SEPARATE, seed), separate_layouts()
    reached = squared_distance(
        tree, project_channels(tree, layouts, count(layouts, number))
    )
    nearest = min(
        squared_distance(tree, mask_channels(tree, layouts, masks))
        for masks in all_masks(layouts, count(layouts, number))
    )
    assert reached <= nearest * (1 + ROUNDING)


@pytest.mark.parametrize(("shapes", "layouts"), CASES[1:])
@pytest.mark.parametrize("seed", range(2))
def test_shared_projection_is_within_twice_the_nearest(shapes, layouts, seed):
    tree = random_tree(shapes, seed)
    reached = squared_distance(tree, project_channels(tree, layouts, count(layouts, 2)))
    nearest = min(
        squared_distance(tree, mask_channels(tree, layouts, masks))
        for masks in all_masks(layouts, count(layouts, 2))
    )
    assert nearest * (1 - ROUNDING) <= reached <= 2 * nearest


@pytest.mark.parametrize(("shapes", "layouts"), CASES)
def test_nothing_feasible_with_the_same_channels_is_nearer(shapes, layouts):
    tree, counts = random_tree(shapes), count(layouts, 2)
    kept = choose_keep_indices(channel_scores(tree, layouts), counts)
    masks = masks_of(kept, group_sizes(layouts))
    projected = project_channels(tree, layouts, counts)
    reached = squared_distance(tree, projected)
    for seed in range(20):
        noise = random_tree(shapes, 100 + seed)
        other = {p: projected[p] + 0.1 * noise[p] for p in projected}
        other = mask_channels(other, layouts, masks)
        assert reached < squared_distance(tree, other)


def test_keeping_everything_changes_nothing():
    tree, layouts = random_tree(SHARED), shared_layouts()
    kept = project_channels(tree, layouts, group_sizes(layouts))
    for path in tree:
        np.testing.assert_array_equal(kept[path], tree[path])


def test_dead_entries_are_zero_even_where_they_were_not_finite():
    tree, layouts = random_tree(SEPARATE), separate_layouts()
    tree["k1"] = tree["k1"].at[0, 1].set(jnp.nan)
    projected = project_channels(tree, layouts, count(layouts, 2))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in projected.values())
    assert not np.asarray(projected["k1"])[:, 1].any()


def penalty_l2(tree, layouts, strength, weights):
    norms = norms_of(tree, layouts)
    return strength * sum(weights[name] * norm.sum() for name, norm in norms.items())


@pytest.mark.parametrize(("shapes", "layouts"), CASES)
@pytest.mark.parametrize("strength", [0.3, 1.5, 3.0])
def test_group_l2_has_no_duality_gap(shapes, layouts, strength):
    """The optimality condition: tree - x is `strength` times a subgradient at x."""
    tree = random_tree(shapes)
    weights = dict.fromkeys(group_sizes(layouts), 1.0)
    x = prox_group_l2(tree, layouts, strength)
    rest = {p: tree[p] - x[p] for p in tree}
    inner = sum(float(jnp.sum(rest[p] * x[p])) for p in tree)
    penalty = penalty_l2(x, layouts, strength, weights)
    assert abs(inner - penalty) < CONVERGED * penalty
    # And no direction descends.
    value = 0.5 * squared_distance(x, tree) + penalty
    for seed, size in itertools.product(range(6), (0.01, 0.3)):
        noise = random_tree(shapes, 100 + seed)
        other = {p: x[p] + size * noise[p] for p in x}
        far = 0.5 * squared_distance(other, tree)
        far += penalty_l2(other, layouts, strength, weights)
        assert value < far


def test_group_l2_is_the_soft_threshold_when_entries_are_not_shared():
    tree, layouts = random_tree(SEPARATE), separate_layouts()
    before, strength = norms_of(tree, layouts), 1.7
    weights = root_entry_weights(tree, layouts)
    assert weights == {"a": pytest.approx(6**0.5), "b": 2.0}
    x = prox_group_l2(tree, layouts, strength / 2, weights)
    after = norms_of(x, layouts)
    for name in before:
        expected = np.maximum(0, before[name] - strength / 2 * weights[name])
        np.testing.assert_allclose(after[name], expected, atol=ROUNDING)
        assert (after[name] == 0).any() or (expected > 0).all()
    factor = after["a"] / before["a"]
    np.testing.assert_allclose(x["k1"], np.asarray(tree["k1"]) * factor, atol=ROUNDING)
    np.testing.assert_array_equal(x["bias"], tree["bias"])
    np.testing.assert_array_equal(x["ab"][7], tree["ab"][7])


@pytest.mark.parametrize(("shapes", "layouts"), CASES)
def test_group_l2_is_firmly_non_expansive(shapes, layouts):
    prox = jax.jit(lambda tree: prox_group_l2(tree, layouts, 0.7))
    for seed in range(10):
        u = random_tree(shapes, seed)
        v = {p: u[p] + 0.3 * d for p, d in random_tree(shapes, 50 + seed).items()}
        x, y = prox(u), prox(v)
        inner = sum(float(jnp.sum((x[p] - y[p]) * (u[p] - v[p]))) for p in u)
        assert squared_distance(x, y) <= inner + CONVERGED * squared_distance(u, v)


def test_group_l2_gives_exact_zeros_where_entries_are_shared():
    tree, layouts = random_tree(SHARED), shared_layouts()
    norms = norms_of(prox_group_l2(tree, layouts, 3.0), layouts)
    dead = sum(int((norm == 0).sum()) for norm in norms.values())
    tiny = sum(int(((norm > 0) & (norm < 1e-3)).sum()) for norm in norms.values())
    assert 0 < dead < sum(len(norm) for norm in norms.values())
    assert tiny == 0, "channels that are dead in the limit are still alive"


@pytest.mark.parametrize("prox", [prox_group_l0, prox_group_l2])
def test_extreme_strengths(prox):
    tree, layouts = random_tree(SHARED), shared_layouts()
    for path, leaf in prox(tree, layouts, 0.0).items():
        np.testing.assert_array_equal(leaf, tree[path])
    gone = prox(tree, layouts, 1e3)
    assert all(not norm.any() for norm in norms_of(gone, layouts).values())
    np.testing.assert_array_equal(gone["bias"], tree["bias"])


@pytest.mark.parametrize(("shapes", "layouts"), CASES)
def test_group_l0_against_all_subsets(shapes, layouts):
    tree, strength = random_tree(shapes), 1.5
    weights = {name: 1.0 + i for i, name in enumerate(group_sizes(layouts))}

    def value(x):
        alive = {n: (norm > 0).sum() for n, norm in norms_of(x, layouts).items()}
        price = sum(weights[n] * alive[n] for n in alive)
        return 0.5 * squared_distance(x, tree) + strength * price

    sizes = group_sizes(layouts)
    masks = [
        [jnp.array(bits) for bits in itertools.product([False, True], repeat=size)]
        for size in sizes.values()
    ]
    apply = jax.jit(functools.partial(mask_channels, layouts=layouts))
    every = [
        value(apply(tree, masks=dict(zip(sizes, choice, strict=True))))
        for choice in itertools.product(*masks)
    ]
    reached = value(prox_group_l0(tree, layouts, strength, weights))
    bound = 2.0 if shared_paths(layouts) else 1 + ROUNDING
    assert reached <= bound * min(every)
    assert reached < max(value(tree), value(jax.tree.map(jnp.zeros_like, tree)))


@pytest.mark.parametrize("prox", [prox_group_l0, prox_group_l2])
def test_bad_proximal_arguments_are_refused(prox):
    tree, layouts = random_tree(SEPARATE), separate_layouts()
    with pytest.raises(UserError, match=r"strength -1 .* must not be negative"):
        prox(tree, layouts, -1.0)
    with pytest.raises(UserError, match=r"no entry for channel group 'b'"):
        prox(tree, layouts, 1.0, {"a": 1.0})


def test_no_iterations_are_refused():
    with pytest.raises(UserError, match=r"num_iterations 0 must be at least 1"):
        prox_group_l2(random_tree(SHARED), shared_layouts(), 1.0, num_iterations=0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_types_and_traced_strengths(dtype):
    tree, layouts = random_tree(SHARED), shared_layouts()
    low = {p: leaf.astype(dtype) for p, leaf in tree.items()}
    x = jax.jit(lambda t, s: prox_group_l2(t, layouts, s))(low, 0.5)
    exact = prox_group_l2(tree, layouts, 0.5)
    for path, leaf in x.items():
        assert leaf.dtype == dtype
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            leaf.astype(jnp.float32), exact[path], rtol=2 * eps, atol=2 * eps
        )


def test_everything_works_on_values_that_differ_per_device():
    """Loops and choices inside `shard_map` must not mix replicated and varying."""
    tree, layouts = random_tree(SHARED), shared_layouts()
    mesh = jax.make_mesh(
        (1,),
        ("host",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:1],
    )

    def both(stacked):
        local = jax.tree.map(lambda x: x[0], stacked)
        out = (
            project_channels(local, layouts, count(layouts, 2)),
            prox_group_l2(local, layouts, 0.5),
            prox_group_l0(local, layouts, 0.5),
        )
        return jax.tree.map(lambda x: x[None], out)

    spec = PartitionSpec("host")
    mapped = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec))
    projected, soft, _ = mapped(jax.tree.map(lambda x: x[None], tree))
    for path in tree:
        expected = project_channels(tree, layouts, count(layouts, 2))[path]
        np.testing.assert_array_equal(projected[path][0], expected)
        np.testing.assert_allclose(
            soft[path][0], prox_group_l2(tree, layouts, 0.5)[path], atol=ROUNDING
        )
