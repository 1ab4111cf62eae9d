"""Networks in Flax NNX: of this project, and as that community writes them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .case import TINY, Case, images, tokens
from .frameworks import from_nnx


def _of_this_project(
    name: str, size: str, is_training: bool = False, norm: str = "layer"
) -> Case:
    from prunex_jax.models import make_model
    from prunex_jax.models.settings import ModelConfig, VitConfig

    is_tiny = size == TINY
    side, classes = (32, 4) if is_tiny else (224, 1000)
    config = ModelConfig(name=name, width=0.125 if is_tiny else 1.0)
    if name.startswith("vit"):
        form = {"patch": 8, "layers": 2, "heads": 24} if is_tiny else {}
        config = dataclasses.replace(config, vit=VitConfig(norm=norm, **form))
    model = make_model(config, (side, side, 3), classes)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    apply = model.apply_train if is_training else model.apply
    return Case(apply, params, (images(2, side, side, 3),), statistics, is_training)


def _of_text(name: str, size: str) -> Case:
    from prunex_jax.models import make_language_model
    from prunex_jax.models.settings import ModelConfig

    vocabulary, length = 256, 8 if size == TINY else 128
    config = ModelConfig(name=name, width=0.25 if size == TINY else 1.0)
    model = make_language_model(config, vocabulary, length)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    inputs = (tokens(2, length, vocabulary=vocabulary),)
    return Case(model.apply, params, inputs, statistics)


class WideBlock(nnx.Module):
    def __init__(self, before: int, width: int, stride: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.BatchNorm(before, rngs=rngs)
        self.conv1 = nnx.Conv(before, width, (3, 3), stride, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.shortcut = (
            nnx.Conv(before, width, (1, 1), stride, use_bias=False, rngs=rngs)
            if before != width
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(x))
        if self.shortcut is not None:
            x = self.shortcut(y)
        return x + self.conv2(nnx.relu(self.norm2(self.conv1(y))))


class WideResNet(nnx.Module):
    def __init__(
        self, depth: int, widths: tuple[int, ...], classes: int, rngs: nnx.Rngs
    ) -> None:
        self.stem = nnx.Conv(3, widths[0], (3, 3), use_bias=False, rngs=rngs)
        blocks, before = [], widths[0]
        for stage, width in enumerate(widths[1:]):
            for i in range((depth - 4) // 6):
                stride = 2 if stage and i == 0 else 1
                blocks.append(WideBlock(before, width, stride, rngs))
                before = width
        self.blocks = nnx.List(blocks)
        self.norm = nnx.BatchNorm(before, rngs=rngs)
        self.head = nnx.Linear(before, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.relu(self.norm(x)).mean((1, 2)))


def _wide_resnet(size: str, is_training: bool) -> Case:
    settings = (
        (16, (8, 12, 16, 20), 4) if size == TINY else (28, (16, 160, 320, 640), 10)
    )
    side = 16 if size == TINY else 32
    return from_nnx(
        lambda rngs: WideResNet(*settings, rngs=rngs),
        images(4, side, side, 3),
        is_training=is_training,
    )


def wide_resnet(size: str) -> Case:
    return _wide_resnet(size, False)


def wide_resnet_training(size: str) -> Case:
    return _wide_resnet(size, True)


class InvertedResidual(nnx.Module):
    def __init__(
        self, before: int, out: int, stride: int, expand: int, rngs: nnx.Rngs
    ) -> None:
        inner = before * expand

        def unit(a: int, b: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
            conv = nnx.Conv(
                a,
                b,
                (kernel, kernel),
                stride,
                feature_group_count=groups,
                use_bias=False,
                rngs=rngs,
            )
            return nnx.Sequential(conv, nnx.BatchNorm(b, rngs=rngs))

        self.expand = unit(before, inner, 1) if expand > 1 else None
        self.depthwise = unit(inner, inner, 3, stride, inner)
        self.project = unit(inner, out, 1)
        self.is_residual = stride == 1 and before == out

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x if self.expand is None else nnx.relu6(self.expand(x))
        y = self.project(nnx.relu6(self.depthwise(y)))
        return x + y if self.is_residual else y


class MobileNetV2(nnx.Module):
    def __init__(
        self,
        rows: tuple[tuple[int, int, int, int], ...],
        stem: int,
        last: int,
        classes: int,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = nnx.Conv(3, stem, (3, 3), 2, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(stem, rngs=rngs)
        blocks, before = [], stem
        for expand, out, count, first in rows:
            for i in range(count):
                stride = first if i == 0 else 1
                blocks.append(InvertedResidual(before, out, stride, expand, rngs))
                before = out
        self.blocks = nnx.List(blocks)
        self.last = nnx.Conv(before, last, (1, 1), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(last, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(last, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu6(self.norm1(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = nnx.relu6(self.norm2(self.last(x))).mean((1, 2))
        return self.head(self.dropout(x))


def mobilenet_v2(size: str) -> Case:
    rows = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    settings: tuple[Any, ...] = (rows, 32, 1280, 1000)
    if size == TINY:
        settings = (((1, 8, 1, 1), (3, 12, 2, 2)), 8, 24, 4)
    side = 16 if size == TINY else 224
    return from_nnx(
        lambda rngs: MobileNetV2(*settings, rngs=rngs), images(2, side, side, 3)
    )


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, inner: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=heads, in_features=width, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, inner, rngs=rngs)
        self.down = nnx.Linear(inner, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: Any = None) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(
        self,
        side: int,
        patch: int,
        width: int,
        heads: int,
        inner: int,
        depth: int,
        classes: int,
        rngs: nnx.Rngs,
    ) -> None:
        count = (side // patch) ** 2
        self.embed = nnx.Conv(
            3, width, (patch, patch), patch, padding="VALID", rngs=rngs
        )
        self.places = nnx.Param(jnp.zeros((1, count, width)))
        self.blocks = nnx.List([Block(width, heads, inner, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.places[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def vit(size: str) -> Case:
    settings = (224, 16, 384, 6, 1536, 12, 1000)
    if size == TINY:
        settings = (16, 4, 16, 2, 24, 2, 4)
    side = settings[0]
    return from_nnx(lambda rngs: ViT(*settings, rngs=rngs), images(2, side, side, 3))


class ScannedGPT(nnx.Module):
    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        inner: int,
        depth: int,
        length: int,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(width, heads, inner, rngs)

        self.blocks = make(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(ids)
        x = self.embed(ids) + self.places(jnp.arange(ids.shape[1]))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x: jax.Array, block: Block) -> jax.Array:
            return block(x, mask)

        return self.embed.attend(self.norm(forward(x, self.blocks)))


def gpt_scanned(size: str) -> Case:
    """GPT-2 with layers made by `nnx.vmap` and run by `nnx.scan`; tied embedding."""
    settings, length = (50257, 768, 12, 3072, 12, 1024), 64
    if size == TINY:
        settings, length = (24, 16, 2, 20, 2, 7), 7
    return from_nnx(
        lambda rngs: ScannedGPT(*settings, rngs=rngs),
        tokens(2, length, vocabulary=settings[0]),
    )


class UNet(nnx.Module):
    def __init__(self, widths: tuple[int, ...], classes: int, rngs: nnx.Rngs) -> None:
        def twice(a: int, b: int) -> Any:
            return nnx.Sequential(
                nnx.Conv(a, b, (3, 3), use_bias=False, rngs=rngs),
                nnx.BatchNorm(b, rngs=rngs),
                nnx.relu,
                nnx.Conv(b, b, (3, 3), use_bias=False, rngs=rngs),
                nnx.BatchNorm(b, rngs=rngs),
                nnx.relu,
            )

        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nnx.List([twice(a, b) for a, b in pairs])
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nnx.List(
            [nnx.ConvTranspose(a, b, (2, 2), (2, 2), rngs=rngs) for a, b in pairs]
        )
        self.merge = nnx.List([twice(2 * b, b) for _, b in pairs])
        self.head = nnx.Conv(widths[0], classes, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(jnp.concatenate([skips.pop(), up(x)], axis=-1))
        return self.head(x)


def unet(size: str) -> Case:
    """With batch norm, whose statistics are cut along."""
    widths = (6, 8, 12) if size == TINY else (64, 128, 256, 512, 1024)
    side = 16 if size == TINY else 256
    return from_nnx(lambda rngs: UNet(widths, 2, rngs), images(2, side, side, 3))


class LSTM(nnx.Module):
    def __init__(self, vocabulary: int, width: int, inner: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.run = nnx.RNN(nnx.OptimizedLSTMCell(width, inner, rngs=rngs))
        self.head = nnx.Linear(inner, vocabulary, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        start = self.run.cell.initialize_carry((x.shape[0], x.shape[2]), nnx.Rngs(0))
        return self.head(self.run(x, initial_carry=start))


def lstm(size: str) -> Case:
    settings = (20, 10, 12) if size == TINY else (10000, 650, 650)
    length = 6 if size == TINY else 35
    return from_nnx(
        lambda rngs: LSTM(*settings, rngs=rngs),
        tokens(2, length, vocabulary=settings[0]),
    )


def resnet18(size: str) -> Case:
    return _of_this_project("resnet18", size, False)


def resnet50_training(size: str) -> Case:
    return _of_this_project("resnet50", size, True)


def vgg16(size: str) -> Case:
    return _of_this_project("vgg16", size, False)


def vit_ti(size: str) -> Case:
    return _of_this_project("vit_ti", size)


def vit_ti_rms(size: str) -> Case:
    return _of_this_project("vit_ti", size, norm="rms")


def vit_s(size: str) -> Case:
    return _of_this_project("vit_s", size)


def vit_b(size: str) -> Case:
    return _of_this_project("vit_b", size)


def convnext_t(size: str) -> Case:
    return _of_this_project("convnext_t", size)


def gpt(size: str) -> Case:
    return _of_text("gpt", size)


def gpt2(size: str) -> Case:
    return _of_text("gpt2", size)


def bert(size: str) -> Case:
    return _of_text("bert", size)
