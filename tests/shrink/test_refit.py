"""Repair is the ridge regression of what was read on what is left, in any function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import trace_channels
from prunex_jax.shrink import certify, make_cut
from prunex_jax.shrink.refit import pack_symmetric, repair, unpack_symmetric

RIDGE = 1e-4


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense(params, x):
    h = jax.nn.relu(x @ params["in"] + params["bias"][None])
    return h @ params["out"]


DENSE = {"in": normal(0, 6, 16), "bias": normal(1, 16), "out": normal(2, 16, 3)}
X = normal(3, 200, 6)


def conv(params, x, strides=(1, 1), dimensions=("NHWC", "HWIO", "NHWC"), dilation=1):
    convolve = functools.partial(
        lax.conv_general_dilated, padding="SAME", dimension_numbers=dimensions
    )
    h = jax.nn.relu(convolve(x, params["in"], (1, 1)))
    out = convolve(h, params["out"], strides, rhs_dilation=(dilation, dilation))
    return out.mean((1, 2) if dimensions[0] == "NHWC" else (2, 3))


CONV = {"in": normal(4, 3, 3, 2, 8), "out": normal(5, 3, 3, 8, 5)}
IMAGES = normal(6, 30, 6, 6, 2)


def heads(params, x):
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[name]) for name in "qkv")
    attended = jax.nn.dot_product_attention(q, k, v)
    return jnp.einsum("bthd,hdm->btm", attended, params["out"])


HEADS = {**{n: normal(i, 12, 4, 3) / 3 for i, n in enumerate("qkv")},
         "out": normal(7, 4, 3, 12)}  # fmt: skip
TOKENS = normal(8, 20, 5, 12)


def wrapped(params, x):
    """The same as `dense`, inside of calls, with its parameters moved around."""

    @jax.checkpoint
    def block(kernel, bias, x):
        return jax.jit(jax.nn.relu)(x @ jnp.squeeze(kernel).T + bias[None])

    h = block(params["in"], params["bias"], x)
    both = params["out"].reshape(16, 6)
    return lax.dot_general(both[:, ::2], h, (((0,), (1,)), ((), ()))).T


WRAPPED = {
    "in": DENSE["in"].T[None],
    "bias": DENSE["bias"],
    "out": jnp.stack([DENSE["out"], 0 * DENSE["out"]], -1).reshape(16, 3, 2),
}

CASES = {
    "dense": (dense, DENSE, X),
    "bfloat16": (
        lambda p, x: dense(p, x.astype(jnp.bfloat16)).astype(jnp.float32),
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), DENSE),
        X,
    ),
    "convolution": (conv, CONV, IMAGES),
    "strides and dilation": (
        functools.partial(conv, strides=(2, 2), dilation=2),
        CONV,
        IMAGES,
    ),
    "channels first": (
        functools.partial(conv, dimensions=("NCHW", "OIHW", "NCHW")),
        {name: jnp.transpose(x, (3, 2, 0, 1)) for name, x in CONV.items()},
        jnp.transpose(IMAGES, (0, 3, 1, 2)),
    ),
    "heads": (heads, HEADS, TOKENS),
    "calls and moves": (wrapped, WRAPPED, X),
}


def half_of(apply, params, x, **options):
    """Every other channel of every group goes."""
    trace = trace_channels(apply, params, x, **options)
    assert trace.groups
    masks = {g.name: np.arange(g.size) % 2 == 0 for g in trace.groups}
    return make_cut(trace, masks, params)


def error(apply, params, other, x):
    wanted, found = apply(params, x), apply(other, x)
    return float(jnp.sum((wanted - found) ** 2) / jnp.sum(wanted**2))


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_is_nearer_to_what_it_was(case):
    apply, params, x = CASES[case]
    cut = half_of(apply, params, x)
    fitted, masked = repair(apply, params, cut, x, ridge=RIDGE), cut.mask(params)
    assert error(apply, params, fitted, x) < 0.8 * error(apply, params, masked, x)
    for path, leaf in flatten_by_path(fitted).items():
        assert leaf.dtype == flatten_by_path(params)[path].dtype
    # Only the products that read what goes have changed, and what goes is zero.
    again = cut.mask(fitted)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(fitted)))
    changed = [
        path
        for path, leaf in flatten_by_path(fitted).items()
        if not np.array_equal(leaf, flatten_by_path(masked)[path])
    ]
    assert changed == ["out"]


@pytest.mark.parametrize("case", ["dense", "convolution", "heads"])
def test_the_small_network_computes_what_was_fitted(case):
    apply, params, x = CASES[case]
    cut = half_of(apply, params, x)
    fitted = repair(apply, params, cut, x, ridge=RIDGE)
    small = cut.function(apply)
    certify(apply, small, fitted, cut.take(fitted), [x], cut.take).check()


def test_one_product_is_the_ridge_regression_of_numpy():
    cut = half_of(dense, DENSE, X)
    (kept,) = cut.keep_indices.values()
    fitted = repair(dense, DENSE, cut, X, ridge=0.1)
    h = np.maximum(np.asarray(X @ DENSE["in"] + DENSE["bias"][None], np.float64), 0)
    left, old = h[:, kept], np.asarray(DENSE["out"], np.float64)
    size = 0.1 * (left**2).sum() / len(kept)
    # What pulls to the old weights is more rows of the same regression.
    rows = np.vstack([left, np.sqrt(size) * np.eye(len(kept))])
    wanted = np.vstack([h @ old, np.sqrt(size) * old[kept]])
    exact = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    np.testing.assert_allclose(fitted["out"][kept], exact, rtol=1e-4, atol=1e-5)


def test_a_channel_that_others_add_up_to_costs_nothing():
    """Before a product that reads it, a channel is a mix of two that stay."""

    def apply(params, x):
        return (x @ params["in"]) @ params["out"]

    first = normal(0, 6, 4)
    params = {"in": jnp.concatenate([first, first[:, :2] - first[:, 2:]], 1)}
    params["out"] = normal(1, 6, 3)
    trace = trace_channels(apply, params, X)
    cut = make_cut(trace, {trace.groups[0].name: np.arange(6) < 4}, params)
    fitted = repair(apply, params, cut, X, ridge=1e-7)
    assert error(apply, params, cut.mask(params), X) > 0.1
    assert error(apply, params, fitted, X) < 1e-8


def deep(params, x):
    for number in range(4):
        x = jax.nn.relu(x @ params[f"{number}"])
    return x @ params["last"]


def test_later_products_make_up_for_earlier_ones():
    """Each fitted to its own inputs of the whole network, four in a row are worse."""
    params = {f"{n}": normal(n, 24, 24) / 4 for n in range(4)}
    params["last"] = normal(9, 24, 5)
    x, fresh = normal(10, 400, 24), normal(11, 400, 24)
    cut = half_of(deep, params, x)
    fitted = repair(deep, params, cut, x, ridge=RIDGE)
    alone = dict(cut.mask(params))
    for depth, path in enumerate(("1", "2", "3", "last"), 1):
        h = x
        for number in range(depth):
            h = jax.nn.relu(h @ params[f"{number}"])
        kept = np.arange(24) % 2 == 0
        fit = np.linalg.lstsq(h[:, kept], h @ params[path], rcond=None)[0]
        alone[path] = jnp.zeros_like(params[path]).at[kept].set(fit)
    alone = cut.mask(alone)
    assert error(deep, params, fitted, fresh) < 0.9 * error(deep, params, alone, fresh)


def test_hosts_that_add_up_their_sums_fit_the_same():
    cut = half_of(dense, DENSE, X)
    wanted = repair(dense, DENSE, cut, X, ridge=RIDGE)
    mesh = jax.make_mesh((4,), ("host",), (jax.sharding.AxisType.Auto,))

    def fit(params, x):
        return repair(
            dense, params, cut, x, ridge=RIDGE, total=lambda s: lax.psum(s, "host")
        )

    found = jax.jit(
        jax.shard_map(
            fit, mesh=mesh, in_specs=(jax.P(), jax.P("host")), out_specs=jax.P()
        )
    )(DENSE, X)
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, wanted[path], rtol=1e-4, atol=1e-5)


def test_running_statistics_are_read_and_left_alone():
    def apply(params, statistics, x):
        h = x @ params["in"]
        h = (h - statistics["mean"][None]) * params["scale"][None]
        return jax.nn.relu(h) @ params["out"]

    params = {**DENSE, "scale": normal(4, 16)}
    del params["bias"]
    statistics = {"mean": normal(5, 16)}
    trace = trace_channels(apply, params, X, statistics=statistics)
    masks = {g.name: np.arange(g.size) % 2 == 0 for g in trace.groups}
    cut = make_cut(trace, masks, params, statistics)
    fitted = repair(apply, params, cut, X, statistics=statistics)
    whole = functools.partial(lambda s, p, x: apply(p, s, x), statistics)
    masked = cut.mask(params)
    assert error(whole, params, fitted, X) < 0.5 * error(whole, params, masked, X)


def test_flax_modules_are_repaired():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 16, rngs=rngs)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.last = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(jax.nn.gelu(self.norm(self.first(x))))

    definition, params = nnx.split(Network(nnx.Rngs(0)))
    pure = nnx.to_pure_dict(params)

    def apply(params, x):
        return nnx.merge(definition, nnx.State(params))(x)

    cut = half_of(apply, pure, X)
    fitted = repair(apply, pure, cut, X)
    assert error(apply, pure, fitted, X) < 0.7 * error(apply, pure, cut.mask(pure), X)


UNCHANGED = {
    # Fitting the head would change the embedding.
    "tied": lambda p, x: jax.nn.relu(x @ p["in"]) @ p["in"].T,
    "read twice": lambda p, x: (
        jax.nn.relu(x @ p["in"]) @ p["out"] + jax.nn.tanh(x @ p["in"]) @ p["out"]
    ),
    "added to": lambda p, x: jax.nn.relu(x @ p["in"]) @ (p["out"] + 1.0),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_parameters_that_are_read_otherwise_too_are_left_alone(case):
    apply = UNCHANGED[case]
    params = {"in": normal(0, 6, 16)} | (
        {"out": normal(1, 16, 3)} if case != "tied" else {}
    )
    trace = trace_channels(apply, params, X)
    group = next(g for g in trace.groups if g.size == 16)
    cut = make_cut(trace, {group.name: np.arange(16) % 2 == 0}, params)
    with pytest.raises(UserError, match="no matrix product or convolution"):
        repair(apply, params, cut, X)


@pytest.mark.parametrize("size", range(1, 8))
def test_symmetric_matrices_are_sent_in_half_of_their_entries(size):
    first, second = (
        (matrix := jax.random.normal(jax.random.key(seed), (size, size))) + matrix.T
        for seed in (0, 1)
    )
    packed = pack_symmetric(first)
    assert packed.size == (size + 1) // 2 * (size + 1)
    np.testing.assert_array_equal(unpack_symmetric(packed, size), first)
    # What hosts add up is the sum of what they have packed.
    np.testing.assert_array_equal(
        unpack_symmetric(packed + pack_symmetric(second), size), first + second
    )
