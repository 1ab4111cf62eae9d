"""Attacks by convolutions, norms and layouts of images."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.attacks import IMAGES, attack, conv
from tests.helpers.channel_checks import draw


@attack({"k": (3, 3, 3, 8), "c": (24, 2)}, IMAGES)
def const_depthwise_multiplier(p, x):
    h = conv(x, p["k"])
    sob = np.random.default_rng(0).normal(size=(3, 3, 1, 24)).astype("f")
    return conv(h, sob, groups=8).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (72, 2)}, IMAGES)
def patches(p, x):
    h = jax.nn.relu(conv(x, p["k"]))
    h = lax.conv_general_dilated_patches(
        h, (3, 3), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return h.mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "d": (3, 3, 1, 3), "c": (24, 2)}, IMAGES, frozen=True)
def shared_depthwise_multiplier(p, x):
    h = conv(x, p["k"])
    d = jnp.tile(p["d"], (1, 1, 1, 8))
    return conv(h, d, groups=8).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "d": (3, 3, 1, 1), "c": (8, 2)}, IMAGES)
def shared_depthwise(p, x):
    h = conv(x, p["k"])
    d = jnp.broadcast_to(p["d"], (3, 3, 1, 8))
    return conv(h, d, groups=8).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (8, 2)}, IMAGES)
def const_grouped(p, x):
    h = conv(x, p["k"])
    s = np.random.default_rng(0).normal(size=(3, 3, 2, 8)).astype("f")
    return conv(h, s, groups=4).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 2, 8), "c": (8, 2)}, IMAGES)
def grouped_on_uniform(p, x):
    s = jnp.broadcast_to(x[..., :1], (2, 6, 6, 8))
    return conv(s, p["k"], groups=4).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 1, 16), "c": (16, 2)}, IMAGES)
def depthwise_on_uniform(p, x):
    s = jnp.broadcast_to(x[..., :1], (2, 6, 6, 8))
    return conv(s, p["k"], groups=8).mean((1, 2)) @ p["c"]


@attack({"a": (3, 3, 3, 6), "k": (3, 3, 2, 8), "c": (8, 2)}, IMAGES)
def grouped_on_padded(p, x):
    s = jnp.pad(conv(x, p["a"]), ((0, 0), (0, 0), (0, 0), (1, 1)))
    return conv(s, p["k"], groups=4).mean((1, 2)) @ p["c"]


@attack({"a": (3, 3, 3, 6), "k": (3, 3, 1, 16), "c": (16, 2)}, IMAGES)
def multiplier_on_padded(p, x):
    s = jnp.pad(conv(x, p["a"]), ((0, 0), (0, 0), (0, 0), (0, 2)))
    return conv(s, p["k"], groups=8).mean((1, 2)) @ p["c"]


@attack({"a": (3, 3, 3, 6), "k": (3, 3, 1, 8), "c": (8, 2)}, IMAGES)
def depthwise_on_padded(p, x):
    s = jnp.pad(conv(x, p["a"]), ((0, 0), (0, 0), (0, 0), (0, 2)))
    return conv(s, p["k"], groups=8).mean((1, 2)) @ p["c"]


@attack({"a": (3, 3, 3, 8), "s": (8,), "b": (8,), "w": (8, 2)}, IMAGES, frozen=True)
def grn(p, x):
    h = jax.nn.gelu(conv(x, p["a"]))
    g = jnp.linalg.norm(h, axis=(1, 2), keepdims=True)
    n = g / (g.mean(-1, keepdims=True) + 1e-06)
    return (p["s"] * (h * n) + p["b"] + h).mean((1, 2)) @ p["w"]


@attack({"a": (3, 3, 3, 8), "w": (3, 3, 8, 2)}, IMAGES)
def halves_conv(p, x):
    h = conv(x, p["a"])
    w = p["w"]
    return conv(h[..., :4], w[:, :, :4]) + conv(jnp.tanh(h[..., 4:]), w[:, :, 4:])


@attack({"a": (3, 3, 3, 8), "g": (3, 3, 2, 8), "w": (1, 1, 8, 2)}, IMAGES)
def halves_group_conv(p, x):
    h = conv(x, p["a"])
    g = p["g"]
    y = jnp.concatenate(
        [
            conv(h[..., :4], g[..., :4], groups=2),
            conv(h[..., 4:], g[..., 4:], groups=2),
        ],
        -1,
    )
    return conv(y, p["w"])


@attack({"a": (3, 3, 3, 8), "g": (3, 3, 1, 8), "w": (1, 1, 8, 2)}, IMAGES)
def halves_depthwise(p, x):
    h = conv(x, p["a"])
    g = p["g"]
    y = jnp.concatenate(
        [
            conv(h[..., :4], g[..., :4], groups=4),
            jnp.sin(conv(h[..., 4:], g[..., 4:], groups=4)),
        ],
        -1,
    )
    return conv(y, p["w"])


relu = jax.nn.relu


@attack({"k": (3, 3, 3, 8), "r": (8, 2), "e": (2, 8), "c": (8, 2)}, IMAGES)
def squeeze_excite(p, x):
    h = conv(x, p["k"])
    s = jax.nn.sigmoid(relu(h.mean((1, 2)) @ p["r"]) @ p["e"])
    return (h * s[:, None, None]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "s": (3, 3, 2, 1), "c": (8, 2)}, IMAGES)
def cbam_spatial(p, x):
    h = conv(x, p["k"])
    m = jnp.stack([h.mean(-1), h.max(-1)], -1)
    return (h * jax.nn.sigmoid(conv(m, p["s"]))).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "s": (3, 3, 1, 1), "c": (8, 2)}, IMAGES)
def spatial_mean_attention(p, x):
    h = conv(x, p["k"])
    return (h * jax.nn.sigmoid(conv(h.mean(-1, keepdims=True), p["s"]))).mean(
        (1, 2)
    ) @ p["c"]


@attack({"k": (3, 3, 3, 8), "e": (3,), "c": (8, 2)}, IMAGES, frozen=True)
def eca(p, x):
    h = conv(x, p["k"])
    g = h.mean((1, 2))
    g = lax.conv_general_dilated(
        g[:, :, None],
        p["e"][:, None, None],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[..., 0]
    return (h * jax.nn.sigmoid(g)[:, None, None]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "s": (8,), "b": (8,), "c": (8, 2)}, IMAGES)
def groupnorm1(p, x):
    h = conv(x, p["k"])
    m = h.mean((1, 2, 3), keepdims=True)
    v = h.var((1, 2, 3), keepdims=True)
    return relu((h - m) * lax.rsqrt(v + 1e-05) * p["s"] + p["b"]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "s": (8,), "b": (8,), "c": (8, 2)}, IMAGES)
def instancenorm(p, x):
    h = conv(x, p["k"])
    g = h.reshape(2, 6, 6, 8, 1)
    m = g.mean((1, 2, 4), keepdims=True)
    v = g.var((1, 2, 4), keepdims=True)
    return (
        relu(((g - m) * lax.rsqrt(v + 1e-05)).reshape(h.shape) * p["s"] + p["b"]).mean(
            (1, 2)
        )
        @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "c": (8, 2)}, IMAGES, frozen=True)
def instancenorm_eps0(p, x):
    h = conv(x, p["k"])
    return (
        relu((h - h.mean((1, 2), keepdims=True)) / h.std((1, 2), keepdims=True)).mean(
            (1, 2)
        )
        @ p["c"]
    )


@attack(
    {
        "k": (3, 3, 3, 8),
        "g": (3, 3, 4, 8),
        "g2": (3, 3, 2, 12),
        "g3": (3, 3, 4, 6),
        "c": (6, 2),
    },
    IMAGES,
)
def grouped_stack(p, x):
    h = conv(x, p["k"])
    h = relu(conv(h, p["g"], groups=2))
    h = relu(conv(h, p["g2"], groups=4))
    return conv(h, p["g3"], groups=3).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "g": (3, 3, 4, 8), "g2": (3, 3, 2, 8), "c": (8, 2)}, IMAGES)
def grouped_residual(p, x):
    h = conv(x, p["k"])
    return (h + conv(h, p["g"], groups=2) + conv(h, p["g2"], groups=4)).mean(
        (1, 2)
    ) @ p["c"]


@attack({"k": (3, 3, 3, 8), "g": (3, 3, 4, 4), "c": (4, 2)}, IMAGES)
def transposed_grouped(p, x):
    h = conv(x, p["k"])
    y = lax.conv_general_dilated(
        h,
        p["g"],
        (1, 1),
        ((2, 2), (2, 2)),
        lhs_dilation=(2, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )
    return y.mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "g": (3, 3, 8, 5), "c": (5, 2)}, IMAGES)
def conv_transpose_t(p, x):
    return (
        lax.conv_transpose(
            conv(x, p["k"]),
            p["g"].swapaxes(2, 3),
            (2, 2),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            transpose_kernel=True,
        ).mean((1, 2))
        @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "g": (3, 3, 4, 8), "c": (8, 2)}, IMAGES, frozen=True)
def batch_group(p, x):
    h = conv(x, p["k"])
    y = lax.conv_general_dilated(
        h,
        jnp.concatenate([p["g"], p["g"]], 2),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        batch_group_count=2,
    )
    return y.mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 4), "e": (3, 36 * 4), "c": (4, 2)}, IMAGES)
def hyper_conv(p, x):
    h = conv(x, p["k"])
    ker = (x.mean((0, 1, 2)) @ p["e"]).reshape(3, 3, 4, 4)
    return conv(h, ker).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 4), "e": (3, 4), "f": (4, 3, 3, 4, 5), "c": (5, 2)}, IMAGES)
def condconv_vmap(p, x):
    h = conv(x, p["k"])
    a = jax.nn.softmax(x.mean((1, 2)) @ p["e"])
    ker = jnp.einsum("be,ehwio->bhwio", a, p["f"])
    return jax.vmap(lambda h, k: conv(h[None], k)[0])(h, ker).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 4), "e": (3, 9 * 4), "c": (4, 2)}, IMAGES)
def dynamic_depthwise(p, x):
    h = conv(x, p["k"])
    ker = (x.mean((1, 2)) @ p["e"]).reshape(2, 3, 3, 1, 4)
    return (
        jax.vmap(lambda h, k: conv(h[None], k, groups=4)[0])(h, ker).mean((1, 2))
        @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "o": (3, 3, 8, 18), "c": (8, 2)}, IMAGES)
def deform(p, x):
    h = conv(x, p["k"])
    off = conv(h, p["o"]).reshape(2, 6, 6, 9, 2)
    gy, gx = jnp.meshgrid(jnp.arange(6.0), jnp.arange(6.0), indexing="ij")
    pos = jnp.stack([gy, gx], -1)[None, :, :, None] + off
    i = jnp.clip(jnp.round(pos), 0, 5).astype(int)
    return jax.vmap(lambda h, i: h[i[..., 0], i[..., 1]])(h, i).mean((1, 2, 3)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "o": (8, 6), "c": (8, 2)}, IMAGES)
def spatial_transformer(p, x):
    h = conv(x, p["k"])
    t = (h.mean((1, 2)) @ p["o"]).reshape(2, 2, 3)
    g = jnp.stack(jnp.meshgrid(jnp.linspace(-1, 1, 6), jnp.linspace(-1, 1, 6)), -1)
    g = jnp.concatenate([g, jnp.ones((6, 6, 1))], -1)
    pos = (jnp.einsum("bij,hwj->bhwi", t, g) + 1) * 2.5
    return (
        jax.vmap(
            lambda h, q: jax.vmap(
                lambda c: jax.scipy.ndimage.map_coordinates(
                    c, [q[..., 0], q[..., 1]], 1
                ),
                -1,
                -1,
            )(h)
        )(h, pos).mean((1, 2))
        @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "c": (12, 2)}, IMAGES)
def resize_channels(p, x):
    return (
        jax.image.resize(conv(x, p["k"]), (2, 6, 6, 12), "linear").mean((1, 2)) @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "d": (3, 3, 2, 4), "c": (4, 2)}, IMAGES)
def pixel_shuffle(p, x):
    h = (
        conv(x, p["k"])
        .reshape(2, 6, 6, 2, 2, 2)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(2, 12, 12, 2)
    )
    return conv(h, p["d"]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "d": (3, 3, 2, 4), "c": (4, 2)}, IMAGES)
def pixel_shuffle_torch(p, x):
    h = (
        conv(x, p["k"])
        .reshape(2, 6, 6, 2, 2, 2)
        .transpose(0, 1, 4, 2, 5, 3)
        .reshape(2, 12, 12, 2)
    )
    return conv(h, p["d"]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 4), "d": (1, 1, 16, 4), "c": (4, 2)}, IMAGES)
def space_to_depth(p, x):
    h = (
        conv(x, p["k"])
        .reshape(2, 3, 2, 3, 2, 4)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(2, 3, 3, 16)
    )
    return conv(h, p["d"]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "q": (8, 24), "o": (8, 8), "c": (8, 2)}, IMAGES)
def swin(p, x):
    h = conv(x, p["k"])
    s = jnp.roll(h, (-1, -1), (1, 2))
    w = s.reshape(2, 2, 3, 2, 3, 8).transpose(0, 1, 3, 2, 4, 5).reshape(8, 9, 8)
    q, k, v = (w @ p["q"]).reshape(8, 9, 3, 2, 4).transpose(2, 0, 3, 1, 4)
    a = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    o = (a @ v).transpose(0, 2, 1, 3).reshape(8, 9, 8) @ p["o"]
    o = o.reshape(2, 2, 2, 3, 3, 8).transpose(0, 1, 3, 2, 4, 5).reshape(2, 6, 6, 8)
    return (h + jnp.roll(o, (1, 1), (1, 2))).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 6), "q": (6, 6), "v": (6, 6), "c": (6, 2)}, IMAGES)
def axial_coincidence(p, x):
    h = conv(x, p["k"])
    a = jax.nn.softmax(jnp.einsum("bhwc,bhvc->bhwv", h @ p["q"], h))
    h = jnp.einsum("bhwv,bhvc->bhwc", a, h @ p["v"])
    a = jax.nn.softmax(jnp.einsum("bhwc,bgwc->bwhg", h @ p["q"], h))
    return jnp.einsum("bwhg,bgwc->bhwc", a, h).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 2), "q": (2, 2), "c": (8, 2)}, draw({"x": (2, 2, 2, 3)})["x"])
def all_twos(p, x):
    h = conv(x, p["k"])
    h = h.swapaxes(1, 3) @ p["q"]
    return h.reshape(2, 8) @ p["c"]


@attack({"a": (3, 4), "b": (4, 4), "c": (4, 4)})
def batch_equals_channels(p, x):
    h = x @ p["a"]
    h = h @ p["b"]
    h = h.T @ h @ p["c"]
    return h


@attack({"k": (3, 3, 3, 8), "l": (3, 3, 4, 8), "c": (8, 2)}, IMAGES)
def coupling_flow(p, x):
    h = conv(x, p["k"])
    a, b = jnp.split(h, 2, -1)
    st = conv(a, p["l"])
    s, t = jnp.split(st, 2, -1)
    b = b * jnp.exp(jnp.tanh(s)) + t
    return (
        jnp.concatenate([a, b], -1)[..., ::-1].mean((1, 2)) @ p["c"],
        jnp.tanh(s).sum((1, 2, 3)),
    )


@attack({"k": (3, 3, 3, 8), "c": (8, 2)}, IMAGES)
def blurpool(p, x):
    h = conv(x, p["k"])
    f = jnp.outer(jnp.array([1.0, 2, 1]), jnp.array([1.0, 2, 1])) / 16
    return (
        conv(h, jnp.tile(f[:, :, None, None], (1, 1, 1, 8)), 2, groups=8).mean((1, 2))
        @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "c": (32, 2)}, IMAGES)
def haar(p, x):
    h = conv(x, p["k"])
    f = np.tile(
        np.random.default_rng(0).normal(size=(2, 2, 1, 4)).astype("f"), (1, 1, 1, 8)
    )
    return relu(conv(h, f, 2, groups=8)).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (8 * 36, 2)}, IMAGES)
def flatten_cm(p, x):
    return conv(x, p["k"]).transpose(0, 3, 1, 2).reshape(2, -1) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (8, 2)}, IMAGES)
def gem_pool(p, x):
    h = conv(x, p["k"])
    return (jnp.maximum(h, 1e-06) ** 3).mean((1, 2)) ** (1 / 3) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (8, 2)}, IMAGES, frozen=True)
def lrn(p, x):
    h = conv(x, p["k"])
    s = lax.reduce_window(h * h, 0.0, lax.add, (1, 1, 1, 3), (1, 1, 1, 1), "SAME")
    return (h / (1 + s) ** 0.75).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (8, 2)}, IMAGES)
def ws(p, x):
    w = p["k"]
    w = (w - w.mean((0, 1, 2))) / jnp.sqrt(w.var((0, 1, 2)) + 1e-05)
    return relu(conv(x, w)).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "l": (3, 3, 8, 5), "c": (5, 2)}, IMAGES)
def ws2(p, x):
    def st(w):
        return (w - w.mean((0, 1, 2))) / jnp.sqrt(w.var((0, 1, 2)) + 1e-05)

    return relu(conv(relu(conv(x, st(p["k"]))), st(p["l"]))).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "l": (3, 3, 8, 5), "c": (5, 2)}, IMAGES)
def ws_dead_one(p, x):
    def st(w):
        return (w - w.mean((0, 1, 2))) / jnp.sqrt(w.var((0, 1, 2)) + 1e-05)

    return relu(conv(jnp.cos(conv(x, p["k"])), st(p["l"]))).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "g": (8,), "c": (8, 2)}, IMAGES, frozen=True)
def weight_norm(p, x):
    w = p["k"] * p["g"] / jnp.sqrt((p["k"] ** 2).sum((0, 1, 2)))
    return conv(x, w).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "g": (8,), "c": (8, 2)}, IMAGES)
def weight_norm_eps(p, x):
    w = p["k"] * p["g"] / jnp.sqrt((p["k"] ** 2).sum((0, 1, 2)) + 1e-06)
    return conv(x, w).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "u": (8,), "c": (8, 2)}, IMAGES)
def spectral_norm(p, x):
    w = p["k"].reshape(27, 8)
    u = lax.stop_gradient(p["u"])
    v = w @ u
    v = lax.stop_gradient(v / jnp.linalg.norm(v))
    u = w.T @ v
    s = jnp.linalg.norm(u)
    return conv(x, p["k"] / s).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "m": (3, 8), "l": (3, 3, 8, 6), "c": (6, 2)}, IMAGES)
def demod2(p, x):
    h = conv(x, p["k"])
    s = 1 + x.mean((1, 2)) @ p["m"]
    w = p["l"][None] * s[:, None, None, :, None]
    w = w * lax.rsqrt((w * w).sum((1, 2, 3), keepdims=True) + 1e-08)
    return jax.vmap(lambda x, w: conv(x[None], w)[0])(h, w).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "g": (3, 16), "c": (8, 2)}, IMAGES)
def adain(p, x):
    h = conv(x, p["k"])
    h = (h - h.mean((1, 2), keepdims=True)) * lax.rsqrt(
        h.var((1, 2), keepdims=True) + 1e-05
    )
    g = (x.mean((1, 2)) @ p["g"]).reshape(2, 2, 8)
    return (h * g[:, 0][:, None, None] + g[:, 1][:, None, None]).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "cen": (5, 8), "c": (5, 2)}, IMAGES)
def netvlad(p, x):
    h = conv(x, p["k"]).reshape(2, 36, 8)
    a = jax.nn.softmax(h @ p["cen"].T)
    v = jnp.einsum("bnk,bnkc->bkc", a, h[:, :, None] - p["cen"])
    v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    return v.sum(-1) @ p["c"]


@attack({"k": (3, 3, 3, 8), "cen": (5, 8), "c": (8, 2)}, IMAGES)
def vq(p, x):
    h = conv(x, p["k"]).reshape(72, 8)
    d = ((h[:, None] - p["cen"]) ** 2).sum(-1)
    q = p["cen"][jnp.argmin(d, -1)]
    q = h + lax.stop_gradient(q - h)
    return q.reshape(2, 36, 8).mean(1) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (9, 2)}, IMAGES)
def minibatch_std(p, x):
    h = conv(x, p["k"])
    s = jnp.sqrt(h.var(0) + 1e-08).mean()
    return jnp.concatenate([h, jnp.full((2, 6, 6, 1), s)], -1).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "c": (10, 2)}, IMAGES, frozen=True)
def coordconv_rms(p, x):
    h = conv(x, p["k"])
    g = jnp.stack(jnp.meshgrid(jnp.linspace(-1, 1, 6), jnp.linspace(-1, 1, 6)), -1)
    h = jnp.concatenate([h, jnp.broadcast_to(g, (2, 6, 6, 2))], -1)
    return (h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-05)).mean((1, 2)) @ p[
        "c"
    ]


@attack({"k": (3, 3, 3, 8), "c": (12, 2)}, IMAGES)
def pad_shortcut(p, x):
    h = jnp.pad(conv(x, p["k"]), ((0, 0), (0, 0), (0, 0), (2, 2)))
    return relu(h + 1).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 8), "l": (3, 3, 8, 12), "c": (12, 2)}, IMAGES)
def pad_residual(p, x):
    h = conv(x, p["k"])
    return (
        relu(conv(relu(h), p["l"]) + jnp.pad(h, ((0, 0), (0, 0), (0, 0), (0, 4)))).mean(
            (1, 2)
        )
        @ p["c"]
    )


@attack({"k": (3, 3, 3, 8), "l": (3, 3, 8, 4), "c": (8, 2)}, IMAGES)
def slice_residual(p, x):
    h = conv(x, p["k"])
    y = conv(relu(h), p["l"])
    return h.at[..., :4].add(y).mean((1, 2)) @ p["c"]


@attack({"k": (3, 3, 3, 4), "l": (6, 6, 36, 5), "c": (5, 2)}, IMAGES)
def conv_local(p, x):
    h = conv(x, p["k"])
    return (
        lax.conv_general_dilated_local(
            h,
            p["l"],
            (1, 1),
            "SAME",
            (3, 3),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ).mean((1, 2))
        @ p["c"]
    )


# Grouped convolutions whose kernels are not zero at dead channels.
SOBEL = np.random.default_rng(0).normal(size=(3, 3, 1, 8)).astype("f")


@attack({"k": (3, 3, 3, 2), "c": (8, 2)}, IMAGES)
def fixed_filters(p, x):
    h = conv(conv(x, p["k"]), jnp.asarray(SOBEL), groups=2)
    return h.mean((1, 2)) @ p["c"] + h.mean((1, 2, 3))[:, None]


@attack({"k": (3, 3, 3, 2), "m": (3, 3, 1, 8)}, IMAGES)
def multiplier_of_exp(p, x):
    return conv(conv(x, p["k"]), jnp.exp(p["m"]), groups=2).sum((1, 2, 3))


@attack({"k": (3, 3, 3, 8), "m": (3, 3, 4, 8)}, IMAGES)
def groups_of_exp(p, x):
    return conv(conv(x, p["k"]), jnp.exp(p["m"]), groups=2).sum((1, 2, 3))


@attack({"k": (3, 3, 3, 4), "m": (9, 8), "c": (8, 2)}, IMAGES)
def multiplier_of_softmax(p, x):
    kernel = jax.nn.softmax(p["m"], axis=0).reshape(3, 3, 1, 8)
    h = conv(conv(x, p["k"]), kernel, groups=4)
    return h.mean((1, 2)) @ p["c"] + h.mean((1, 2, 3))[:, None]


@attack({"m": (3, 3, 1, 12)}, IMAGES, frozen=True)
def multiplier_of_exp_of_images(p, x):
    return conv(x, jnp.exp(p["m"]), groups=3).sum((1, 2, 3))
