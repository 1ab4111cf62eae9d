"""Attacks by positions that are padded, looked up, written or shared, and odd trees."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.attacks import SEQUENCES, TOKENS, X, attack
from tests.helpers.channel_checks import draw


@attack({"a": (3, 6), "w": (4, 5), "c": (10, 2)})
def padded_split(p, x):
    h = jnp.pad(x @ p["a"], ((0, 0), (0, 2))).reshape(4, 4, 2)
    return jnp.einsum("bij,ik->bjk", h, p["w"]).reshape(4, 10) @ p["c"]


@attack({"a": (3, 6), "w": (2, 5), "c": (20, 2)})
def padded_split2(p, x):
    h = jnp.pad(x @ p["a"], ((0, 0), (0, 2))).reshape(4, 4, 2)
    return jnp.einsum("bij,jk->bik", h, p["w"]).reshape(4, 20) @ p["c"]


@attack({"a": (3, 4), "b": (3, 5), "w": (30, 2)})
def padded_outer(p, x):
    a = jnp.pad(x @ p["a"], ((0, 0), (1, 1)))
    b = x @ p["b"]
    return (a[:, :, None] * b[:, None, :]).reshape(4, 30) @ p["w"]


@attack({"a": (3, 4), "b": (3, 5), "w": (36, 2)})
def padded_outer2(p, x):
    a = jnp.pad(x @ p["a"], ((0, 0), (1, 1)), constant_values=1.0)
    b = jnp.concatenate([x @ p["b"], jnp.ones((4, 1))], -1)
    return (a[:, :, None] * b[:, None, :]).reshape(4, 36) @ p["w"]


@attack({"e": (7, 6), "w": (6, 2)}, jnp.array([[1, 2, 30], [3, 99, 4]]), frozen=True)
def gather_fill(p, ids):
    h = p["e"].at[ids].get(mode="fill", fill_value=1.0)
    return h.sum(-1)[..., None] + h @ p["w"]


@attack({"e": (7, 6), "w": (6, 2)}, jnp.array([[1, 2, 30], [3, 99, 4]]))
def gather_fill_zero(p, ids):
    h = p["e"].at[ids].get(mode="fill", fill_value=0.0)
    return h.sum(-1)[..., None] + h @ p["w"]


@attack({"a": (3, 6), "t": (2, 5), "w": (6, 5, 2)})
def codebook_per_channel(p, x):
    h = x @ p["a"]
    q = p["t"][(h > 0).astype(jnp.int32)]
    return jnp.einsum("bcd,cdo->bo", q, p["w"])


@attack({"a": (3, 6), "t": (9,), "w": (6, 2)}, frozen=True)
def interp_lut(p, x):
    return jnp.interp(x @ p["a"], jnp.linspace(-2, 2, 9), p["t"]) @ p["w"]


@attack({"a": (3, 6), "w": (2, 2), "v": (6, 2)}, frozen=True)
def histogram(p, x):
    h = x @ p["a"]
    idx = (h[0] > 0).astype(jnp.int32)
    return jnp.zeros(2).at[idx].add(1.0) @ p["w"] + h @ p["v"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES)
def cumlogsumexp_time(p, x):
    h = lax.cumlogsumexp(x @ p["a"], axis=1)
    return h.sum(-1, keepdims=True) + h @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES, frozen=True)
def topk_time_indices(p, x):
    v, i = lax.top_k((x @ p["a"]).swapaxes(1, 2), 3)
    return v.swapaxes(1, 2) @ p["w"] + i.astype(jnp.float32).sum(1)[..., None]


@attack({"a": (3, 6), "w": (6, 2)}, SEQUENCES, frozen=True)
def argsort_time(p, x):
    i = jnp.argsort(x @ p["a"], axis=1).astype(jnp.float32)
    return i.sum(-1, keepdims=True) + i @ p["w"] + x @ p["a"] @ p["w"]


@attack({"a": (3, 8), "w": (8, 2)})
def halves_normed(p, x):
    h = x @ p["a"]

    def n(v):
        return v / jnp.sqrt((v * v).sum(-1, keepdims=True) + 1e-6)

    a, b = (h[:, :4], h[:, 4:])
    w = p["w"]
    return n(a) @ w[:4] + n(b) @ w[4:]


@attack({"e": (8, 12), "o": (12, 3)}, TOKENS, frozen=True)
def rolled(p, x):
    h = x @ p["e"]
    return (h + jnp.roll(h, 1, -1)) @ p["o"]


@attack({"e": (8, 12), "o": (12, 3)}, TOKENS)
def rolled_half(p, x):
    h = x @ p["e"]
    return (h + jnp.roll(h, 6, -1)) @ p["o"]


@attack({"e": (8, 12), "o": (12, 3)}, TOKENS)
def rolled_only(p, x):
    return jnp.roll(x @ p["e"], 5, -1)[..., ::-1] @ p["o"]


relu = jax.nn.relu


@attack({"a": (3, 6), "w": (6, 2), "s": jnp.float32(0.5)})
def scalar_param(p, x):
    return relu(x @ p["a"] * p["s"]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "none": jnp.zeros(0), "rows": jnp.zeros((0, 6))})
def empty_param(p, x):
    return jnp.concatenate([x @ p["a"], p["rows"]]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "b": (1, 6), "c": (1,), "d": (6, 1)})
def length_one(p, x):
    return ((x @ p["a"] + p["b"]) * p["c"] + p["d"][:, 0]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "d": (6, 1)})
def length_one_t(p, x):
    return ((x @ p["a"]).T * p["d"]).T @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "perm": jnp.array([2, 0, 1, 5, 4, 3])})
def int_perm_param(p, x):
    return (x @ p["a"])[:, p["perm"]] @ p["w"]


@attack(
    {"a": (3, 6), "w": (6, 2), "m": jnp.array([True, False, True, True, False, True])}
)
def bool_mask_param(p, x):
    return jnp.where(p["m"], x @ p["a"], 0) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "idx": jnp.array([2, 0, 1, 2, 1, 0])})
def int_gather_input(p, x):
    return x[:, p["idx"]] * (x @ p["a"]) @ p["w"]


@attack(
    {
        "q": jnp.array(np.random.default_rng(0).integers(-9, 9, (3, 6)), jnp.int8),
        "z": jnp.array([1, 2, 3, 0, 1, 2], jnp.int8),
        "sc": (6,),
        "w": (6, 2),
    }
)
def int8_zeropoint(p, x):
    return (
        x
        @ (
            (p["q"].astype(jnp.int32) - p["z"].astype(jnp.int32)).astype(jnp.float32)
            * p["sc"]
        )
        @ p["w"]
    )


@attack(
    {
        "q": jnp.array(np.random.default_rng(0).integers(-9, 9, (3, 6)), jnp.int8),
        "d": (6,),
        "w": (6, 2),
    },
    frozen=True,
)
def int_divisor(p, x):
    return x @ p["q"].astype(jnp.float32) / jnp.abs(p["d"]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2), "n": jnp.array([1, 2, 3, 4, 5, 6])})
def int_param_mod(p, x):
    return x @ p["a"] * (7 % p["n"]) @ p["w"]


@attack(
    {
        "q": jnp.array(np.random.default_rng(0).integers(0, 255, (3, 3)), jnp.uint8),
        "a": (3, 6),
        "w": (6, 2),
    }
)
def packed_int4(p, x):
    lo = (p["q"] & 15).astype(jnp.float32) - 8
    hi = (p["q"] >> 4).astype(jnp.float32) - 8
    k = jnp.stack([lo, hi], -1).reshape(3, 6)
    return (x @ k * 0.1 + x @ p["a"]) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def returns_params(p, x):
    return (x @ p["a"] @ p["w"], p["w"])


@attack({"a": (3, 6), "b": (3, 5), "w": (6, 2), "v": (5, 2)})
def returns_one_param(p, x):
    return (x @ p["a"] @ p["w"] + x @ p["b"] @ p["v"], p["b"] * 2)


@attack({"a": (3, 6), "w": (6, 2)})
def returns_input_const(p, x):
    return (x, x @ p["a"] @ p["w"], jnp.ones(3), 2.0, {"k": np.arange(3)})


@attack({"a": (3, 6), "w": (6, 2)})
def l2_penalty(p, x):
    return (
        x @ p["a"] @ p["w"],
        sum((v**2).sum() for v in p.values()),
        sum(jnp.abs(v).sum() for v in p.values()),
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def orth_penalty(p, x):
    return (x @ p["a"] @ p["w"], ((p["a"].T @ p["a"] - jnp.eye(6)) ** 2).sum())


@attack({"a": (4, 8), "b": (8, 2)}, draw({"x": (3, 4)})["x"])
def reused_reshaped(p, x):
    h = relu(x @ p["a"])
    return (h.reshape(3, 2, 4) @ p["a"]).sum(1) @ p["b"]


@attack({"a": (4, 8), "b": (4, 2)}, draw({"x": (3, 4)})["x"])
def reused_transposed(p, x):
    return relu(relu(x @ p["a"]) @ p["a"].T) @ p["b"]


@attack({"a": (4, 8), "b": (4, 2)}, draw({"x": (3, 4)})["x"], frozen=True)
def reused_view(p, x):
    return x @ p["a"].reshape(8, 4)[:4] @ p["b"] + x @ p["a"].reshape(8, 4)[4:] @ p["b"]


@attack({"flat": (3 * 6 + 6 + 6 * 2,)})
def flat_params(p, x):
    f = p["flat"]
    return relu(x @ f[:18].reshape(3, 6) + f[18:24]) @ f[24:].reshape(6, 2)


@attack({"a": (2, 3, 6), "w": (2, 6, 2)})
def ensemble_max(p, x):
    return jax.vmap(lambda a, w: relu(x @ a) @ w)(p["a"], p["w"]).max(0)


@attack({"a": (3, 6), "b": (6, 6), "w": (6, 2)})
def unused(p, x):
    return x @ p["a"] @ p["w"]


def bn_f(p, s, x, eps=1e-05):
    h = x @ p["a"]
    m, v = (h.mean(0), h.var(0))
    y = relu((h - m) * lax.rsqrt(v + eps) * p["s"] + p["b"])
    return (
        y @ p["w"],
        {"mean": 0.9 * s["mean"] + 0.1 * m, "var": 0.9 * s["var"] + 0.1 * v},
    )


@attack(
    {"a": (3, 6), "s": (6,), "b": (6,), "w": (6, 2)},
    statistics={"mean": (6,), "var": (6,)},
    returns_statistics=True,
)
def bn_train(p, s, x):
    return bn_f(p, s, x)


@attack(
    {"a": (3, 6), "s": (6,), "b": (6,), "w": (6, 2)},
    statistics={"mean": (6,), "var": (6,)},
    returns_statistics=True,
    frozen=True,
)
def bn_train_eps0(p, s, x):
    return bn_f(p, s, x, 0.0)


@attack({"a": (3, 6), "w": (6, 2)}, statistics={"mean": (6,), "var": (6,)}, frozen=True)
def bn_noaffine_sum(p, s, x):
    return (
        relu((x @ p["a"] - s["mean"]) * lax.rsqrt(s["var"] + 1e-05)).sum(
            -1, keepdims=True
        )
        @ p["w"][:1]
    )


@attack({"a": (3, 6), "w": (6, 2)}, statistics={"ema": (3, 6)}, returns_statistics=True)
def ema_update(p, s, x):
    return (x @ p["a"] @ p["w"], {"ema": 0.9 * s["ema"] + 0.1 * p["a"]})


@attack(
    {"a": (3, 6), "w": (6, 2)},
    statistics={"count": (6,)},
    returns_statistics=True,
    frozen=True,
)
def stat_eq(p, s, x):
    h = x @ p["a"]
    return (
        jnp.where(s["count"] == x[:, :1], h, h * 2) @ p["w"],
        {"count": s["count"] + 1},
    )


@attack(
    {"a": (3, 6), "w": (6, 2)},
    statistics={"cen": (5, 6)},
    returns_statistics=True,
    frozen=True,
)
def vq_ema(p, s, x):
    h = x @ p["a"]
    i = jnp.argmin(((h[:, None] - s["cen"]) ** 2).sum(-1), -1)
    oh = jax.nn.one_hot(i, 5)
    return (
        (h + lax.stop_gradient(s["cen"][i] - h)) @ p["w"],
        {"cen": 0.9 * s["cen"] + 0.1 * oh.T @ h},
    )


@attack({"a": (3, 6), "w": (6, 2)}, statistics={"u": (6,)}, returns_statistics=True)
def sn_state(p, s, x):
    v = p["a"] @ s["u"]
    v = v / (jnp.linalg.norm(v) + 1e-06)
    u = p["a"].T @ v
    sig = jnp.linalg.norm(u)
    return (x @ p["a"] / sig @ p["w"], {"u": lax.stop_gradient(u / sig)})


@attack({"a": (3, 6), "w": (6, 2)})
def bf16_net(p, x):
    return (
        relu(x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16))
        @ p["w"].astype(jnp.bfloat16)
    ).astype(jnp.float32)


@attack({"a": (3, 6), "w": (6, 2)})
def opt_barrier(p, x):
    return lax.optimization_barrier((x @ p["a"], x))[0] @ p["w"]


@attack(
    {
        "a": jnp.asarray(
            np.random.default_rng(0).normal(size=(3, 6))
            + 1j * np.random.default_rng(1).normal(size=(3, 6)),
            jnp.complex64,
        ),
        "w": jnp.asarray(
            np.random.default_rng(2).normal(size=(6, 2)) + 0j, jnp.complex64
        ),
    }
)
def complex_params(p, x):
    h = x.astype(jnp.complex64) @ p["a"]
    return jnp.abs(h * jnp.exp(1j * h.real) @ p["w"] + 1)


@attack(
    {
        "a": jnp.asarray(
            np.random.default_rng(0).normal(size=(3, 6))
            + 1j * np.random.default_rng(1).normal(size=(3, 6)),
            jnp.complex64,
        ),
        "w": jnp.asarray(np.random.default_rng(2).normal(size=(6, 2)), jnp.float32),
    },
    frozen=True,
)
def complex_angle(p, x):
    h = x.astype(jnp.complex64) @ p["a"]
    return jnp.angle(h) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, X, 3, True)
def python_inputs(p, x, n, t):
    return jnp.where(t, x @ p["a"], 0) @ p["w"] * n


@attack(
    {"a": (3, 6), "b": (6, 6), "w": (6, 2)}, trace={"merge": [[("b", 0), ("b", 1)]]}
)
def merged_axes(p, x):
    return jnp.tanh(x @ p["a"] @ p["b"]) @ p["w"]


@attack({"a": (3, 6), "b": (6, 6), "w": (6, 2)}, trace={"freeze": ["b"]}, frozen=True)
def frozen_wish(p, x):
    return jnp.tanh(x @ p["a"] @ p["b"]) @ p["w"]


@attack(
    {"a": (3, 6), "b": (3, 6), "w": (6, 2), "v": (6, 2)},
    trace={"merge": [[("a", 1), ("b", 1)]]},
)
def merged_branches(p, x):
    return x @ p["a"] @ p["w"] + jnp.cos(x @ p["b"]) @ p["v"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def gather_partial_window(p, x):
    h = x @ p["a"]
    g = lax.gather(
        h,
        jnp.array([[0], [2]]),
        lax.GatherDimensionNumbers(
            offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
        ),
        (1, 4),
    )
    return g @ p["w"][:4]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def gather_clip_const(p, x):
    return (
        jnp.take(x @ p["a"], jnp.array([0, 9, 2, -1]), axis=1, mode="clip") @ p["w"][:4]
    )


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def gather_fill_const(p, x):
    return (
        jnp.take(
            x @ p["a"], jnp.array([0, 9, 2, 1]), axis=1, mode="fill", fill_value=2.0
        )
        @ p["w"][:4]
    )


@attack({"a": (3, 6), "w": (6, 2)})
def scatter_perm(p, x):
    return (
        jnp.zeros((4, 6)).at[:, jnp.array([3, 1, 0, 2, 5, 4])].set(x @ p["a"]) @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)})
def scatter_drop(p, x):
    return (
        jnp.zeros((4, 6)).at[jnp.array([0, 1, 9, 3])].set(x @ p["a"], mode="drop")
        @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)})
def scatter_add_ones(p, x):
    h = x @ p["a"]
    return (jnp.ones((4, 6)).at[jnp.array([0, 0, 1, 2])].add(h) - 1).sum(
        -1, keepdims=True
    ) + h @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def scatter_add_cos(p, x):
    h = x @ p["a"]
    return (
        jnp.zeros((4, 6))
        .at[jnp.array([0, 0, 1, 2])]
        .add(jnp.cos(h))
        .sum(-1, keepdims=True)
        + h @ p["w"]
    )


@attack({"a": (3, 6), "w": (6, 2)})
def segment_max_empty(p, x):
    h = x @ p["a"]
    m = jax.ops.segment_max(h, jnp.array([0, 0, 2, 2]), 3)
    return jnp.where(jnp.isfinite(m), m, 0.0) @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)}, frozen=True)
def segment_max_empty_elsewhere(p, x):
    """What is chosen is not what is said to be finite."""
    h = x @ p["a"]
    m = jax.ops.segment_max(h, jnp.array([0, 0, 2, 2]), 3)
    n = jax.ops.segment_max(h, jnp.array([0, 0, 1, 1]), 3)
    return jnp.where(jnp.isfinite(n), m, 0.0) @ p["w"]


@attack({"a": (3, 6), "c": (6, 5, 4), "w": (4, 2)})
def kan_full(p, x):
    h = x @ p["a"]
    b = jnp.stack([jax.nn.relu(h), h, h**2, jnp.cos(h), jnp.sin(h)], -1)
    return jnp.einsum("bck,cko->bo", b, p["c"]) @ p["w"]


@attack({"a": (3, 6), "c": (6,), "w": (6, 2)}, frozen=True)
def circulant(p, x):
    return x @ p["a"] @ p["c"][(np.arange(6)[:, None] - np.arange(6)) % 6] @ p["w"]


@attack({"a": (3, 6), "w": (6, 2)})
def permuted_gather_2d(p, x):
    return (x @ p["a"])[:, np.array([[0, 3], [1, 4], [2, 5]])].sum(-1) @ p["w"][:3]


@attack({"a": (3, 6), "v": (15,), "w": (6, 2)}, frozen=True)
def symmetric_from_tri(p, x):
    W = jnp.zeros((6, 6)).at[np.triu_indices(6, 1)].set(p["v"])
    return jnp.tanh(x @ p["a"] @ (W + W.T)) @ p["w"]


# An axis that is repeated from one position is whatever that position is.


@attack({"s": (1,), "a": (3, 8)}, frozen=None)
def tile_single(p, x):
    return (jnp.tile(p["s"], 8) + x @ p["a"]).sum(-1)


@attack({"s": (3, 1), "a": (3, 8)}, frozen=True)
def tile_product_of_one(p, x):
    return jnp.cos(jnp.tile(x @ p["s"], (1, 8)) + x @ p["a"]).sum(-1) - 8


@attack({"s": (3, 4), "a": (3, 8)}, frozen=None, kept=(("a", 1),))
def tile_slice_of_one(p, x):
    one = jnp.tile((x @ p["s"])[:, :1], (1, 8))
    return (one + x @ p["a"]).sum(-1)


@attack({"s": (3, 4), "a": (3, 8)}, frozen=None, kept=(("a", 1),))
def tile_top_one(p, x):
    top, _ = lax.top_k(x @ p["s"], 1)
    return (jnp.tile(top, (1, 8)) + x @ p["a"]).sum(-1)


@attack({"s": (1,), "a": (3, 8), "w": (8, 2)})
def tile_single_weighted(p, x):
    return (jnp.tile(p["s"], 8) + x @ p["a"]) @ p["w"]


@attack({"a": (3, 8), "w": (8, 2)})
def moved_to_a_device(p, x):
    h = jax.device_put(jnp.tanh(x @ p["a"]), jax.devices()[0])
    return h.sum(-1, keepdims=True) + h @ p["w"]


# What is broadcast along several axes is computed beside each of them.
@attack({"a": (4,), "s": (1, 2, 1)}, jnp.ones((1, 2, 4)))
def clamped_from_below_by_single(p, x):
    low = jnp.broadcast_to(p["s"], (4, 2, 4))
    h = x * p["a"].reshape(4, 1, 1)
    return lax.clamp(low, h, h + 1.0).sum(0)
