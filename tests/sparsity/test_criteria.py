"""Criteria beside the norm: what they are, and what they do not depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.channels import layouts_of, sum_squares_by_channel, trace_channels
from prunex_jax.sparsity import (
    channel_scores,
    gradient_scores,
    running_mean,
    uses_gradients,
)
from tests.helpers.channel_checks import draw

SHAPES = {
    "in": {"kernel": (5, 8), "bias": (8,)},
    "norm": {"scale": (8,), "beta": (8,)},
    "mid": {"kernel": (8, 6), "bias": (6,)},
    "out": {"kernel": (6, 3)},
}
X = draw({"x": (16, 5)}, seed=1)["x"]
WISHES = draw({"x": (16, 3)}, seed=2)["x"]


def apply(p, x):
    x = x @ p["in"]["kernel"] + p["in"]["bias"][None]
    x = jax.nn.relu(x * p["norm"]["scale"][None] + p["norm"]["beta"][None])
    x = jax.nn.relu(x @ p["mid"]["kernel"] + p["mid"]["bias"][None])
    return x @ p["out"]["kernel"]


def loss(p):
    return jnp.mean((apply(p, X) - WISHES) ** 2)


PARAMS = draw(SHAPES, seed=0)
TRACE = trace_channels(apply, PARAMS, X)
LAYOUTS = layouts_of(TRACE.groups, TRACE.shapes)
GRADS = jax.grad(loss)(PARAMS)


def scaled(tree, by):
    """A tree with all entries of some channels multiplied, once per axis."""
    flat = dict(zip(TRACE.shapes, jax.tree.leaves(tree), strict=True))
    for path, axes in LAYOUTS.items():
        for axis, layout in axes.items():
            for name, positions in layout.slices:
                factors = jnp.ones(layout.size).at[positions].set(by[name][:, None])
                shape = [1] * flat[path].ndim
                shape[axis] = -1
                flat[path] = flat[path] * factors.reshape(shape)
    return jax.tree.unflatten(jax.tree.structure(tree), flat.values())


def assert_close(found, wanted, **tolerance):
    assert found.keys() == wanted.keys()
    for name, score in found.items():
        np.testing.assert_allclose(score, wanted[name], err_msg=name, **tolerance)


@pytest.mark.slow
def test_taylor_is_the_slope_of_the_loss_along_a_channel():
    """Of a factor that multiplies all entries which carry the channel, at one."""
    ones = {group.name: jnp.ones(group.size) for group in TRACE.groups}
    slopes = jax.grad(lambda by: loss(scaled(PARAMS, by)))(ones)
    found = gradient_scores(PARAMS, GRADS, LAYOUTS)
    assert_close(found, jax.tree.map(jnp.abs, slopes), rtol=1e-4, atol=1e-6)
    assert all(score.max() > 1e-3 for score in found.values())


def test_taylor_does_not_see_scales_that_cancel():
    """relu(c x) = c relu(x): channels of another size and the same function."""
    factor = jnp.array([0.1, 10.0, 2.0, 1.0, 0.5, 3.0])
    other = jax.tree.map(jnp.copy, PARAMS)
    other["mid"]["kernel"] = other["mid"]["kernel"] * factor[None]
    other["mid"]["bias"] = other["mid"]["bias"] * factor
    other["out"]["kernel"] = other["out"]["kernel"] / factor[:, None]
    np.testing.assert_allclose(loss(other), loss(PARAMS), rtol=1e-5)
    found = gradient_scores(other, jax.grad(loss)(other), LAYOUTS)
    wanted = gradient_scores(PARAMS, GRADS, LAYOUTS)
    assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    norms = [channel_scores("norm", p, LAYOUTS)["mid"] for p in (PARAMS, other)]
    assert (np.argsort(norms[0]) != np.argsort(norms[1])).any(), "norms do"


def test_scales_rank_the_channels_that_have_some():
    """Biases are none, and channels without a norm are ranked by their own."""
    scores = channel_scores("scale", PARAMS, LAYOUTS)
    norms = sum_squares_by_channel(PARAMS, LAYOUTS)
    np.testing.assert_array_equal(scores["in"], PARAMS["norm"]["scale"] ** 2)
    np.testing.assert_array_equal(scores["mid"], norms["mid"])
    assert not np.allclose(scores["in"], norms["in"])


def test_several_scales_add_up():
    def two_norms(p, x):
        h = x @ p["a"]
        h = jnp.tanh(h * p["one"]["scale"][None]) + h * p["two"]["gamma"][None]
        return h @ p["b"]

    shapes = {"a": (5, 8), "b": (8, 3), "one": {"scale": (8,)}, "two": {"gamma": (8,)}}
    params = draw(shapes, seed=3)
    trace = trace_channels(two_norms, params, X)
    layouts = layouts_of(trace.groups, trace.shapes)
    wanted = params["one"]["scale"] ** 2 + params["two"]["gamma"] ** 2
    (found,) = channel_scores("scale", params, layouts).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_the_mean_is_plain_at_first_and_forgets_later():
    rng = np.random.default_rng(0)
    rows = rng.exponential(size=(600, 4)).astype(np.float32)

    def step(mean, pair):
        row, number = pair
        after = running_mean({"a": mean}, {"a": row}, number)["a"]
        return after, after

    numbers = jnp.arange(len(rows), dtype=jnp.int32)
    _, means = jax.lax.scan(step, jnp.zeros(4), (jnp.asarray(rows), numbers))
    for count in (1, 7, 100):
        np.testing.assert_allclose(means[count - 1], rows[:count].mean(0), rtol=1e-4)
    weights = 0.01 * 0.99 ** np.arange(500)[::-1]
    wanted = weights @ rows[100:] + 0.99**500 * rows[:100].mean(0)
    np.testing.assert_allclose(means[-1], wanted, rtol=1e-4)


def test_the_norm_is_the_norm():
    assert_close(
        channel_scores("norm", PARAMS, LAYOUTS),
        sum_squares_by_channel(PARAMS, LAYOUTS),
        rtol=0,
    )


def test_what_cannot_be_compared_stays_finite():
    """A channel that is zero, and gradients that are."""
    dead = jax.tree.map(lambda x: x.at[..., 0].set(0.0), PARAMS)
    assert uses_gradients("taylor") and not uses_gradients("scale")
    for grads in (GRADS, jax.tree.map(jnp.zeros_like, GRADS)):
        found = gradient_scores(dead, grads, LAYOUTS)
        for name, score in channel_scores("taylor", dead, LAYOUTS, found).items():
            assert score.dtype == jnp.float32, name
            assert np.isfinite(score).all() and (score >= 0).all(), name
