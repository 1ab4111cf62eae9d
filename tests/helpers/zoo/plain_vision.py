"""Vision networks as plain functions over nested dicts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .case import TINY, Case, images

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def conv(
    x: jax.Array,
    kernel: jax.Array,
    stride: int = 1,
    groups: int = 1,
    layout: tuple[str, str, str] = NHWC,
    **settings: Any,
) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        settings.pop("padding", "SAME"),
        dimension_numbers=layout,
        feature_group_count=groups,
        **settings,
    )


def norm_shapes(width: int) -> dict[str, Any]:
    return {"scale": shape(width), "bias": shape(width)}


def batch_norm(p: Mapping[str, Any], s: Mapping[str, Any], x: jax.Array) -> jax.Array:
    return (x - s["mean"]) * lax.rsqrt(s["var"] + 1e-5) * p["scale"] + p["bias"]


def layer_norm(p: Mapping[str, Any], x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]


def group_norm(p: Mapping[str, Any], x: jax.Array, groups: int) -> jax.Array:
    n, h, w, c = x.shape
    y = x.reshape(n, h * w, groups, c // groups)
    mean, variance = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    y = (y - mean) * lax.rsqrt(variance + 1e-5)
    return y.reshape(n, h, w, c) * p["scale"] + p["bias"]


# ResNeXt: grouped 3x3 convolutions between 1x1 convolutions.


def resnext(size: str) -> Case:
    groups, widths, depths, classes, side = (
        32,
        (128, 256, 512, 1024),
        (3, 4, 6, 3),
        1000,
        224,
    )
    if size == TINY:
        groups, widths, depths, classes, side = 4, (16, 32), (2, 2), 4, 16
    params: dict[str, Any] = {"stem": shape(7, 7, 3, widths[0] // 2), "blocks": []}
    params["norm"] = norm_shapes(widths[0] // 2)
    running: dict[str, Any] = {"norm": _running(widths[0] // 2), "blocks": []}
    strides, before = [], widths[0] // 2
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            block = {
                "conv1": shape(1, 1, before, width),
                "norm1": norm_shapes(width),
                "conv2": shape(3, 3, width // groups, width),
                "norm2": norm_shapes(width),
                "conv3": shape(1, 1, width, 2 * width),
                "norm3": norm_shapes(2 * width),
            }
            seen = {"norm1": _running(width), "norm2": _running(width)}
            seen["norm3"] = _running(2 * width)
            if i == 0:
                block["shortcut"] = shape(1, 1, before, 2 * width)
                block["norm4"] = norm_shapes(2 * width)
                seen["norm4"] = _running(2 * width)
            params["blocks"].append(block)
            running["blocks"].append(seen)
            strides.append(2 if i == 0 and stage else 1)
            before = 2 * width
    params["head"] = {"w": shape(before, classes), "b": shape(classes)}

    def apply(p: Any, s: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(batch_norm(p["norm"], s["norm"], conv(x, p["stem"], 2)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for q, t, stride in zip(p["blocks"], s["blocks"], strides, strict=True):
            y = jax.nn.relu(batch_norm(q["norm1"], t["norm1"], conv(x, q["conv1"])))
            y = conv(y, q["conv2"], stride, groups)
            y = jax.nn.relu(batch_norm(q["norm2"], t["norm2"], y))
            y = batch_norm(q["norm3"], t["norm3"], conv(y, q["conv3"]))
            if "shortcut" in q:
                x = batch_norm(q["norm4"], t["norm4"], conv(x, q["shortcut"], stride))
            x = jax.nn.relu(x + y)
        return x.mean((1, 2)) @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (images(2, side, side, 3),), running)


def _running(width: int) -> dict[str, Any]:
    return {"mean": shape(width), "var": shape(width)}


# BiT: group norm, and kernels standardised over their inputs before every use.


def bit_resnet(size: str) -> Case:
    groups, widths, depths, classes, side = (
        32,
        (256, 512, 1024, 2048),
        (3, 4, 6, 3),
        1000,
        224,
    )
    if size == TINY:
        groups, widths, depths, classes, side = 4, (16, 32), (1, 2), 4, 16
    params: dict[str, Any] = {
        "stem": shape(7, 7, 3, 64 if side > 16 else 16),
        "blocks": [],
    }
    before, strides = params["stem"].shape[-1], []
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(depth):
            inner = width // 4 if side > 16 else width // 2
            block = {
                "norm1": norm_shapes(before),
                "conv1": shape(1, 1, before, inner),
                "norm2": norm_shapes(inner),
                "conv2": shape(3, 3, inner, inner),
                "norm3": norm_shapes(inner),
                "conv3": shape(1, 1, inner, width),
            }
            if i == 0:
                block["shortcut"] = shape(1, 1, before, width)
            params["blocks"].append(block)
            strides.append(2 if i == 0 and stage else 1)
            before = width
    params["norm"] = norm_shapes(before)
    params["head"] = {"w": shape(before, classes), "b": shape(classes)}

    def standard(kernel: jax.Array) -> jax.Array:
        mean, variance = kernel.mean((0, 1, 2)), kernel.var((0, 1, 2))
        return (kernel - mean) * lax.rsqrt(variance + 1e-5)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(x, standard(p["stem"]), 2)
        for q, stride in zip(p["blocks"], strides, strict=True):
            y = jax.nn.relu(group_norm(q["norm1"], x, groups))
            if "shortcut" in q:
                x = conv(y, standard(q["shortcut"]), stride)
            y = conv(y, standard(q["conv1"]))
            y = jax.nn.relu(group_norm(q["norm2"], y, groups))
            y = conv(y, standard(q["conv2"]), stride)
            y = jax.nn.relu(group_norm(q["norm3"], y, groups))
            x = x + conv(y, standard(q["conv3"]))
        x = jax.nn.relu(group_norm(p["norm"], x, groups)).mean((1, 2))
        return x @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (images(2, side, side, 3),))


# ShuffleNet: grouped 1x1 convolutions with a channel shuffle, channels second.


def shufflenet(size: str) -> Case:
    groups, stem, widths, repeats, classes, side = (
        3,
        24,
        (240, 480, 960),
        (4, 8, 4),
        1000,
        224,
    )
    if size == TINY:
        groups, stem, widths, repeats, classes, side = 2, 8, (24, 48), (2, 2), 4, 32
    params: dict[str, Any] = {"stem": shape(stem, 3, 3, 3), "blocks": []}
    before, plan = stem, []
    for stage, (width, repeat) in enumerate(zip(widths, repeats, strict=True)):
        for i in range(repeat):
            out, inner = width - (before if i == 0 else 0), width // 4
            first = 1 if stage == 0 and i == 0 else groups
            params["blocks"].append(
                {
                    "conv1": shape(inner, before // first, 1, 1),
                    "norm1": _affine(inner),
                    "conv2": shape(inner, 1, 3, 3),
                    "norm2": _affine(inner),
                    "conv3": shape(out, inner // groups, 1, 1),
                    "norm3": _affine(out),
                }
            )
            plan.append((2 if i == 0 else 1, first))
            before = width
    params["head"] = {"w": shape(before, classes), "b": shape(classes)}

    def shuffle(x: jax.Array) -> jax.Array:
        n, c, h, w = x.shape
        x = x.reshape(n, groups, c // groups, h, w)
        return x.swapaxes(1, 2).reshape(n, c, h, w)

    def affine(p: Any, x: jax.Array) -> jax.Array:
        return x * p["scale"][:, None, None] + p["bias"][:, None, None]

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(conv(x, p["stem"], 2, layout=NCHW))
        for q, (stride, first) in zip(p["blocks"], plan, strict=True):
            y = affine(q["norm1"], conv(x, q["conv1"], 1, first, NCHW))
            y = shuffle(jax.nn.relu(y))
            y = affine(q["norm2"], conv(y, q["conv2"], stride, y.shape[1], NCHW))
            y = affine(q["norm3"], conv(y, q["conv3"], 1, groups, NCHW))
            if stride == 1:
                x = jax.nn.relu(x + y)
                continue
            window, step = (1, 1, 3, 3), (1, 1, 2, 2)
            pooled = lax.reduce_window(x, 0.0, lax.add, window, step, "SAME") / 9
            x = jax.nn.relu(jnp.concatenate([pooled, y], axis=1))
        return x.mean((2, 3)) @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (images(2, 3, side, side),))


def _affine(width: int) -> dict[str, Any]:
    return {"scale": shape(width), "bias": shape(width)}


# ESPCN: super-resolution; the last channels become pixels.


def pixel_shuffle(size: str) -> Case:
    widths, up, side = ((64, 32), 3, 64) if size != TINY else ((12, 8), 2, 8)
    params = {
        "conv1": {"w": shape(5, 5, 3, widths[0]), "b": shape(widths[0])},
        # The upsampling stands inside, so that its channels can be removed.
        "expand": {"w": shape(3, 3, widths[0], widths[1] * up**2)},
        "last": {"w": shape(3, 3, widths[1], 3), "b": shape(3)},
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(conv(x, p["conv1"]["w"]) + p["conv1"]["b"])
        y = conv(y, p["expand"]["w"])
        n, h, w, c = y.shape
        y = y.reshape(n, h, w, up, up, c // up**2).transpose(0, 1, 3, 2, 4, 5)
        y = jax.nn.relu(y.reshape(n, h * up, w * up, c // up**2))
        return conv(y, p["last"]["w"]) + p["last"]["b"]

    return Case(apply, params, (images(2, side, side, 3),))


# Swin: attention inside windows, shifted by a roll in every other layer.


def swin(size: str) -> Case:
    width, depths, heads, window, classes, side = (
        96,
        (2, 2, 6, 2),
        (3, 6, 12, 24),
        7,
        1000,
        224,
    )
    if size == TINY:
        width, depths, heads, window, classes, side = 16, (2, 2), (2, 4), 2, 4, 32
    params: dict[str, Any] = {
        "embed": {"w": shape(4, 4, 3, width), "b": shape(width)},
        "norm": norm_shapes(width),
        "stages": [],
    }
    for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        dim = width * 2**stage
        blocks = [_swin_block(dim, count, window) for _ in range(depth)]
        merge = {"norm": norm_shapes(4 * dim), "w": shape(4 * dim, 2 * dim)}
        is_last = stage == len(depths) - 1
        params["stages"].append(
            {"blocks": blocks} if is_last else {"blocks": blocks, "merge": merge}
        )
    params["last"] = norm_shapes(dim)
    params["head"] = {"w": shape(dim, classes), "b": shape(classes)}

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(x, p["embed"]["w"], 4, padding="VALID") + p["embed"]["b"]
        x = layer_norm(p["norm"], x)
        for stage, count in zip(p["stages"], heads, strict=True):
            for i, block in enumerate(stage["blocks"]):
                x = _swin_layer(block, x, count, window, i % 2 * (window // 2))
            if "merge" in stage:
                parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
                x = layer_norm(stage["merge"]["norm"], jnp.concatenate(parts, -1))
                x = x @ stage["merge"]["w"]
        x = layer_norm(p["last"], x).mean((1, 2))
        return x @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (images(2, side, side, 3),))


def _swin_block(dim: int, heads: int, window: int) -> dict[str, Any]:
    return {
        "norm1": norm_shapes(dim),
        "qkv": {"w": shape(dim, 3 * dim), "b": shape(3 * dim)},
        "table": shape((2 * window - 1) ** 2, heads),
        "out": {"w": shape(dim, dim), "b": shape(dim)},
        "norm2": norm_shapes(dim),
        "up": {"w": shape(dim, 4 * dim), "b": shape(4 * dim)},
        "down": {"w": shape(4 * dim, dim), "b": shape(dim)},
    }


def _swin_layer(p: Any, x: jax.Array, heads: int, window: int, shift: int) -> jax.Array:
    n, h, w, c = x.shape
    rows, columns = h // window, w // window
    y = layer_norm(p["norm1"], x)
    y = jnp.roll(y, (-shift, -shift), (1, 2))
    y = y.reshape(n, rows, window, columns, window, c).transpose(0, 1, 3, 2, 4, 5)
    y = y.reshape(-1, window * window, c)
    qkv = (y @ p["qkv"]["w"] + p["qkv"]["b"]).reshape(
        *y.shape[:2], 3, heads, c // heads
    )
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * (c // heads) ** -0.5
    places = jnp.stack(jnp.meshgrid(*[jnp.arange(window)] * 2, indexing="ij"))
    places = places.reshape(2, -1)
    apart = places[:, :, None] - places[:, None] + window - 1
    index = apart[0] * (2 * window - 1) + apart[1]
    scores = scores + p["table"][index].transpose(2, 0, 1)
    y = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(-1, window * window, c)
    y = y @ p["out"]["w"] + p["out"]["b"]
    y = y.reshape(n, rows, columns, window, window, c).transpose(0, 1, 3, 2, 4, 5)
    x = x + jnp.roll(y.reshape(n, h, w, c), (shift, shift), (1, 2))
    y = jax.nn.gelu(layer_norm(p["norm2"], x) @ p["up"]["w"] + p["up"]["b"])
    return x + y @ p["down"]["w"] + p["down"]["b"]


# MLP-Mixer: the same dense layers over patches and over channels.


def mlp_mixer(size: str) -> Case:
    patch, width, tokens, channels, depth, classes, side = (
        16,
        768,
        384,
        3072,
        12,
        1000,
        224,
    )
    if size == TINY:
        patch, width, tokens, channels, depth, classes, side = 4, 16, 12, 24, 2, 4, 16
    count = (side // patch) ** 2
    params = {
        "embed": {"w": shape(patch, patch, 3, width), "b": shape(width)},
        "blocks": [
            {
                "norm1": norm_shapes(width),
                "tokens": _mlp(count, tokens),
                "norm2": norm_shapes(width),
                "channels": _mlp(width, channels),
            }
            for _ in range(depth)
        ],
        "norm": norm_shapes(width),
        "head": {"w": shape(width, classes), "b": shape(classes)},
    }

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = conv(x, p["embed"]["w"], patch, padding="VALID") + p["embed"]["b"]
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for q in p["blocks"]:
            y = layer_norm(q["norm1"], x).swapaxes(1, 2)
            x = x + mlp(q["tokens"], y).swapaxes(1, 2)
            x = x + mlp(q["channels"], layer_norm(q["norm2"], x))
        x = layer_norm(p["norm"], x).mean(1)
        return x @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (images(2, side, side, 3),))


def _mlp(width: int, inner: int) -> dict[str, Any]:
    return {
        "w1": shape(width, inner),
        "b1": shape(inner),
        "w2": shape(inner, width),
        "b2": shape(width),
    }
