"""Residual networks with every width explicit.

The CIFAR form has three stages of basic blocks, the ImageNet form four, basic or
bottleneck, each behind a small or a large stem. Where a block changes the shape of the
stream, its shortcut is a 1x1 convolution with batch norm, which unlike padding with
zeros lets every stage keep its own channels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
from flax import nnx

from prunex_jax.models.base import Model
from prunex_jax.models.layers import (
    BatchNorm,
    Conv,
    Form,
    dense,
    image_model,
    mean_over_space,
    relu,
)

Stem = Literal["cifar", "imagenet"]


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Widths of one residual block.

    Attributes:
      inner: Widths inside the block: one for a basic block (two 3x3 convolutions), two
        for a bottleneck (1x1, 3x3, 1x1).
      out: Width of the stream behind the block.
      stride: Stride of the first 3x3 convolution, and of the shortcut.
      has_projection: Whether the shortcut is a 1x1 convolution with batch norm.
    """

    inner: tuple[int, ...]
    out: int
    stride: int = 1
    has_projection: bool = False


@dataclasses.dataclass(frozen=True)
class ResNetSpec:
    """Widths of a residual network.

    Attributes:
      stem: `cifar`, one 3x3 convolution, or `imagenet`, 7x7 with stride 2 and 3x3
        maxima with stride 2.
      stem_width: Width of the stream behind the stem.
      blocks: The blocks, in order.
    """

    stem: Stem
    stem_width: int
    blocks: tuple[BlockSpec, ...]


def make_resnet_spec(
    stem: Stem,
    *,
    stage_blocks: Sequence[int],
    stage_widths: Sequence[int],
    expansion: int = 1,
    inner_factor: int = 1,
    scale: float = 1.0,
) -> ResNetSpec:
    """Writes down the widths of a regular residual network.

    Args:
      stem: `cifar` or `imagenet`.
      stage_blocks: Number of blocks per stage; stages but the first halve the map.
      stage_widths: Base width per stage; the first is also the width of the stem.
      expansion: Stream width over base width; 1 makes basic blocks, 4 bottlenecks.
      inner_factor: Inner width of bottlenecks over base width; 2 for the wide form.
      scale: Multiplies every width; see `scaled`.
    Example:
      >>> spec = make_resnet_spec('cifar', stage_blocks=(1, 1), stage_widths=(8, 16))
      >>> spec.blocks[1]
      BlockSpec(inner=(16,), out=16, stride=2, has_projection=True)
    """
    stem_width = scaled(stage_widths[0], scale)
    blocks: list[BlockSpec] = []
    for stage, (count, width) in enumerate(
        zip(stage_blocks, stage_widths, strict=True)
    ):
        out = scaled(width * expansion, scale)
        inner = (scaled(width * inner_factor, scale),) * (1 if expansion == 1 else 2)
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            # By place and not by width, so that rounding never moves a projection.
            projects = index == 0 and (stage > 0 or expansion > 1)
            blocks.append(BlockSpec(inner, out, stride, projects))
    return ResNetSpec(stem, stem_width, tuple(blocks))


def scaled(width: int, scale: float, multiple: int = 1) -> int:
    """Multiplies a width, rounds to the nearest multiple, and keeps at least one.

    Example:
      >>> scaled(64, 0.25), scaled(3, 0.1), scaled(7, 0.5, multiple=2)
      (16, 1, 4)
    """
    return max(1, round(width * scale / multiple)) * multiple


def make_resnet(
    name: str,
    spec: ResNetSpec,
    form: Form,
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> Model:
    """Builds the network of a specification.

    Args:
      name: What people call it.
      spec: Its widths.
      form: How its layers compute.
      image_shape: Height, width and channels of one image.
      num_classes: Number of logits.
    Example:
      >>> spec = make_resnet_spec('cifar', stage_blocks=(1, 1), stage_widths=(8, 16))
      >>> model = make_resnet('tiny', spec, Form(), (8, 8, 1), 10)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['blocks']['1']['shortcut']['conv']['kernel'].shape
      (1, 1, 8, 16)
    """

    def make(form: Form, rngs: nnx.Rngs) -> nnx.Module:
        return ResNet(spec, form, image_shape[-1], num_classes, rngs)

    return image_model(name, make, form, image_shape)


class _Stem(nnx.Module):
    """The first convolution, and for large images the first maxima."""

    def __init__(self, kind: Stem, c_in: int, c_out: int, form: Form, rngs: nnx.Rngs):
        self.is_large = kind == "imagenet"
        size, stride = (7, 2) if self.is_large else (3, 1)
        self.conv = Conv(c_in, c_out, size, form, stride=stride, rngs=rngs)
        self.norm = BatchNorm(c_out, form)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = relu(self.norm(self.conv(x)))
        return nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))) if self.is_large else x


class _Shortcut(nnx.Module):
    """A 1x1 convolution with batch norm, where a block changes the stream."""

    def __init__(self, c_in: int, spec: BlockSpec, form: Form, rngs: nnx.Rngs):
        self.conv = Conv(c_in, spec.out, 1, form, stride=spec.stride, rngs=rngs)
        self.norm = BatchNorm(spec.out, form)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class _Block(nnx.Module):
    """Convolutions with batch norm beside a shortcut.

    Two of 3x3 in a basic block; 1x1, 3x3 and 1x1 in a bottleneck. The first of 3x3
    carries the stride.
    """

    def __init__(self, c_in: int, spec: BlockSpec, form: Form, rngs: nnx.Rngs):
        first, *rest = spec.inner
        is_basic = not rest
        size, stride = (3, spec.stride) if is_basic else (1, 1)
        self.conv1 = Conv(c_in, first, size, form, stride=stride, rngs=rngs)
        self.norm1 = BatchNorm(first, form)
        second, stride = (spec.out, 1) if is_basic else (rest[0], spec.stride)
        self.conv2 = Conv(first, second, 3, form, stride=stride, rngs=rngs)
        self.norm2 = BatchNorm(second, form)
        self.conv3 = None if is_basic else Conv(second, spec.out, 1, form, rngs=rngs)
        self.norm3 = None if is_basic else BatchNorm(spec.out, form)
        projects = spec.has_projection
        self.shortcut = _Shortcut(c_in, spec, form, rngs) if projects else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.conv3 is not None and self.norm3 is not None:
            y = self.norm3(self.conv3(relu(y)))
        side = x if self.shortcut is None else self.shortcut(x)
        return relu(y + side)


class ResNet(nnx.Module):
    """Stem, blocks, mean over space, and a dense layer.

    References:
      He et al., Deep Residual Learning for Image Recognition, 2015, arXiv:1512.03385.
      Zagoruyko and Komodakis, Wide Residual Networks, 2016, arXiv:1605.07146.
    Differs from:
      The paper: bottlenecks stride in the 3x3 convolution, as is now usual, and CIFAR
      networks project their shortcuts instead of padding them with zeros.
    """

    def __init__(
        self, spec: ResNetSpec, form: Form, c_in: int, num_classes: int, rngs: nnx.Rngs
    ):
        self.stem = _Stem(spec.stem, c_in, spec.stem_width, form, rngs)
        streams = (spec.stem_width, *(block.out for block in spec.blocks))
        self.blocks = nnx.List(
            [
                _Block(stream, block, form, rngs)
                for stream, block in zip(streams, spec.blocks, strict=False)
            ]
        )
        self.classifier = dense(streams[-1], num_classes, gain=1 / 3, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c_in] to logits, float32[n, num_classes]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.classifier(mean_over_space(x))
