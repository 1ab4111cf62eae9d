"""What dead channels share and is known while running only is counted exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prunex_jax.channels import trace_channels
from prunex_jax.shrink import make_cut
from tests.helpers.channel_checks import assert_exact, draw, members_of

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]
TOKENS = draw({"x": (2, 5, 3)}, seed=3)["x"]


def scaled(h, p):
    along = (1,) * (h.ndim - 1) + (-1,)
    return h * p["scale"].reshape(along) + p["shift"].reshape(along)


def two_pass(h):
    h = h - h.mean(-1, keepdims=True)
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)


def of_library(h):
    return jax.nn.standardize(h, axis=-1)


def by_products(h):
    """Sums as products with ones, and with itself."""
    size = h.shape[-1]
    h = h - (h @ jnp.ones((size, 1))) / size
    return h * lax.rsqrt(jnp.einsum("...c,...c->...", h, h) / size + 1e-5)[..., None]


def by_deviation(h):
    h = h - jnp.mean(h, -1, keepdims=True)
    return h / (jnp.abs(h).mean(-1, keepdims=True) + 1e-3)


def by_range(h):
    h = h - h.mean(-1, keepdims=True)
    return h / (h.max(-1, keepdims=True) - h.min(-1, keepdims=True))


def squashed(h):
    """Higher moments of what a function makes of the dead."""
    h = jnp.tanh(h - h.mean(-1, keepdims=True)) ** 3
    return h / (1 + jnp.exp(h).sum(-1, keepdims=True))


def softmax_of_all(h):
    e = jnp.exp(h - lax.stop_gradient(h.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def in_bfloat16_and_back(h):
    return two_pass(h.astype(jnp.bfloat16).astype(jnp.float32))


NORMS = [
    two_pass,
    of_library,
    by_products,
    by_deviation,
    by_range,
    squashed,
    softmax_of_all,
    in_bfloat16_and_back,
]
SHAPES = {"a": (3, 8), "scale": (8,), "shift": (8,), "b": (8, 2)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", NORMS)
def test_channels_behind_a_norm_can_all_be_removed(norm):
    def apply(p, x):
        return jnp.tanh(scaled(norm(x @ p["a"]), p)) @ p["b"]

    trace = assert_exact(apply, draw(SHAPES), TOKENS, densities=(0.25,))
    assert members_of(trace).keys() == {"a"}
    assert trace.prunable_share() == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_a_norm_reads_what_is_shared_twice(norm):
    def apply(p, x):
        return jnp.sin(norm(norm(x @ p["a"])) @ p["b"])

    assert members_of(assert_exact(apply, draw(SHAPES), X, densities=(0.5,)))


def group_norm(h, groups):
    parts = h.reshape(*h.shape[:-1], groups, -1)
    axes = (*range(1, h.ndim - 1), h.ndim)
    parts = parts - parts.mean(axes, keepdims=True)
    parts = parts * lax.rsqrt(jnp.square(parts).mean(axes, keepdims=True) + 1e-5)
    return parts.reshape(h.shape)


def convolve(x, kernel):
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)


def standardised(kernel):
    axes = (0, 1, 2)
    kernel = kernel - kernel.mean(axes, keepdims=True)
    return kernel * lax.rsqrt(kernel.var(axes, keepdims=True) + 1e-6)


KERNELS = {
    "a": (3, 3, 3, 12),
    "scale": (12,),
    "shift": (12,),
    "b": (3, 3, 12, 8),
    "c": (8, 2),
}


@pytest.mark.parametrize("groups", [1, 3, 4, 12])
def test_whole_groups_of_a_group_norm_go_or_the_same_channels_of_all(groups):
    def apply(p, x):
        h = jax.nn.relu(scaled(group_norm(convolve(x, p["a"]), groups), p))
        return convolve(h, p["b"]).mean((1, 2)) @ p["c"]

    trace = assert_exact(apply, draw(KERNELS), IMAGES, densities=(0.5,))
    sizes = {group.name: group.size for group in trace.groups}
    finest = max(groups, 12 // groups)
    assert sizes == {"a": finest, "b": 8}


@pytest.mark.slow
def test_kernels_with_standardised_weights_lose_inputs_and_outputs():
    def apply(p, x):
        h = convolve(x, standardised(p["a"]))
        h = jax.nn.relu(scaled(group_norm(h, 3), p))
        return convolve(h, standardised(p["b"])).mean((1, 2)) @ p["c"]

    trace = assert_exact(apply, draw(KERNELS), IMAGES)
    assert trace.prunable_share() == 1


def block(p, h):
    return h + jnp.tanh(scaled(two_pass(h), p) @ p["w"]) @ p["v"]


LAYER = {"scale": (8,), "shift": (8,), "w": (8, 6), "v": (6, 8), "t": (4, 7), "u": (7,)}


def mixed(p, h):
    """Tokens are mixed for every channel alike, with weights and a bias of tokens."""
    turned = jax.nn.gelu(two_pass(h).T @ p["layer"]["t"] + p["layer"]["u"][None])
    return block(p["layer"], h + (turned @ p["layer"]["t"].T).T)


def looped(p, h):
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), p["layer"])
    return lax.scan(lambda h, q: (block(q, h), None), h, stacked)[0]


def rematerialised(p, h):
    return jax.checkpoint(block)(p["layer"], h)


def chosen(p, h):
    return lax.cond(h.sum() > 0, block, lambda q, h: 2 * h, p["layer"], h)


def repeated(p, h):
    return lax.fori_loop(0, 2, lambda _, h: block(p["layer"], h), h)


def called(p, h):
    return jax.jit(block)(p["layer"], h)


def mapped(p, h):
    return jax.vmap(block, (None, 0))(p["layer"], h)


def around_a_loop(p, h):
    """What is shared is made outside and read inside."""
    centred = h - h.mean(-1, keepdims=True)
    turn = lambda t, _: (jnp.cos(t) + jnp.square(centred).sum(), None)  # noqa: E731
    return centred * lax.scan(turn, 0.0, None, length=2)[0] * p["layer"]["scale"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "body",
    [
        mixed,
        looped,
        rematerialised,
        chosen,
        repeated,
        called,
        mapped,
        around_a_loop,
    ],
)
def test_norms_inside_programs(body):
    def apply(p, x):
        with jax.numpy_rank_promotion("allow"):
            return body(p, x @ p["a"]) @ p["b"]

    params = draw({"layer": LAYER, "a": (3, 8), "b": (8, 2)})
    trace = assert_exact(apply, params, X, densities=(0.5,))
    assert "a" in members_of(trace), trace.explain("a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choose", [jnp.max, jnp.min, jnp.prod])
def test_dead_channels_that_tie_with_kept_ones_share_the_gradient(choose):
    """Half of what is kept is zero as well, so the extreme is a tie."""

    def apply(p, x):
        h = jnp.abs(x @ p["a"])
        return choose(h if choose is jnp.min else -h + 1.0, -1) * (x @ p["c"]).sum(1)

    params = draw({"a": (3, 8), "c": (3, 2)})
    params["a"] = params["a"].at[:, ::2].set(0)
    trace = assert_exact(apply, params, X)
    assert members_of(trace).keys() == {"a", "c"}


def test_whether_all_or_any_channel_is_so_counts_dead_ones():
    """Of weights; an input may be nan, and no comparison with it holds."""

    def apply(p, x):
        w = p["s"]
        every = jnp.all(w > -1, -1) | jnp.any(w > 2, -1) | jnp.all(w != 0)
        return every * (x @ p["a"] * w[None]) @ p["b"]

    params = draw({"a": (3, 8), "s": (8,), "b": (8, 2)})
    assert members_of(assert_exact(apply, params, X))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8])
def test_sums_of_integers_count_dead_channels_and_wrap_as_before(dtype):
    def apply(p, x):
        h = (x @ p["a"] * 3).astype(dtype) + jnp.asarray(50, dtype)
        return (h.sum(-1, keepdims=True, dtype=dtype)).astype(jnp.float32) + x @ p["c"]

    params = draw({"a": (3, 8), "c": (3, 2)})
    trace = trace_channels(apply, params, X)
    for group in trace.groups:
        mask = {group.name: np.arange(group.size) < 3}
        cut = make_cut(trace, mask, params)
        small = cut.function(apply)(cut.take(params), X)
        np.testing.assert_allclose(small, apply(cut.mask(params), X), rtol=1e-5)
    assert "a" in members_of(trace)


def test_extremes_of_types_that_xla_cannot_put_together_stay():
    def apply(p, x):
        h = (x @ p["a"] > 0).astype(jnp.int4)
        return h.max(-1).astype(jnp.float32) + h.astype(jnp.int32).sum(-1)

    trace = assert_exact(apply, draw({"a": (3, 8)}), X)
    assert not trace.groups
    assert "of a type that cannot be put back" in trace.explain("a")


def test_values_along_two_axes_that_are_both_shared_stay():
    """Of rows and columns, what one is where the other is dead is not known."""

    def apply(p, x):
        h = (p["u"] @ p["v"]) - (p["u"] @ p["v"]).mean(1, keepdims=True)
        h = h - h.mean(0, keepdims=True) + p["v"].mean()
        return jnp.square(h).sum() * (x @ p["a"]).sum(1)

    trace = assert_exact(apply, draw({"u": (6, 3), "v": (3, 8), "a": (3, 5)}), X)
    assert "a" in members_of(trace)


def test_a_constant_that_rounding_decides_is_not_counted():
    """The sign of a rounding error is another one in another program."""

    def apply(p, x):
        h = x @ p["a"] + 0.1
        return jnp.sign(h * h - np.float32(0.1) * np.float32(0.1)).sum(1)

    trace = trace_channels(apply, draw({"a": (3, 8)}), X)
    assert not trace.groups
    assert "may have different values" in trace.explain("a")


def test_what_nothing_reads_is_not_computed():
    def apply(p, x):
        h = jax.nn.sigmoid(x @ p["a"])
        return (h - h.max(0, keepdims=True)) * p["scale"][None] @ p["b"]

    params = draw(SHAPES)
    trace = trace_channels(apply, params, X)
    cut = make_cut(trace, {"a": np.arange(8) < 4}, params)
    small = jax.make_jaxpr(cut.function(apply))(cut.take(params), X)
    full = jax.make_jaxpr(apply)(params, X)
    assert len(small.eqns) <= len(full.eqns)
