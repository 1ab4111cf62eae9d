"""Functions that work for any width, with the groups to be found in them."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.helpers.channel_checks import draw

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]


def conv(x, kernel, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=layout
    )


def per_channel(v, x):
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def norm(p, s, x):
    scale = p["scale"] * lax.rsqrt(s["var"] + 1e-5)
    shift = p["bias"] - s["mean"] * scale
    return x * per_channel(scale, x) + per_channel(shift, x)


# name -> (function, shapes of parameters, groups to be found, inputs).
CASES = {}


def case(shapes, groups, x=X):
    """`groups`: name -> (size, members as (path, axis, positions per channel))."""

    def register(apply):
        CASES[apply.__name__] = (apply, shapes, groups, (x,))
        return apply

    return register


@case(
    {"a": (3, 8), "bias": (8,), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("bias", 0, 1), ("b", 0, 1)])},
)
def dense(p, x):
    return jax.nn.sigmoid(x @ p["a"] + per_channel(p["bias"], x)) @ p["b"]


@case(
    {"a": (3, 3, 3, 8), "b": (3, 3, 8, 5), "c": (3, 3, 5, 8), "d": (8, 2)},
    {
        "a": (8, [("a", 3, 1), ("b", 2, 1), ("c", 3, 1), ("d", 0, 1)]),
        "b": (5, [("b", 3, 1), ("c", 2, 1)]),
    },
    IMAGES,
)
def shortcut(p, x):
    x = jax.nn.relu(conv(x, p["a"]))
    x = x + conv(jax.nn.elu(conv(x, p["b"])), p["c"])
    return x.mean((1, 2)) @ p["d"]


@case(
    {"a": (3, 3, 3, 8), "b": (1, 1, 3, 4), "c": (12, 2)},
    {
        "a": (8, [("a", 3, 1), ("c", 0, 1)]),
        "b": (4, [("b", 3, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def concatenation(p, x):
    both = jnp.concatenate([conv(x, p["a"]), jnp.exp(conv(x, p["b"]))], axis=-1)
    return both.max((1, 2)) @ p["c"]


@case(
    {"a": (3, 3, 3, 6), "b": (54, 2)},
    {"a": (6, [("a", 3, 1), ("b", 0, 9)])},
    IMAGES,
)
def flatten(p, x):
    return jnp.cos(conv(x, p["a"], 2)).reshape(x.shape[0], -1) @ p["b"]


@case({"a": (3, 12), "b": (6, 2)}, {"a": (6, [("a", 1, 2), ("b", 0, 1)])})
def gated_halves(p, x):
    left, right = jnp.split(x @ p["a"], 2, axis=1)
    return (left * jax.nn.sigmoid(right)) @ p["b"]


@case(
    {"a": (3, 4), "b": (3, 6), "c": (4, 2), "d": (6, 2)},
    {
        "a": (4, [("a", 1, 1), ("c", 0, 1)]),
        "b": (6, [("b", 1, 1), ("d", 0, 1)]),
    },
)
def slices(p, x):
    both = jnp.concatenate([x @ p["a"], x @ p["b"]], axis=1)
    cut = p["a"].shape[1]
    return jnp.cos(both[:, :cut]) @ p["c"] + jnp.tanh(both[:, cut:]) @ p["d"]


@case({"a": (3, 3, 3, 8), "b": (8, 2)}, {"a": (8, [("a", 3, 1), ("b", 0, 1)])}, IMAGES)
def transposes(p, x):
    kernel = p["a"].transpose(3, 2, 0, 1)
    x = lax.conv(x.transpose(0, 3, 1, 2), kernel, (1, 1), "SAME")
    return jnp.einsum("nchw,ck->nk", jnp.cosh(x), p["b"])


# Channels that the padded shortcut does not reach form a group of their own.
@case(
    {"a": (3, 5), "b": (5, 9), "c": (9, 2)},
    {
        "a": (5, [("a", 1, 1), ("b", 0, 1), ("b", 1, 1), ("c", 0, 1)]),
        "b": (4, [("b", 1, 1), ("c", 0, 1)]),
    },
)
def padded_shortcut(p, x):
    x = x @ p["a"]
    y = x @ p["b"]
    return (y + jnp.pad(x, ((0, 0), (0, y.shape[1] - x.shape[1])))) @ p["c"]


# Sums of squares skip zeros, and the divisor is a number of the program.
@case(
    {"a": (3, 8), "scale": (8,), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("scale", 0, 1), ("b", 0, 1)])},
)
def rms_norm(p, x):
    x = x @ p["a"]
    size = jnp.sum(x * x, axis=1, keepdims=True) / 8
    return x * lax.rsqrt(size + 1e-3) * per_channel(p["scale"], x) @ p["b"]


@case({"a": (3, 8)}, {"a": (8, [("a", 1, 1)])})
def tied_autoencoder(p, x):
    return jnp.cos(x @ p["a"]) @ p["a"].T


@case(
    {"a": (3, 6), "w": (6, 6), "b": (6, 2)},
    {"a": (6, [("a", 1, 1), ("w", 0, 1), ("w", 1, 1), ("b", 0, 1)])},
)
def recurrence(p, x):
    h = x @ p["a"]
    for _ in range(3):
        h = jnp.tanh(h @ p["w"] + x @ p["a"])
    return h @ p["b"]


@case(
    {"a": (3, 7), "b": (7, 2)},
    {
        "a": (3, [("a", 1, 2), ("b", 0, 2)]),  # the one in the middle stays
    },
)
def mirrored(p, x):
    h = x @ p["a"]
    return (h + h[:, ::-1]) @ p["b"]


@case(
    {"scale": (8,), "a": (3, 3, 3, 8), "bias": (8,), "b": (8, 2)},
    {"a": (8, [("a", 3, 1), ("scale", 0, 1), ("bias", 0, 1), ("b", 0, 1)])},
    IMAGES,
)
def batch_norm_in_training(p, x):
    x = conv(x, p["a"])
    mean = x.mean((0, 1, 2), keepdims=True)
    var = jnp.square(x).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
    x = (x - mean) / jnp.sqrt(var + 1e-5)
    x = x * per_channel(p["scale"], x) + per_channel(p["bias"], x)
    return jax.nn.softplus(x).mean((1, 2)) @ p["b"]


@case(
    {"a": (3, 3, 3, 8), "in": (8, 4), "out": (4, 8), "b": (8, 2)},
    {
        "a": (8, [("a", 3, 1), ("in", 0, 1), ("out", 1, 1), ("b", 0, 1)]),
        "in": (4, [("in", 1, 1), ("out", 0, 1)]),
    },
    IMAGES,
)
def squeeze_and_excite(p, x):
    x = conv(x, p["a"])
    gate = jax.nn.sigmoid(jnp.maximum(x.mean((1, 2)) @ p["in"], 0.1) @ p["out"])
    return (x * gate[:, None, None, :]).sum((1, 2)) @ p["b"]


@case(
    {"a": (3, 8), "b": (8, 5), "c": (5, 2)},
    {
        "a": (8, [("a", 1, 1), ("b", 0, 1)]),
        "b": (5, [("b", 1, 1), ("c", 0, 1)]),
    },
)
def programs_in_programs(p, x):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    block = jax.checkpoint(jax.jit(lambda p, x: jax.nn.gelu(product(x, p["a"]))))
    return jax.nn.softplus(block(p, x) @ p["b"]) @ p["c"]


@case(
    {"a": (3, 8), "b": (3, 8), "c": (8, 4, 2)},
    {"a": (8, [("a", 1, 1), ("b", 1, 1), ("c", 0, 1)])},
)
def batched_product(p, x):
    pair = jnp.einsum("nh,mh->hnm", x @ p["a"], jnp.cos(x @ p["b"]))
    return jnp.einsum("hnm,hmk->nk", pair, p["c"])


@case(
    {"a": (3, 8), "bias": (8,), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("bias", 0, 1), ("b", 0, 1)])},
)
def guarded_singularities(p, x):
    h = x @ p["a"] + per_channel(p["bias"], x)
    h = jnp.where(h > 0, jnp.log(jnp.where(h > 0, h, 1.0)), 0.0)
    return (h / (1 + jnp.abs(h)) + jnp.log(jnp.exp(h) + 1)) @ p["b"]


@case(
    {"a": (3, 8), "b": (3, 8), "c": (2, 8, 2)},
    {"a": (8, [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)])},
)
def stacked_branches(p, x):
    both = jnp.stack([x @ p["a"], x @ p["b"]], axis=1)
    return jnp.tensordot(jnp.sin(both), p["c"], 2)


@case(
    {"a": (3, 3, 3, 4), "b": (8, 5), "c": (5, 2)},
    {
        "a": (4, [("a", 3, 1), ("b", 0, 2)]),
        "b": (5, [("b", 1, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def repeats(p, x):
    h = jnp.tile(conv(x, p["a"]), (1, 1, 1, 2)).mean((1, 2))
    rows = jnp.unstack(jnp.repeat(h @ p["b"], 2, axis=0), axis=0)
    return jnp.stack(rows) @ p["c"]


@case(
    {"a": (3, 8), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("b", 0, 1)])},
)
def half_precision(p, x):
    h = jax.nn.relu((x @ p["a"]).astype(jnp.bfloat16)).astype(jnp.float32)
    return h @ p["b"] + h.sum(1, keepdims=True)
