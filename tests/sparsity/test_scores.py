"""Scores and the choice of channels: what ranks first, and that everyone agrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import sum_squares_by_channel
from prunex_jax.channels.groups import ChannelGroup, ChannelSlice, layouts_of
from prunex_jax.sparsity import (
    choose_keep_indices,
    masks_of,
    narrow_alive,
    normalise_scores,
)
from prunex_jax.sparsity.choice import group_sizes

# conv [1, 1, 2, 4] -> norm [4] -> flattened 1x2 map -> dense [8, 3]
SHAPES = {"conv": (1, 1, 2, 4), "norm": (4,), "dense": (8, 3), "bias": (3,)}


def conv_norm_dense():
    hidden = ChannelGroup(
        "hidden",
        4,
        (
            ChannelSlice("conv", 3, np.arange(4)[:, None]),
            ChannelSlice("norm", 0, np.arange(4)[:, None]),
            # Channel c of a flattened 1x2 map owns rows c and c + 4.
            ChannelSlice("dense", 0, np.arange(4)[:, None] + [0, 4]),
        ),
    )
    inputs = ChannelGroup(
        "inputs", 2, (ChannelSlice("conv", 2, np.arange(2)[:, None]),)
    )
    layouts = layouts_of([hidden, inputs], SHAPES)
    rng = np.random.default_rng(0)
    tree = {
        path: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for path, shape in SHAPES.items()
    }
    return tree, layouts


def test_score_is_the_energy_of_all_members():
    tree, layouts = conv_norm_dense()
    conv, norm, dense = (np.asarray(tree[k]) for k in ("conv", "norm", "dense"))
    scores = sum_squares_by_channel(tree, layouts)
    for c in range(4):
        entries = [conv[..., c].ravel(), norm[[c]], dense[[c, c + 4]].ravel()]
        expected = np.sum(np.concatenate(entries) ** 2)
        np.testing.assert_allclose(scores["hidden"][c], expected, rtol=1e-6)
    np.testing.assert_allclose(
        scores["inputs"], np.sum(conv**2, axis=(0, 1, 3)), rtol=1e-6
    )


def test_raw_scores_add_up_over_hosts():
    tree, layouts = conv_norm_dense()
    other = jax.tree.map(lambda x: 3 * x[::-1], tree)
    stacked = jax.tree.map(lambda a, b: jnp.sqrt(a**2 + b**2), tree, other)
    expected = sum_squares_by_channel(stacked, layouts)
    for name, score in sum_squares_by_channel(tree, layouts).items():
        total = score + sum_squares_by_channel(other, layouts)[name]
        np.testing.assert_allclose(total, expected[name], rtol=1e-5)


def test_normalised_scores_ignore_the_scale_of_a_group():
    tree, layouts = conv_norm_dense()
    scores = sum_squares_by_channel(tree, layouts)
    scaled = {name: score * 1e4 for name, score in scores.items()}
    direct = normalise_scores(scores)
    for name, score in normalise_scores(scaled).items():
        np.testing.assert_allclose(score, direct[name], rtol=1e-5)
        np.testing.assert_allclose(jnp.mean(score), 1.0, rtol=1e-5)
        assert (np.argsort(score) == np.argsort(scores[name])).all()


def test_normalised_scores_of_broken_groups():
    scores = {
        "zero": jnp.zeros(3),
        "nan": jnp.array([jnp.nan, 2.0, 2.0, 4.0]),
        "inf": jnp.array([jnp.inf, 1.0]),
    }
    normalised = normalise_scores(scores)
    assert normalised["zero"].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(normalised["nan"], [np.nan, 1, 1, 2])
    assert normalised["inf"].tolist() == [np.inf, 2.0]


def test_what_layouts_say_about_groups():
    _, layouts = conv_norm_dense()
    assert group_sizes(layouts) == {"hidden": 4, "inputs": 2}


@pytest.mark.parametrize(
    ("score", "count", "expected"),
    [
        ([1.0, 4.0, 2.0, 3.0], 2, [1, 3]),
        ([2.0, 2.0, 2.0, 2.0], 2, [0, 1]),
        ([1.0, 2.0, 2.0, 2.0], 2, [1, 2]),
        ([0.0, -0.0, 0.0, -0.0], 3, [0, 1, 2]),
        ([np.nan, 0.0, np.nan, 1.0], 2, [1, 3]),
        ([np.nan, 0.0, np.nan, 1.0], 3, [0, 1, 3]),
        ([np.nan, -np.inf, np.inf, 1.0], 3, [1, 2, 3]),
        ([np.nan] * 4, 2, [0, 1]),
    ],
)
def test_order_of_the_choice(score, count, expected):
    kept = choose_keep_indices({"a": jnp.array(score)}, {"a": count})["a"]
    assert kept.tolist() == expected
    assert kept.dtype == jnp.int32


@pytest.mark.parametrize(
    ("alive", "expected"),
    [
        ([True, False, True, True], [2, 3]),
        # NaN but alive goes before dead.
        ([True, False, False, True], [0, 3]),
        # Too few alive: filled with dead ones, best first.
        ([False, False, False, True], [1, 3]),
    ],
)
def test_dead_channels_are_never_preferred(alive, expected):
    scores = {"a": jnp.array([jnp.nan, 9.0, 1.0, 2.0])}
    alive = {"a": jnp.array(alive)}
    kept = choose_keep_indices(scores, {"a": 2}, alive)
    assert kept["a"].tolist() == expected
    after = narrow_alive(alive, kept)["a"]
    assert not (after & ~alive["a"]).any(), "a dead channel came back"
    assert int(after.sum()) == min(2, int(alive["a"].sum()))


def test_choice_follows_the_channels_when_they_are_reordered():
    rng = np.random.default_rng(1)
    score, order = rng.permutation(40).astype(np.float32), rng.permutation(40)
    kept = choose_keep_indices({"a": jnp.asarray(score)}, {"a": 13})["a"]
    moved = choose_keep_indices({"a": jnp.asarray(score[order])}, {"a": 13})["a"]
    assert sorted(order[np.asarray(moved)]) == kept.tolist()


def test_masks_keep_exactly_the_counts():
    sizes, counts = {"a": 16, "b": 5}, {"a": 4, "b": 5}
    rng = np.random.default_rng(2)
    scores = {n: jnp.asarray(rng.normal(size=s)) for n, s in sizes.items()}
    kept = choose_keep_indices(scores, counts)
    masks = masks_of(kept, sizes)
    assert {n: int(m.sum()) for n, m in masks.items()} == counts
    assert {n: m.shape[0] for n, m in masks.items()} == sizes


def test_moving_scores_do_not_trace_again():
    num_traces = 0

    @jax.jit
    def choose(scores, alive):
        nonlocal num_traces
        num_traces += 1
        return choose_keep_indices(scores, {"a": 3}, alive)

    alive = {"a": jnp.ones(8, bool)}
    seen = set()
    for seed in range(4):
        scores = {"a": jax.random.normal(jax.random.key(seed), (8,))}
        seen.add(tuple(choose(scores, alive)["a"].tolist()))
    assert len(seen) > 1, "the scores never moved the choice"
    assert num_traces == 1


@pytest.mark.parametrize(
    ("counts", "alive", "text"),
    [
        ({"a": 5}, None, r"keep_count 5 of channel group 'a' is outside \[1, 4\]"),
        ({"a": 0}, None, r"keep_count 0 of channel group 'a' is outside \[1, 4\]"),
        ({"b": 1}, None, r"scores and keep_counts differ in channel group 'a'"),
        ({"a": 1}, {}, r"scores and alive differ in channel group 'a'"),
    ],
)
def test_impossible_choices_are_refused(counts, alive, text):
    with pytest.raises(UserError, match=text):
        choose_keep_indices({"a": jnp.ones(4)}, counts, alive)
