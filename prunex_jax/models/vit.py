"""Vision transformers: patches of an image as tokens, and blocks of attention.

References:
  Dosovitskiy et al., An image is worth 16x16 words, 2020, arXiv:2010.11929.
  Touvron et al., Training data-efficient image transformers, 2020, arXiv:2012.12877
    (widths of ViT-Ti and ViT-S).
  Beyer et al., Better plain ViT baselines for ImageNet-1k, 2022, arXiv:2205.01580
    (mean pooling, sines and cosines as positions).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prunex_jax.base.errors import UserError
from prunex_jax.models.base import Model
from prunex_jax.models.own import nnx_model
from prunex_jax.models.resnet import scaled
from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.stream import (
    Mlp,
    Norm,
    Patches,
    Projection,
    drop_path,
    drop_rates,
    dropped,
    like_last,
    make_norm,
    through,
    weights,
)

# Widths of the stream, and heads, of each name; heads have 64 features, the MLP is four
# times as wide as the stream, and there are 12 blocks.
VITS = {"vit_ti": (192, 3), "vit_s": (384, 6), "vit_b": (768, 12)}
_LAYERS, _HEAD_WIDTH, _MLP_RATIO = 12, 64, 4
_TEMPERATURE = 10_000.0
# Standard deviation of the class token, which then starts near zero.
_TOKEN_SPREAD = 1e-6


@dataclasses.dataclass(frozen=True)
class VitSpec:
    """Widths and form of a vision transformer.

    Attributes:
      patch: Side of a patch, in pixels.
      layers: Blocks of attention and MLP.
      width: Of the stream.
      heads: Of attention.
      head_width: Features of a head.
      hidden: Width of the MLP.
      positions: `learned`, or `sincos`: sines and cosines that stay as they are.
      pooling: What is classified: a class `token`, or the `mean` of all.
      norm: `layer` or `rms`.
      drop_path: Rate of stochastic depth at the last block; see `stream.drop_rates`.
      dtype: float32 or bfloat16, for activations.
      recomputes: As of `stream.through`.
    """

    patch: int
    layers: int
    width: int
    heads: int
    head_width: int
    hidden: int
    positions: Literal["learned", "sincos"] = "learned"
    pooling: Literal["token", "mean"] = "token"
    norm: Norm = "layer"
    drop_path: float = 0.0
    dtype: str = "float32"
    recomputes: bool = False


def make_vit(
    config: ModelConfig, image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Builds the vision transformer that the settings name.

    Args:
      config: `vit`, whose widths `width` multiplies; results are rounded, and at least
        one.
      image_shape: Height, width and channels of one image.
      num_classes: Number of logits.
    Raises:
      UserError: Patches do not fill the images.
    Example:
      >>> model = make_vit(ModelConfig(name='vit_ti'), (224, 224, 3), 1000)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['blocks']['0']['attention']['query']['kernel'].shape
      (192, 3, 64)
    """
    vit = config.vit
    if any(side % vit.patch for side in image_shape[:2]):
        raise UserError(
            f"config.model.vit.patch={vit.patch} does not divide the sides of images, "
            f"{image_shape[0]}x{image_shape[1]}; choose one that does, or set "
            "config.data.image_size"
        )
    width, heads = VITS[config.name]
    width = vit.width or width
    spec = VitSpec(
        patch=vit.patch,
        layers=vit.layers or _LAYERS,
        width=scaled(width, config.width),
        heads=scaled(vit.heads or heads, config.width),
        head_width=scaled(vit.head_width or _HEAD_WIDTH, config.width),
        hidden=scaled(vit.hidden or _MLP_RATIO * width, config.width),
        positions=vit.positions,
        pooling=vit.pooling,
        norm=vit.norm,
        drop_path=vit.drop_path,
        recomputes=config.recompute == "blocks",
    )

    def make(dtype: str) -> Callable[[nnx.Rngs], nnx.Module]:
        typed = dataclasses.replace(spec, dtype=dtype)
        return lambda rngs: Vit(typed, image_shape, num_classes, rngs)

    example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return nnx_model(config.name, make, config.compute_dtype, example)


