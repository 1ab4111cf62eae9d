"""Networks over sequences as plain functions over nested dicts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .case import TINY, Case, images, tokens
from .plain_vision import layer_norm, norm_shapes, shape


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of float[batch, length, heads, dim], in halves."""
    dim, length = x.shape[-1], x.shape[1]
    frequencies = 1e4 ** (-jnp.arange(0, dim, 2) / dim)
    angles = jnp.arange(length)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _gpt(size: str, is_stacked: bool, kv_heads: int, is_tied: bool) -> Case:
    vocabulary, width, depth, heads, dim, inner, length = (
        32000,
        2048,
        16,
        32,
        64,
        5632,
        64,
    )
    if size == TINY:
        vocabulary, width, depth, heads, dim, inner, length = 24, 16, 2, 4, 6, 20, 7
    layer = {
        "norm1": shape(width),
        "query": shape(width, heads, dim),
        "key": shape(width, kv_heads, dim),
        "value": shape(width, kv_heads, dim),
        "out": shape(heads, dim, width),
        "norm2": shape(width),
        "gate": shape(width, inner),
        "up": shape(width, inner),
        "down": shape(inner, width),
    }
    stack = jax.tree.map(lambda s: shape(depth, *s.shape), layer)
    params = {
        "embed": shape(vocabulary, width),
        "layers": stack if is_stacked else [dict(layer) for _ in range(depth)],
        "norm": shape(width),
    }
    if not is_tied:
        params["head"] = shape(width, vocabulary)

    def attention(p: Any, x: jax.Array) -> jax.Array:
        q = rotate(jnp.einsum("bte,ehd->bthd", x, p["query"]))
        k = rotate(jnp.einsum("bte,egd->btgd", x, p["key"]))
        v = jnp.einsum("bte,egd->btgd", x, p["value"])
        b, t = x.shape[:2]
        q = q.reshape(b, t, kv_heads, heads // kv_heads, q.shape[-1])
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k) * dim**-0.5
        mask = jnp.tril(jnp.ones((t, t), bool))
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        y = jnp.einsum("bgrts,bsgd->btgrd", shares, v)
        return jnp.einsum("bthd,hde->bte", y.reshape(b, t, heads, -1), p["out"])

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = x + attention(p, rms_norm(p["norm1"], x))
        y = rms_norm(p["norm2"], x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def apply(p: Any, ids: jax.Array) -> jax.Array:
        x = p["embed"][ids]
        if is_stacked:
            x, _ = lax.scan(jax.checkpoint(block), x, p["layers"])
        else:
            for layer in p["layers"]:
                x, _ = block(x, layer)
        x = rms_norm(p["norm"], x)
        return x @ (p["embed"].T if is_tied else p["head"])

    return Case(apply, params, (tokens(2, length, vocabulary=vocabulary),))


def gpt_grouped(size: str) -> Case:
    """Grouped queries, rotary positions, layers in a list."""
    return _gpt(size, False, 2 if size == TINY else 4, False)


def gpt_scanned(size: str) -> Case:
    """The same with layers stacked and scanned, rematerialised; tied embedding."""
    return _gpt(size, True, 2 if size == TINY else 4, True)


def gpt_multi_query(size: str) -> Case:
    return _gpt(size, False, 1, False)


def lstm(size: str) -> Case:
    """Two layers; the four gates are one kernel."""
    width, inner, vocabulary, length = (650, 650, 10000, 35)
    if size == TINY:
        width, inner, vocabulary, length = 10, 12, 20, 6
    cell = {
        "w": shape(width, 4 * inner),
        "u": shape(inner, 4 * inner),
        "b": shape(4 * inner),
    }
    upper = {**cell, "w": shape(inner, 4 * inner)}
    params = {
        "embed": shape(vocabulary, width),
        "cells": [cell, upper],
        "head": {"w": shape(inner, vocabulary), "b": shape(vocabulary)},
    }

    def run(p: Any, x: jax.Array) -> jax.Array:
        start = jnp.zeros((x.shape[1], p["u"].shape[0]))

        def step(carry: Any, inputs: jax.Array) -> Any:
            h, c = carry
            gates = inputs @ p["w"] + h @ p["u"] + p["b"]
            i, g, f, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return lax.scan(step, (start, start), x)[1]

    def apply(p: Any, ids: jax.Array) -> jax.Array:
        x = p["embed"][ids].swapaxes(0, 1)
        for cell in p["cells"]:
            x = run(cell, x)
        return x.swapaxes(0, 1) @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (tokens(2, length, vocabulary=vocabulary),))


def _mixture(size: str, is_gathered: bool) -> Case:
    width, inner, experts, length, classes = 512, 2048, 8, 32, 100
    if size == TINY:
        width, inner, experts, length, classes = 12, 16, 4, 5, 3
    params = {
        "first": {"w": shape(8, width), "b": shape(width)},
        "router": shape(width, experts),
        "up": shape(experts, width, inner),
        "down": shape(experts, inner, width),
        "norm": norm_shapes(width),
        "head": {"w": shape(width, classes), "b": shape(classes)},
    }

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = x @ p["first"]["w"] + p["first"]["b"]
        shares, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        if is_gathered:
            up, down = p["up"][chosen], p["down"][chosen]  # [b, t, 2, ...]
            y = jax.nn.relu(jnp.einsum("bte,btkef->btkf", x, up))
            y = jnp.einsum("btkf,btkfe,btk->bte", y, down, shares)
        else:
            sent = jax.nn.one_hot(chosen, experts) * shares[..., None]
            y = jax.nn.relu(jnp.einsum("bte,xef->btxf", x, p["up"]))
            y = jnp.einsum("btxf,xfe,btkx->bte", y, p["down"], sent)
        x = layer_norm(p["norm"], x + y)
        return x @ p["head"]["w"] + p["head"]["b"]

    return Case(apply, params, (images(2, length, 8),))


def mixture_gathered(size: str) -> Case:
    """Every token fetches the kernels of its experts."""
    return _mixture(size, True)


def mixture_dense(size: str) -> Case:
    """Every expert runs, and a table of shares picks."""
    return _mixture(size, False)


def wavenet(size: str) -> Case:
    """Dilated causal convolutions over time with gates, and skips that add up."""
    width, skip, depth, classes, length = 64, 256, 10, 256, 256
    if size == TINY:
        width, skip, depth, classes, length = 8, 10, 3, 4, 20
    params = {
        "first": shape(1, 2, width),
        "layers": [
            {
                "conv": shape(2, width, 2 * width),
                "b": shape(2 * width),
                "out": shape(1, width, width),
                "skip": shape(1, width, skip),
            }
            for _ in range(depth)
        ],
        "head1": shape(1, skip, skip),
        "head2": shape(1, skip, classes),
    }

    def conv(x: jax.Array, kernel: jax.Array, dilation: int = 1) -> jax.Array:
        before = dilation * (kernel.shape[0] - 1)
        return lax.conv_general_dilated(
            x,
            kernel,
            (1,),
            [(before, 0)],
            rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x, total = conv(x, p["first"]), 0.0
        for i, q in enumerate(p["layers"]):
            y = conv(x, q["conv"], 2**i) + q["b"]
            a, b = jnp.split(y, 2, -1)
            y = jnp.tanh(a) * jax.nn.sigmoid(b)
            x, total = x + conv(y, q["out"]), total + conv(y, q["skip"])
        return conv(jax.nn.relu(conv(jax.nn.relu(total), p["head1"])), p["head2"])

    return Case(apply, params, (images(2, length, 2),))
