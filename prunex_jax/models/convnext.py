"""ConvNeXt: depthwise convolutions and MLPs that add to a stream, with layer norm.

References:
  Liu et al., A ConvNet for the 2020s, 2022, arXiv:2201.03545.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from prunex_jax.models.base import Model
from prunex_jax.models.layers import Convolution, convolved, mean_over_space
from prunex_jax.models.own import nnx_model
from prunex_jax.models.resnet import Stem as StemKind
from prunex_jax.models.resnet import scaled
from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.stream import (
    LayerNorm,
    Mlp,
    Patches,
    Projection,
    drop_path,
    drop_rates,
    dropped,
    like_last,
    through,
    weights,
)

_LAYERS, _WIDTHS = (3, 3, 9, 3), (96, 192, 384, 768)
_MLP_RATIO = 4
_LAYER_SCALE = 1e-6
_KERNEL = 7
_STEM_PATCH = {"cifar": 2, "imagenet": 4}


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """Widths of the blocks between two halvings of the map."""

    layers: int  # Blocks.
    width: int  # Of the stream.
    hidden: int  # Of the MLPs.


@dataclasses.dataclass(frozen=True)
class ConvNextSpec:
    """Widths and form of a ConvNeXt.

    Attributes:
      patch: Side of a patch of the stem, in pixels.
      stages: Its stages; each but the first halves the map.
      drop_path: Rate of stochastic depth at the last block; see `stream.drop_rates`.
      convolution: `direct`, or `chunked`: depthwise convolutions as sums of shifted
        maps, which is the same up to rounding; XLA on CPU does them many times faster.
      dtype: float32 or bfloat16, for activations.
      recomputes: As of `stream.through`.
    """

    patch: int
    stages: tuple[StageSpec, ...]
    drop_path: float = 0.0
    convolution: Convolution = "direct"
    dtype: str = "float32"
    recomputes: bool = False

    @property
    def smallest_side(self) -> int:
        """Height and width that images must at least have."""
        return self.patch * 2 ** (len(self.stages) - 1)


def make_convnext_spec(
    config: ModelConfig, stem: StemKind, convolution: Convolution
) -> ConvNextSpec:
    """Writes down the widths of a ConvNeXt-T.

    `config.width` multiplies widths; results are rounded, and at least one.

    Args:
      config: `convnext`, `width` and `recompute`.
      stem: `cifar` or `imagenet`: patches of 2 or 4 pixels.
      convolution: As of `ConvNextSpec`.
    Example:
      >>> make_convnext_spec(ModelConfig(width=0.5), 'cifar', 'direct').stages[0]
      StageSpec(layers=3, width=48, hidden=192)
    """
    stages = tuple(
        StageSpec(
            layers,
            scaled(width, config.width),
            scaled(_MLP_RATIO * width, config.width),
        )
        for layers, width in zip(_LAYERS, _WIDTHS, strict=True)
    )
    rate = config.convnext.drop_path
    return ConvNextSpec(
        _STEM_PATCH[stem],
        stages,
        rate,
        convolution,
        recomputes=config.recompute == "blocks",
    )


def make_convnext(
    name: str,
    spec: ConvNextSpec,
    dtype: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> Model:
    """Builds the network of a specification; arguments as of `resnet.make_resnet`.

    Example:
      >>> spec = make_convnext_spec(ModelConfig(width=0.5), 'cifar', 'direct')
      >>> model = make_convnext('half', spec, 'float32', (32, 32, 3), 10)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['stages']['0']['blocks']['0']['depthwise']['kernel'].shape
      (7, 7, 1, 48)
    """

    def make(dtype: str, rngs: nnx.Rngs) -> nnx.Module:
        typed = dataclasses.replace(spec, dtype=dtype)
        return ConvNext(typed, image_shape[-1], num_classes, rngs)

    example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return nnx_model(name, make, dtype, example)


class Depthwise(nnx.Module):
    """A 7x7 convolution of every channel by itself, padded so that the size stays.

    The kernel is float32[7, 7, 1, channels].
    """

    def __init__(self, channels: int, spec: ConvNextSpec, rngs: nnx.Rngs):
        self.kernel = weights(rngs, _KERNEL, _KERNEL, 1, channels)
        self.bias = nnx.Param(jnp.zeros(channels))
        self.convolution, self.dtype = spec.convolution, spec.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c] to dtype[n, h, w, c]."""
        kernel = self.kernel[...].astype(self.dtype)
        x = x.astype(self.dtype)
        if self.convolution == "chunked":
            y = _shifted(x, kernel)
        else:
            y = convolved(x, kernel, stride=1, groups=x.shape[-1])
        return y + like_last(self.bias[...].astype(self.dtype), y)


