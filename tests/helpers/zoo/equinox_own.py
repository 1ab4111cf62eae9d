"""Networks in Equinox, as that community writes them: one example, mapped by vmap."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .case import TINY, Case, images, tokens
from .frameworks import from_equinox

_KEY = jax.random.key(0)


class VGG(eqx.Module):
    layers: eqx.nn.Sequential
    head: eqx.nn.MLP

    def __init__(
        self, plan: tuple[int, ...], side: int, inner: int, classes: int, key: Any
    ) -> None:
        keys = iter(jax.random.split(key, len(plan) + 1))
        layers: list[Any] = []
        before = 3
        for width in plan:
            if width == 0:
                layers.append(eqx.nn.MaxPool2d(2, 2))
                side //= 2
                continue
            layers.append(eqx.nn.Conv2d(before, width, 3, padding=1, key=next(keys)))
            layers.append(eqx.nn.Lambda(jax.nn.relu))
            before = width
        self.layers = eqx.nn.Sequential(layers)
        self.head = eqx.nn.MLP(before * side**2, classes, inner, 2, key=next(keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.ravel(self.layers(x)))


def vgg16(size: str) -> Case:
    """Channels first, flattened before three dense layers."""
    plan = (64, 64, 0, 128, 128, 0, *(256,) * 3, 0, *(512,) * 3, 0, *(512,) * 3, 0)
    settings: tuple[Any, ...] = (plan, 224, 4096, 1000)
    if size == TINY:
        settings = ((8, 8, 0, 12, 12, 0, 16, 0), 16, 20, 4)
    side = settings[1]
    return from_equinox(
        functools.partial(VGG, *settings, _KEY), images(2, 3, side, side)
    )


class DenseLayer(eqx.Module):
    norm1: eqx.nn.BatchNorm
    conv1: eqx.nn.Conv2d
    norm2: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d

    def __init__(self, before: int, growth: int, key: Any) -> None:
        a, b = jax.random.split(key)
        norm = functools.partial(eqx.nn.BatchNorm, axis_name="batch", mode="ema")
        self.norm1 = norm(before)
        self.conv1 = eqx.nn.Conv2d(before, 4 * growth, 1, use_bias=False, key=a)
        self.norm2 = norm(4 * growth)
        self.conv2 = eqx.nn.Conv2d(
            4 * growth, growth, 3, padding=1, use_bias=False, key=b
        )

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        y, state = self.norm1(x, state)
        y, state = self.norm2(self.conv1(jax.nn.relu(y)), state)
        return jnp.concatenate([x, self.conv2(jax.nn.relu(y))]), state


class DenseNet(eqx.Module):
    stem: eqx.nn.Conv2d
    stages: list[list[DenseLayer]]
    moves: list[eqx.nn.Conv2d]
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(
        self, growth: int, plan: tuple[int, ...], classes: int, key: Any
    ) -> None:
        keys = iter(jax.random.split(key, sum(plan) + len(plan) + 2))
        width = 2 * growth
        self.stem = eqx.nn.Conv2d(
            3, width, 3, padding=1, use_bias=False, key=next(keys)
        )
        self.stages, self.moves = [], []
        for i, count in enumerate(plan):
            stage = []
            for _ in range(count):
                stage.append(DenseLayer(width, growth, next(keys)))
                width += growth
            self.stages.append(stage)
            if i < len(plan) - 1:
                self.moves.append(eqx.nn.Conv2d(width, width // 2, 1, key=next(keys)))
                width //= 2
        self.norm = eqx.nn.BatchNorm(width, "batch", mode="ema")
        self.head = eqx.nn.Linear(width, classes, key=next(keys))

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        x = self.stem(x)
        for i, stage in enumerate(self.stages):
            for layer in stage:
                x, state = layer(x, state)
            if i < len(self.moves):
                x = eqx.nn.AvgPool2d(2, 2)(self.moves[i](x))
        x, state = self.norm(x, state)
        return self.head(jax.nn.relu(x).mean((1, 2))), state


def _densenet(size: str, is_training: bool) -> Case:
    settings = (4, (2, 2), 4) if size == TINY else (12, (16, 16, 16), 10)
    side = 8 if size == TINY else 32
    return from_equinox(
        functools.partial(eqx.nn.make_with_state(DenseNet), *settings, _KEY),
        images(4, 3, side, side),
        has_state=True,
        is_training=is_training,
    )


def densenet(size: str) -> Case:
    """DenseNet-BC for CIFAR, channels first."""
    return _densenet(size, False)


def densenet_training(size: str) -> Case:
    return _densenet(size, True)


class UNet(eqx.Module):
    down: list[eqx.nn.Conv2d]
    up: list[eqx.nn.ConvTranspose2d]
    merge: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    head: eqx.nn.Conv2d

    def __init__(self, widths: tuple[int, ...], classes: int, key: Any) -> None:
        keys = iter(jax.random.split(key, 3 * len(widths)))
        conv = functools.partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = [conv(a, b, key=next(keys)) for a, b in pairs]
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = [
            eqx.nn.ConvTranspose2d(a, b, 4, 2, padding=1, key=next(keys))
            for a, b in pairs
        ]
        self.merge = [conv(2 * b, b, key=next(keys)) for _, b in pairs]
        self.norms = [eqx.nn.GroupNorm(2, b) for _, b in pairs]
        self.head = eqx.nn.Conv2d(widths[0], classes, 1, key=next(keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        skips = []
        for conv in self.down:
            x = jax.nn.silu(conv(x))
            skips.append(x)
            x = eqx.nn.AvgPool2d(2, 2)(x)
        x = skips.pop()
        for up, merge, norm in zip(self.up, self.merge, self.norms, strict=True):
            x = jnp.concatenate([up(x), skips.pop()])
            x = jax.nn.silu(norm(merge(x)))
        return self.head(x)


def unet(size: str) -> Case:
    """With transposed convolutions and group norm, channels first."""
    widths = (6, 8, 12) if size == TINY else (64, 128, 256, 512, 1024)
    side = 16 if size == TINY else 256
    return from_equinox(
        functools.partial(UNet, widths, 2, _KEY), images(2, 3, side, side)
    )


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding
    norm2: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, inner: int, key: Any) -> None:
        a, b = jax.random.split(key)
        self.norm1 = eqx.nn.RMSNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=a)
        self.rope = eqx.nn.RotaryPositionalEmbedding(width // heads)
        self.norm2 = eqx.nn.RMSNorm(width)
        self.mlp = eqx.nn.MLP(width, width, inner, 1, jax.nn.gelu, key=b)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm1)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))

        def turn(q: Any, k: Any, v: Any) -> Any:
            rope = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return rope(q), rope(k), v

        x = x + self.attention(y, y, y, mask, process_heads=turn)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class GPT(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    is_scanned: bool = eqx.field(static=True)

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        inner: int,
        depth: int,
        is_scanned: bool,
        key: Any,
    ) -> None:
        a, b, c = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=a)
        make = lambda key: Block(width, heads, inner, key)  # noqa: E731
        keys = jax.random.split(b, depth)
        self.blocks = (
            eqx.filter_vmap(make)(keys) if is_scanned else list(map(make, keys))
        )
        self.norm = eqx.nn.RMSNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=c)
        self.is_scanned = is_scanned

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(ids)
        if self.is_scanned:
            arrays, static = eqx.partition(self.blocks, eqx.is_array)

            def step(x: jax.Array, arrays: Any) -> tuple[jax.Array, None]:
                return eqx.combine(arrays, static)(x), None

            x, _ = jax.lax.scan(step, x, arrays)
        else:
            for block in self.blocks:
                x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def _gpt(size: str, is_scanned: bool) -> Case:
    settings, length = (32000, 512, 8, 2048, 8), 64
    if size == TINY:
        settings, length = (24, 16, 2, 20, 2), 7
    return from_equinox(
        functools.partial(GPT, *settings, is_scanned, _KEY),
        tokens(2, length, vocabulary=settings[0]),
    )


def gpt_rotary(size: str) -> Case:
    """`MultiheadAttention` with `RotaryPositionalEmbedding` on its heads."""
    return _gpt(size, False)


def gpt_scanned(size: str) -> Case:
    """The same with blocks made by `filter_vmap` and run by `lax.scan`."""
    return _gpt(size, True)


class LSTM(eqx.Module):
    embed: eqx.nn.Embedding
    cells: list[eqx.Module]
    head: eqx.nn.Linear

    def __init__(self, vocabulary: int, width: int, inner: int, key: Any) -> None:
        a, b, c, d = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=a)
        self.cells = [
            eqx.nn.LSTMCell(width, inner, key=b),
            eqx.nn.GRUCell(inner, inner, key=c),
        ]
        self.head = eqx.nn.Linear(inner, vocabulary, key=d)

    def __call__(self, ids: jax.Array) -> jax.Array:
        lstm, gru = self.cells
        zero = jnp.zeros(gru.hidden_size)

        def step(carry: Any, x: jax.Array) -> Any:
            (h, c), g = carry
            h, c = lstm(x, (h, c))
            g = gru(h, g)
            return ((h, c), g), g

        _, y = jax.lax.scan(step, ((zero, zero), zero), jax.vmap(self.embed)(ids))
        return jax.vmap(self.head)(y)


def lstm(size: str) -> Case:
    """An LSTM cell and a GRU cell in one scan."""
    settings = (20, 10, 12) if size == TINY else (10000, 650, 650)
    length = 6 if size == TINY else 35
    return from_equinox(
        functools.partial(LSTM, *settings, _KEY),
        tokens(2, length, vocabulary=settings[0]),
    )


class Inception(eqx.Module):
    paths: list[eqx.nn.Sequential]

    def __init__(self, before: int, widths: tuple[int, ...], key: Any) -> None:
        keys = iter(jax.random.split(key, 6))
        relu = eqx.nn.Lambda(jax.nn.relu)

        def conv(a: int, b: int, kernel: int) -> list[Any]:
            made = eqx.nn.Conv2d(a, b, kernel, padding=kernel // 2, key=next(keys))
            return [made, relu]

        one, three_in, three, five_in, five, pooled = widths
        self.paths = [
            eqx.nn.Sequential(conv(before, one, 1)),
            eqx.nn.Sequential(conv(before, three_in, 1) + conv(three_in, three, 3)),
            eqx.nn.Sequential(conv(before, five_in, 1) + conv(five_in, five, 5)),
            eqx.nn.Sequential(
                [eqx.nn.MaxPool2d(3, 1, padding=1), *conv(before, pooled, 1)]
            ),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([path(x) for path in self.paths])


class GoogLeNet(eqx.Module):
    stem: eqx.nn.Conv2d
    mixes: list[Inception]
    head: eqx.nn.Linear
    pooled: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        stem: int,
        rows: tuple[tuple[int, ...], ...],
        pooled: tuple[int, ...],
        classes: int,
        key: Any,
    ) -> None:
        keys = jax.random.split(key, len(rows) + 2)
        self.stem = eqx.nn.Conv2d(3, stem, 7, 2, padding=3, key=keys[0])
        self.mixes, before = [], stem
        for row, key in zip(rows, keys[2:], strict=True):
            self.mixes.append(Inception(before, row, key))
            before = row[0] + row[2] + row[4] + row[5]
        self.head = eqx.nn.Linear(before, classes, key=keys[1])
        self.pooled = pooled

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(x))
        for i, mix in enumerate(self.mixes):
            if i in self.pooled:
                x = eqx.nn.MaxPool2d(3, 2, padding=1)(x)
            x = mix(x)
        return self.head(x.mean((1, 2)))


def inception(size: str) -> Case:
    """GoogLeNet: four paths side by side, concatenated."""
    rows = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )
    settings: tuple[Any, ...] = (192, rows, (0, 2, 7), 1000)
    if size == TINY:
        settings = (8, ((4, 6, 8, 4, 6, 4), (6, 4, 8, 4, 4, 6)), (1,), 4)
    side = 16 if size == TINY else 224
    return from_equinox(
        functools.partial(GoogLeNet, *settings, _KEY), images(2, 3, side, side)
    )
