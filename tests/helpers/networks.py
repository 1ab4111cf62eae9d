"""Parts of vision and language networks, with the groups to be found in them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.channel_checks import draw

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]
ROWS = draw({"x": (2, 5, 3)}, seed=3)["x"]
IDS = jnp.array([[0, 4, 2, 2, 1], [3, 3, 0, 1, 4]])

# name -> (function, shapes of parameters, groups to be found, inputs).
CASES = {}


def case(shapes, groups, *inputs):
    """`groups`: name -> (size, members as (path, axis, positions per channel))."""

    def register(apply):
        CASES[apply.__name__] = (apply, shapes, groups, inputs or (X,))
        return apply

    return register


def conv(x, kernel, groups=1, stride=1, **dilation):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        **dilation,
    )


# Convolutions.


@case(
    {"a": (3, 3, 3, 8), "b": (2, 2, 8, 6), "c": (6, 2)},
    {
        "a": (8, [("a", 3, 1), ("b", 2, 1)]),
        "b": (6, [("b", 3, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def dilated_and_transposed(p, x):
    x = jax.nn.relu(conv(x, p["a"], rhs_dilation=(2, 2)))
    layout = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_transpose(x, p["b"], (2, 2), "SAME", dimension_numbers=layout)
    return jnp.tanh(x).mean((1, 2)) @ p["c"]


@case(
    {"a": (8, 3, 3, 3), "b": (6, 8, 3, 3), "c": (6, 2)},
    {
        "a": (8, [("a", 0, 1), ("b", 1, 1)]),
        "b": (6, [("b", 0, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def channels_first(p, x):
    x = x.transpose(0, 3, 1, 2)
    for name in "ab":
        x = jax.nn.relu(lax.conv(x, p[name], (1, 1), "SAME"))
    return x.mean((2, 3)) @ p["c"]


@case(
    {"a": (3, 3, 8), "b": (8, 1, 3), "c": (8, 2)},
    {"a": (8, [("a", 2, 1), ("b", 0, 1), ("c", 0, 1)])},
    ROWS,
)
def causal_and_depthwise_along_a_sequence(p, x):
    x = lax.conv_general_dilated(
        x, p["a"], (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
    )
    x = lax.conv_general_dilated(
        x.transpose(0, 2, 1), p["b"], (1,), [(2, 0)], feature_group_count=8
    )
    return x.mean(2) @ p["c"]


@case(
    {"a": (3, 3, 3, 8), "one": (3, 3, 1, 8), "two": (3, 3, 1, 16), "c": (1, 1, 16, 2)},
    {"a": (8, [("a", 3, 1), ("one", 3, 1), ("two", 3, 2), ("c", 2, 2)])},
    IMAGES,
)
def depthwise_with_and_without_multiplier(p, x):
    x = jax.nn.relu6(conv(x, p["a"]))
    x = jax.nn.hard_swish(conv(x, p["one"], 8))
    x = conv(x, p["two"], 8, stride=2)
    return conv(x, p["c"]).mean((1, 2))


# Four groups and then two, so that two groups would go together: what is in them goes.
@case(
    {"a": (3, 3, 3, 8), "g": (3, 3, 2, 12), "h": (3, 3, 6, 20), "c": (20, 2)},
    {
        "a": (2, [("a", 3, 4), ("g", 2, 1)]),
        "g": (3, [("g", 3, 4), ("h", 2, 2)]),
        "h": (10, [("h", 3, 2), ("c", 0, 2)]),
    },
    IMAGES,
)
def convolutions_in_groups(p, x):
    x = jax.nn.relu(conv(x, p["a"]))
    x = jax.nn.relu(conv(x, p["g"], 4))
    return conv(x, p["h"], 2).mean((1, 2)) @ p["c"]


@case(
    {"g": (3, 3, 1, 12), "c": (12, 2)},
    {"g": (4, [("g", 3, 3), ("c", 0, 3)])},
    IMAGES,
)
def images_convolved_in_groups(p, x):
    return jax.nn.relu(conv(x, p["g"], 3)).mean((1, 2)) @ p["c"]


@case(
    {"a": (3, 3, 3, 6), "b": (6, 2)},
    {},
    IMAGES,
)
def kernels_convolved_in_batches(p, x):
    layout = ("NHWC", "HWIO", "NHWC")
    x = jnp.concatenate([x, x, x])
    x = lax.conv_general_dilated(
        x, p["a"], (1, 1), "SAME", dimension_numbers=layout, batch_group_count=6
    )
    return x.mean((1, 2)) @ p["b"]


@case(
    {"a": (3, 3, 3, 8), "scale": (8,), "c": (8, 2)},
    {"a": (4, [("a", 3, 2), ("scale", 0, 2), ("c", 0, 2)])},
    IMAGES,
)
def group_norm(p, x):
    x = conv(x, p["a"])
    groups = x.reshape(*x.shape[:3], 4, 2)
    mean = groups.mean((1, 2, 4), keepdims=True)
    var = groups.var((1, 2, 4), keepdims=True)
    x = ((groups - mean) * lax.rsqrt(var + 1e-3)).reshape(x.shape)
    return jax.nn.relu(x * p["scale"][None, None, None]).mean((1, 2)) @ p["c"]


@case(
    {"a": (3, 3, 3, 8), "d": (3, 3, 1, 8), "c": (8, 2)},
    {"a": (8, [("a", 3, 1), ("d", 3, 1), ("c", 0, 1)])},
    IMAGES,
)
def channel_shuffle(p, x):
    x = conv(x, p["a"])
    x = x.reshape(*x.shape[:3], 2, 4).swapaxes(3, 4).reshape(x.shape)
    return conv(x, p["d"], 8).mean((1, 2)) @ p["c"]


@case(
    {"a": (3, 3, 3, 12), "b": (3, 3, 3, 5), "c": (5, 2)},
    {
        "a": (3, [("a", 3, 4), ("b", 2, 1)]),
        "b": (5, [("b", 3, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def pixel_shuffle(p, x):
    x = conv(x, p["a"])
    n, h, w, _ = x.shape
    x = x.reshape(n, h, w, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5)
    return (
        jax.nn.relu(conv(x.reshape(n, 2 * h, 2 * w, 3), p["b"])).mean((1, 2)) @ p["c"]
    )


@case(
    {"a": (3, 3, 3, 4), "b": (16, 5), "c": (5, 2)},
    {
        "a": (4, [("a", 3, 1), ("b", 0, 4)]),
        "b": (5, [("b", 1, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def space_to_depth(p, x):
    x = conv(x, p["a"])
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return (
        jax.nn.relu(x.reshape(n, h // 2, w // 2, 4 * c) @ p["b"]).mean((1, 2)) @ p["c"]
    )


# Attention.


def rms(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotate(x, where):
    half = x.shape[-1] // 2
    angles = where[:, None, None] / 100 ** (jnp.arange(half) / half)[None, None]
    cos, sin = jnp.cos(angles)[None], jnp.sin(angles)[None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    count = scores.shape[-1]
    allowed = jnp.tril(jnp.ones((count, count), bool))[None, None]
    scores = jnp.where(allowed, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


GPT = {
    "embed": (5, 12),
    "norm": (12,),
    "q": (12, 32),
    "k": (12, 16),
    "v": (12, 16),
    "o": (32, 12),
    "w1": (12, 10),
    "w3": (12, 10),
    "w2": (10, 12),
}


# Four heads, of which two share keys and values. A rotation ties the halves of the
# features of q and k; those of v are on their own.
@case(
    GPT,
    {
        "embed": (
            12,
            [
                ("embed", 1, 1),
                ("norm", 0, 1),
                ("q", 0, 1),
                ("k", 0, 1),
                ("v", 0, 1),
                ("o", 1, 1),
                ("w1", 0, 1),
                ("w3", 0, 1),
                ("w2", 1, 1),
            ],
        ),
        "q": (4, [("q", 1, 8), ("k", 1, 4)]),
        "v": (8, [("v", 1, 2), ("o", 0, 4)]),
        "w1": (10, [("w1", 1, 1), ("w3", 1, 1), ("w2", 0, 1)]),
    },
    IDS,
)
def grouped_query_attention(p, ids):
    b, s = ids.shape
    x = p["embed"][ids]
    h = rms(x) * p["norm"][None, None]
    where = jnp.arange(s)
    q = rotate((h @ p["q"]).reshape(b, s, 4, 8), where)
    k = rotate((h @ p["k"]).reshape(b, s, 2, 8), where)
    v = (h @ p["v"]).reshape(b, s, 2, 8)
    k, v = (jnp.repeat(each, 2, axis=2) for each in (k, v))
    x = x + attend(q, k, v).reshape(b, s, 32) @ p["o"]
    x = x + (jax.nn.silu(x @ p["w1"]) * (x @ p["w3"])) @ p["w2"]
    return rms(x) @ p["embed"].T


# Where one axis is taken apart into three, only one of them can be cut: features.
@case(
    {"qkv": (3, 24), "o": (8, 2)},
    {"qkv": (4, [("qkv", 1, 6), ("o", 0, 2)])},
    ROWS,
)
def fused_heads(p, x):
    b, s, _ = x.shape
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(b, s, 3, 2, 4), 2, 0)
    return attend(q, k, v).reshape(b, s, 8) @ p["o"]


@case(
    {"q": (3, 8), "k": (3, 4), "v": (3, 4), "o": (8, 2)},
    {
        "q": (4, [("q", 1, 2), ("k", 1, 1)]),
        "v": (4, [("v", 1, 1), ("o", 0, 2)]),
    },
    ROWS,
)
def multi_query_attention(p, x):
    b, s, _ = x.shape
    q = (x @ p["q"]).reshape(b, s, 2, 4)
    k, v = (jnp.broadcast_to((x @ p[n])[:, :, None], q.shape) for n in "kv")
    return attend(q, k, v).reshape(b, s, 8) @ p["o"]


@case(
    {"w": (4, 3, 6), "o": (4, 6, 2)},
    {
        "w": (4, [("w", 0, 1), ("o", 0, 1)]),
        "w#2": (6, [("w", 2, 1), ("o", 1, 1)]),
    },
)
def experts_by_vmap(p, x):
    expert = lambda w, o: jax.nn.gelu(x @ w) @ o  # noqa: E731
    return jax.vmap(expert)(p["w"], p["o"]).mean(0)


@case(
    {"a": (3, 4), "b": (3, 5), "c": (20, 2)},
    {"b": (5, [("b", 1, 1), ("c", 0, 4)])},
)
def outer_product(p, x):
    outer = jnp.einsum("nh,nk->nhk", jnp.sin(x @ p["a"]), x @ p["b"])
    return outer.reshape(x.shape[0], -1) @ p["c"]


@case(
    {"embed": (5, 8), "where": (5, 8), "a": (8, 2)},
    {"embed": (8, [("embed", 1, 1), ("where", 1, 1), ("a", 0, 1)])},
    IDS,
)
def embeddings(p, ids):
    h = jnp.take(p["embed"], ids, axis=0) + p["where"][None, : ids.shape[1]]
    return jnp.tanh(h) @ p["a"]


@case(
    {"table": (7, 7, 4), "qk": (3, 8), "v": (3, 8), "o": (8, 2)},
    {
        "table": (4, [("table", 2, 1), ("qk", 1, 2), ("v", 1, 2), ("o", 0, 2)]),
    },
    ROWS[:, :4],
)
def relative_positions(p, x):
    b, s, _ = x.shape
    i = np.arange(s)
    far = i[:, None] - i[None] + 3
    bias = p["table"][far, far.T].transpose(2, 0, 1)
    qk, v = ((x @ p[n]).reshape(b, s, 4, 2) for n in ("qk", "v"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", qk, qk) + bias[None]
    scores = jax.nn.softmax(scores)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, s, 8) @ p["o"]


# Recurrence and stacked layers.


@case(
    {"in": (3, 24), "rec": (6, 24), "bias": (24,), "out": (6, 2)},
    {
        "bias": (
            6,
            [("bias", 0, 4), ("in", 1, 4), ("rec", 0, 1), ("rec", 1, 4), ("out", 0, 1)],
        )
    },
    ROWS,
)
def lstm(p, x):
    def step(carry, row):
        h, c = carry
        i, f, g, o = jnp.split(row @ p["in"] + h @ p["rec"] + p["bias"][None], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], 6))
    (h, _), rows = lax.scan(step, (zeros, zeros), x.transpose(1, 0, 2), reverse=True)
    return h @ p["out"] + rows.sum(0) @ p["out"]


LAYERS = {"norm": (4, 8), "up": (4, 8, 12), "down": (4, 12, 8)}


@case(
    {"in": (3, 8), "layers": LAYERS, "out": (8, 2)},
    {
        "in": (
            8,
            [
                ("in", 1, 1),
                ("layers/down", 2, 1),
                ("layers/norm", 1, 1),
                ("layers/up", 1, 1),
                ("out", 0, 1),
            ],
        ),
        "layers/down": (12, [("layers/down", 1, 1), ("layers/up", 2, 1)]),
    },
)
def stacked_layers(p, x):
    @jax.checkpoint
    def block(x, layer):
        h = rms(x) * layer["norm"][None]
        return x + jax.nn.silu(h @ layer["up"]) @ layer["down"], None

    x, _ = lax.scan(block, x @ p["in"], p["layers"])
    return x @ p["out"]
