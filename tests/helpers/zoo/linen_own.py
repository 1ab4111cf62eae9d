"""Networks in Flax Linen, as that community writes them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .case import TINY, Case, images, tokens
from .frameworks import from_linen


class DenseLayer(nn.Module):
    growth: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train)
        y = nn.Conv(4 * self.growth, (1, 1), use_bias=False)(nn.relu(norm()(x)))
        y = nn.Conv(self.growth, (3, 3), use_bias=False)(nn.relu(norm()(y)))
        return jnp.concatenate([x, y], axis=-1)


class DenseNet(nn.Module):
    growth: int
    blocks: Sequence[int]
    classes: int
    train: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train)
        x = nn.Conv(2 * self.growth, (7, 7), strides=2, use_bias=False)(x)
        x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), "SAME")
        for i, count in enumerate(self.blocks):
            for _ in range(count):
                x = DenseLayer(self.growth, self.train)(x)
            if i < len(self.blocks) - 1:
                x = nn.Conv(x.shape[-1] // 2, (1, 1), use_bias=False)(
                    nn.relu(norm()(x))
                )
                x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(norm()(x)).mean((1, 2))
        return nn.Dense(self.classes)(x)


def densenet121(size: str) -> Case:
    is_tiny = size == TINY
    module = DenseNet(6, (2, 2), 4) if is_tiny else DenseNet(32, (6, 12, 24, 16), 1000)
    return from_linen(module, images(2, *(2 * (32 if is_tiny else 224,)), 3))


def densenet_training(size: str) -> Case:
    is_tiny = size == TINY
    settings = (6, (2, 2), 4) if is_tiny else (32, (6, 12, 24, 16), 1000)
    side = 32 if is_tiny else 224
    return from_linen(
        DenseNet(*settings, train=True), images(4, side, side, 3), is_training=True
    )


class SqueezeExcite(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.mean((1, 2), keepdims=True)
        y = nn.relu(nn.Conv(max(4, x.shape[-1] // 4), (1, 1))(y))
        return x * nn.hard_sigmoid(nn.Conv(x.shape[-1], (1, 1))(y))


class InvertedResidual(nn.Module):
    kernel: int
    inner: int
    out: int
    has_squeeze: bool
    is_hard: bool
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=True)
        activate = nn.hard_swish if self.is_hard else nn.relu
        y = x
        if self.inner != x.shape[-1]:
            y = activate(norm()(nn.Conv(self.inner, (1, 1), use_bias=False)(y)))
        y = nn.Conv(
            self.inner,
            (self.kernel, self.kernel),
            self.stride,
            feature_group_count=self.inner,
            use_bias=False,
        )(y)
        y = activate(norm()(y))
        if self.has_squeeze:
            y = SqueezeExcite()(y)
        y = norm()(nn.Conv(self.out, (1, 1), use_bias=False)(y))
        return x + y if self.stride == 1 and x.shape[-1] == self.out else y


class MobileNetV3(nn.Module):
    rows: Sequence[tuple[int, int, int, bool, bool, int]]
    last: tuple[int, int]
    classes: int
    stem: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=True)
        x = norm()(nn.Conv(self.stem, (3, 3), strides=2, use_bias=False)(x))
        x = nn.hard_swish(x)
        for row in self.rows:
            x = InvertedResidual(*row)(x)
        x = nn.hard_swish(norm()(nn.Conv(self.last[0], (1, 1), use_bias=False)(x)))
        x = nn.hard_swish(nn.Dense(self.last[1])(x.mean((1, 2))))
        return nn.Dense(self.classes)(x)


_MOBILENET_V3_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
_MOBILENET_V3_TINY = (
    (3, 8, 8, False, False, 1),
    (3, 24, 12, True, False, 2),
    (5, 24, 12, True, True, 1),
)


def mobilenet_v3(size: str) -> Case:
    if size == TINY:
        module = MobileNetV3(_MOBILENET_V3_TINY, (20, 24), 4, stem=8)
        return from_linen(module, images(2, 32, 32, 3))
    module = MobileNetV3(_MOBILENET_V3_LARGE, (960, 1280), 1000)
    return from_linen(module, images(1, 224, 224, 3))


class UNet(nn.Module):
    widths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def twice(x: jax.Array, width: int) -> jax.Array:
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            return nn.relu(nn.Conv(width, (3, 3))(x))

        skips = []
        for width in self.widths[:-1]:
            x = twice(x, width)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = twice(x, self.widths[-1])
        for width in reversed(self.widths[:-1]):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2))(x)
            x = twice(jnp.concatenate([skips.pop(), x], axis=-1), width)
        return nn.Conv(self.classes, (1, 1))(x)


def unet(size: str) -> Case:
    is_tiny = size == TINY
    widths = (6, 8, 12) if is_tiny else (64, 128, 256, 512, 1024)
    side = 16 if is_tiny else 256
    return from_linen(UNet(widths, 2), images(2, side, side, 3))


class EncoderBlock(nn.Module):
    heads: int
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(self.heads)(y, y)
        x = x + y
        y = nn.gelu(nn.Dense(self.inner)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class ViT(nn.Module):
    patch: int
    width: int
    inner: int
    heads: int
    depth: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (self.patch, self.patch), self.patch, "VALID")(x)
        n, h, w, c = x.shape
        x = x.reshape(n, h * w, c)
        first = self.param("cls", nn.initializers.zeros, (1, 1, c))
        x = jnp.concatenate([jnp.tile(first, (n, 1, 1)), x], axis=1)
        init = nn.initializers.normal(0.02)
        x = x + self.param("pos_embedding", init, (1, x.shape[1], c))
        for _ in range(self.depth):
            x = EncoderBlock(self.heads, self.inner)(x)
        return nn.Dense(self.classes)(nn.LayerNorm()(x)[:, 0])


def vit(size: str) -> Case:
    if size == TINY:
        return from_linen(ViT(4, 16, 24, 2, 2, 4), images(2, 16, 16, 3))
    return from_linen(ViT(16, 768, 3072, 12, 12, 1000), images(1, 224, 224, 3))


class LanguageLSTM(nn.Module):
    vocabulary: int
    width: int
    inner: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(ids)
        forward = nn.RNN(nn.OptimizedLSTMCell(self.inner))
        backward = nn.RNN(nn.GRUCell(self.inner), reverse=True, keep_order=True)
        x = nn.Bidirectional(forward, backward)(x)
        x = nn.RNN(nn.LSTMCell(self.inner))(x)
        return nn.Dense(self.vocabulary)(x)


def lstm(size: str) -> Case:
    """`nn.RNN`, one layer in both directions, one forward."""
    settings = (20, 10, 12) if size == TINY else (10000, 650, 650)
    length = 6 if size == TINY else 35
    return from_linen(
        LanguageLSTM(*settings), tokens(2, length, vocabulary=settings[0])
    )


class ScannedBlock(nn.Module):
    heads: int
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(
            y, mask=mask
        )
        y = nn.RMSNorm()(x)
        y = nn.silu(nn.Dense(self.inner, use_bias=False)(y)) * nn.Dense(
            self.inner, use_bias=False
        )(y)
        return x + nn.Dense(x.shape[-1], use_bias=False)(y), None


class ScannedGPT(nn.Module):
    vocabulary: int
    width: int
    heads: int
    inner: int
    depth: int
    length: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(ids) + nn.Embed(self.length, self.width)(jnp.arange(ids.shape[1]))
        blocks = nn.scan(
            nn.remat(ScannedBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        x, _ = blocks(self.heads, self.inner)(x, None)
        return embed.attend(nn.RMSNorm()(x))


def gpt_scanned(size: str) -> Case:
    """Layers stacked by `nn.scan` over `nn.remat`, learnt positions, tied embedding."""
    if size == TINY:
        settings, length = (24, 16, 2, 20, 2, 7), 7
    else:
        settings, length = (32000, 1024, 16, 2816, 24, 1024), 64
    return from_linen(ScannedGPT(*settings), tokens(2, length, vocabulary=settings[0]))


class RelativeBias(nn.Module):
    heads: int
    buckets: int = 8
    reach: int = 16
    is_causal: bool = False

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        apart = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        buckets, found = self.buckets, 0
        if self.is_causal:
            apart = -jnp.minimum(apart, 0)
        else:
            buckets //= 2
            found = (apart > 0) * buckets
            apart = jnp.abs(apart)
        exact = buckets // 2
        scale = (buckets - exact) / jnp.log(self.reach / exact)
        far = exact + (jnp.log(jnp.maximum(apart, 1) / exact) * scale).astype(int)
        found = found + jnp.where(apart < exact, apart, jnp.minimum(far, buckets - 1))
        values = nn.Embed(self.buckets, self.heads)(found)
        return values.transpose(2, 0, 1)[None]


class T5Attention(nn.Module):
    heads: int
    dim: int

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: Any) -> jax.Array:
        make = functools.partial(
            nn.DenseGeneral, (self.heads, self.dim), use_bias=False
        )
        q, k, v = make()(x), make()(memory), make()(memory)
        y = nn.dot_product_attention(q, k, v, bias=bias)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False)(y)


class T5Layer(nn.Module):
    heads: int
    dim: int
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array, bias: Any, memory: Any = None) -> jax.Array:
        norm = functools.partial(nn.RMSNorm)
        y = norm()(x)
        x = x + T5Attention(self.heads, self.dim)(y, y, bias)
        if memory is not None:
            x = x + T5Attention(self.heads, self.dim)(norm()(x), memory, None)
        y = norm()(x)
        y = nn.gelu(nn.Dense(self.inner, use_bias=False)(y)) * nn.Dense(
            self.inner, use_bias=False
        )(y)
        return x + nn.Dense(x.shape[-1], use_bias=False)(y)


class T5(nn.Module):
    vocabulary: int
    width: int
    heads: int
    dim: int
    inner: int
    depth: int

    @nn.compact
    def __call__(self, ids: jax.Array, targets: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width)
        s, t = ids.shape[1], targets.shape[1]
        bias = RelativeBias(self.heads)(s, s)
        x = embed(ids)
        for _ in range(self.depth):
            x = T5Layer(self.heads, self.dim, self.inner)(x, bias)
        memory = nn.RMSNorm()(x)
        mask = jnp.where(jnp.tril(jnp.ones((t, t), bool)), 0.0, -1e10)
        bias = RelativeBias(self.heads, is_causal=True)(t, t) + mask
        x = embed(targets)
        for _ in range(self.depth):
            x = T5Layer(self.heads, self.dim, self.inner)(x, bias, memory)
        x = nn.RMSNorm()(x) * self.width**-0.5
        return embed.attend(x)


def t5(size: str) -> Case:
    """Encoder and decoder, biases from a table of buckets, gated layers, tied."""
    settings = (24, 16, 2, 6, 20, 2) if size == TINY else (32128, 768, 12, 64, 2048, 12)
    ids = [tokens(2, length, vocabulary=settings[0]) for length in (7, 5)]
    return from_linen(T5(*settings), *ids)


class DropoutNet(nn.Module):
    widths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Conv(width, (3, 3), strides=2)(x))
            x = nn.Dropout(0.3, deterministic=False)(x, rng=jax.random.fold_in(key, i))
        x = nn.relu(nn.Dense(self.widths[-1])(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=False)(x, rng=key)
        return nn.Dense(self.classes)(x)


def dropout(size: str) -> Case:
    """Training with dropout: the noise has the shape of the channels."""
    is_tiny = size == TINY
    module = DropoutNet((8, 12), 4) if is_tiny else DropoutNet((64, 128, 256), 1000)
    side = 8 if is_tiny else 64
    return from_linen(module, images(2, side, side, 3), jax.random.PRNGKey(0))