class Attention(nnx.Module):
    """Attention of all tokens to all, over float[batch, tokens, width]."""

    def __init__(self, spec: VitSpec, rngs: nnx.Rngs):
        stream, heads = (spec.width,), (spec.heads, spec.head_width)
        self.query = Projection(stream, heads, rngs=rngs, dtype=spec.dtype)
        self.key = Projection(stream, heads, rngs=rngs, dtype=spec.dtype)
        self.value = Projection(stream, heads, rngs=rngs, dtype=spec.dtype)
        self.out = Projection(heads, stream, rngs=rngs, dtype=spec.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What every token takes from all, as wide as the stream."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("bthe,bshe->bhts", query, key).astype(jnp.float32)
        shares = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1)
        return self.out(jnp.einsum("bhts,bshe->bthe", shares.astype(x.dtype), value))


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, spec: VitSpec, rate: float, rngs: nnx.Rngs):
        self.attention_norm = make_norm(spec.norm, spec.width)
        self.attention = Attention(spec, rngs)
        self.attention_drop = drop_path(rate, 3, rngs)
        self.mlp_norm = make_norm(spec.norm, spec.width)
        self.mlp = Mlp(spec.width, spec.hidden, rngs=rngs, dtype=spec.dtype)
        self.mlp_drop = drop_path(rate, 3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream behind this block."""
        x = x + dropped(self.attention(self.attention_norm(x)), self.attention_drop)
        return x + dropped(self.mlp(self.mlp_norm(x)), self.mlp_drop)


class Vit(nnx.Module):
    """Images float[batch, h, w, c] -> logits float32[batch, num_classes].

    Sines and cosines are a parameter as well, which has no gradient and does not decay,
    so that they are cut with the channels that they are added to.

    Example:
      >>> spec = VitSpec(4, layers=1, width=8, heads=2, head_width=4, hidden=12)
      >>> Vit(spec, (8, 8, 3), 10, nnx.Rngs(0))(jnp.zeros((2, 8, 8, 3))).shape
      (2, 10)
    """

    def __init__(
        self,
        spec: VitSpec,
        image_shape: tuple[int, int, int],
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        rows, columns = height // spec.patch, width // spec.patch
        self.patches = Patches(
            spec.patch, channels, spec.width, rngs=rngs, dtype=spec.dtype
        )
        has_token = spec.pooling == "token"
        self.token = _class_token(spec.width, rngs) if has_token else None
        count = rows * columns + has_token
        self.is_fixed = spec.positions == "sincos"
        if self.is_fixed:
            places = sines_and_cosines(rows, columns, spec.width)
            places = np.pad(places, ((count - len(places), 0), (0, 0)))
            self.positions = nnx.Param(jnp.asarray(places))
        else:
            self.positions = weights(rngs, count, spec.width)
        rates = drop_rates(spec.drop_path, spec.layers)
        self.blocks = nnx.List([Block(spec, rate, rngs) for rate in rates])
        self.norm = make_norm(spec.norm, spec.width)
        self.head = Projection((spec.width,), (num_classes,), rngs=rngs)
        self.dtype, self.recomputes = spec.dtype, spec.recomputes

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of every image alone."""
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.token is not None:
            token = self.token[...].astype(self.dtype)
            first = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([first, x], axis=1)
        places = self.positions[...]
        if self.is_fixed:
            places = jax.lax.stop_gradient(places)
        x = x + like_last(places.astype(self.dtype), x)
        x = through(self.blocks, x, self.recomputes)
        x = self.norm(x).astype(jnp.float32)
        return self.head(x[:, 0] if self.token is not None else jnp.mean(x, axis=1))


def _class_token(width: int, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    return nnx.Param(_TOKEN_SPREAD * jax.random.normal(rngs.params(), (width,)))


def sines_and_cosines(rows: int, columns: int, width: int) -> np.ndarray:
    """Positions on a grid as sines and cosines of growing wavelengths.

    Args:
      rows: Of the grid.
      columns: Of the grid.
      width: Features of a position; a quarter each are sines and cosines of the column
        and of the row, and what is left of the division by four is zero.
    Returns:
      float32[rows * columns, width], row by row.
    Example:
      >>> (100 * sines_and_cosines(1, 2, 4)).astype(int).tolist()
      [[0, 100, 0, 100], [84, 54, 0, 100]]
    """
    quarter = width // 4
    steps = np.arange(quarter) / max(quarter - 1, 1)
    row, column = np.mgrid[:rows, :columns].reshape(2, -1, 1) / _TEMPERATURE**steps
    parts = np.sin(column), np.cos(column), np.sin(row), np.cos(row)
    places = np.concatenate(parts, axis=1)
    rest = ((0, 0), (0, width - places.shape[1]))
    return np.pad(places, rest).astype(np.float32)