class Block(nnx.Module):
    """Depthwise convolution, layer norm and MLP, scaled and added to the stream."""

    def __init__(
        self, stage: StageSpec, rate: float, spec: ConvNextSpec, rngs: nnx.Rngs
    ):
        self.depthwise = Depthwise(stage.width, spec, rngs)
        self.norm = LayerNorm(stage.width)
        self.mlp = Mlp(stage.width, stage.hidden, rngs=rngs, dtype=spec.dtype)
        self.layer_scale = nnx.Param(jnp.full(stage.width, _LAYER_SCALE))
        self.drop = drop_path(rate, 4, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream behind this block."""
        y = self.mlp(self.norm(self.depthwise(x)))
        y = y * like_last(self.layer_scale[...].astype(y.dtype), y)
        return x + dropped(y, self.drop)


class Halving(nnx.Module):
    """Layer norm, and patches of two pixels, which are the stream of the next stage."""

    def __init__(self, c_in: int, c_out: int, spec: ConvNextSpec, rngs: nnx.Rngs):
        self.norm = LayerNorm(c_in)
        self.patches = Patches(2, c_in, c_out, rngs=rngs, dtype=spec.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c_in] to dtype[n, h // 2, w // 2, c_out]."""
        return self.patches(self.norm(x))


class Stem(nnx.Module):
    """Patches of the image, and layer norm."""

    def __init__(self, c_in: int, c_out: int, spec: ConvNextSpec, rngs: nnx.Rngs):
        self.patches = Patches(spec.patch, c_in, c_out, rngs=rngs, dtype=spec.dtype)
        self.norm = LayerNorm(c_out)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images float[n, h, w, c_in] to the stream."""
        return self.norm(self.patches(x))


class Stage(nnx.Module):
    """What comes before the blocks of a map's size, and the blocks."""

    def __init__(
        self,
        before: Callable[[jax.Array], jax.Array],
        stage: StageSpec,
        rates: tuple[float, ...],
        spec: ConvNextSpec,
        rngs: nnx.Rngs,
    ):
        self.before, self.recomputes = before, spec.recomputes
        self.blocks = nnx.List([Block(stage, rate, spec, rngs) for rate in rates])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream behind this stage."""
        x = self.before(x)
        return through(self.blocks, x, self.recomputes)


class ConvNext(nnx.Module):
    """Images float[n, h, w, c] -> logits float32[n, num_classes].

    Example:
      >>> spec = ConvNextSpec(2, (StageSpec(1, 8, 16), StageSpec(1, 12, 24)))
      >>> ConvNext(spec, 3, 10, nnx.Rngs(0))(jnp.zeros((2, 8, 8, 3))).shape
      (2, 10)
    """

    def __init__(self, spec: ConvNextSpec, c_in: int, num_classes: int, rngs: nnx.Rngs):
        rates = iter(drop_rates(spec.drop_path, sum(s.layers for s in spec.stages)))
        stages: list[Stage] = []
        width = c_in
        for index, stage in enumerate(spec.stages):
            own = tuple(next(rates) for _ in range(stage.layers))
            before = (Halving if index else Stem)(width, stage.width, spec, rngs)
            stages.append(Stage(before, stage, own, spec, rngs))
            width = stage.width
        self.stages = nnx.List(stages)
        self.norm = LayerNorm(width)
        self.head = Projection((width,), (num_classes,), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of every image alone."""
        x = images
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(mean_over_space(x)))


def _shifted(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution of every channel, as one product for each entry of its kernel."""
    side = kernel.shape[0] // 2
    _, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (side, side), (side, side), (0, 0)))
    total = jnp.zeros_like(x)
    for row in range(kernel.shape[0]):
        for column in range(kernel.shape[1]):
            moved = padded[:, row : row + height, column : column + width]
            total = total + moved * like_last(kernel[row, column, 0], moved)
    return total
