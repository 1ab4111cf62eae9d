"""Vision transformers: patches of an image as tokens, and blocks of attention.

References:
  Dosovitskiy et al., An image is worth 16x16 words, 2020, arXiv:2010.11929.
  Touvron et al., Training data-efficient image transformers, 2020, arXiv:2012.12877
    (widths of ViT-Ti and ViT-S).
  Beyer et al., Better plain ViT baselines for ImageNet-1k, 2022, arXiv:2205.01580
    (mean pooling).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from prunex_jax.base.errors import UserError
from prunex_jax.models.base import Model
from prunex_jax.models.own import nnx_model
from prunex_jax.models.resnet import scaled
from prunex_jax.models.settings import ModelConfig, VitConfig
from prunex_jax.models.stream import (
    Mlp,
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
# Standard deviation of the class token, which then starts near zero.
_TOKEN_SPREAD = 1e-6


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
    full = dataclasses.replace(
        vit,
        layers=vit.layers or _LAYERS,
        width=scaled(width, config.width),
        heads=scaled(vit.heads or heads, config.width),
        head_width=scaled(vit.head_width or _HEAD_WIDTH, config.width),
        hidden=scaled(vit.hidden or _MLP_RATIO * width, config.width),
    )
    recomputes = config.recompute == "blocks"

    def make(dtype: str, rngs: nnx.Rngs) -> nnx.Module:
        return Vit(full, image_shape, num_classes, rngs, dtype, recomputes)

    example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return nnx_model(config.name, make, config.compute_dtype, example)


class Attention(nnx.Module):
    """Attention of all tokens to all, over float[batch, tokens, width]."""

    def __init__(self, vit: VitConfig, rngs: nnx.Rngs, dtype: str):
        stream, heads = (vit.width,), (vit.heads, vit.head_width)
        self.query = Projection(stream, heads, rngs=rngs, dtype=dtype)
        self.key = Projection(stream, heads, rngs=rngs, dtype=dtype)
        self.value = Projection(stream, heads, rngs=rngs, dtype=dtype)
        self.out = Projection(heads, stream, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What every token takes from all, as wide as the stream."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = jnp.einsum("bthe,bshe->bhts", query, key).astype(jnp.float32)
        shares = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1)
        return self.out(jnp.einsum("bhts,bshe->bthe", shares.astype(x.dtype), value))


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, vit: VitConfig, rate: float, rngs: nnx.Rngs, dtype: str):
        self.attention_norm = make_norm(vit.norm, vit.width)
        self.attention = Attention(vit, rngs, dtype)
        self.attention_drop = drop_path(rate, 3, rngs)
        self.mlp_norm = make_norm(vit.norm, vit.width)
        self.mlp = Mlp(vit.width, vit.hidden, rngs=rngs, dtype=dtype)
        self.mlp_drop = drop_path(rate, 3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream behind this block."""
        x = x + dropped(self.attention(self.attention_norm(x)), self.attention_drop)
        return x + dropped(self.mlp(self.mlp_norm(x)), self.mlp_drop)


class Vit(nnx.Module):
    """Images float[batch, h, w, c] -> logits float32[batch, num_classes].

    Args:
      vit: Its form, with all widths.
      image_shape: Height, width and channels of one image.
      num_classes: Number of logits.
      rngs: Where weights are drawn from.
      dtype: Type of activations.
      recomputes: As of `stream.through`.

    Example:
      >>> vit = VitConfig(4, layers=1, width=8, heads=2, head_width=4, hidden=12)
      >>> Vit(vit, (8, 8, 3), 10, nnx.Rngs(0))(jnp.zeros((2, 8, 8, 3))).shape
      (2, 10)
    """

    def __init__(
        self,
        vit: VitConfig,
        image_shape: tuple[int, int, int],
        num_classes: int,
        rngs: nnx.Rngs,
        dtype: str = "float32",
        recomputes: bool = False,
    ):
        height, width, channels = image_shape
        rows, columns = height // vit.patch, width // vit.patch
        self.patches = Patches(vit.patch, channels, vit.width, rngs=rngs, dtype=dtype)
        has_token = vit.pooling == "token"
        self.token = _class_token(vit.width, rngs) if has_token else None
        count = rows * columns + has_token
        self.positions = weights(rngs, count, vit.width)
        rates = drop_rates(vit.drop_path, vit.layers)
        self.blocks = nnx.List([Block(vit, rate, rngs, dtype) for rate in rates])
        self.norm = make_norm(vit.norm, vit.width)
        self.head = Projection((vit.width,), (num_classes,), rngs=rngs)
        self.dtype, self.recomputes = dtype, recomputes

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of every image alone."""
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.token is not None:
            token = self.token[...].astype(self.dtype)
            first = jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([first, x], axis=1)
        x = x + like_last(self.positions[...].astype(self.dtype), x)
        x = through(self.blocks, x, self.recomputes)
        x = self.norm(x).astype(jnp.float32)
        return self.head(x[:, 0] if self.token is not None else jnp.mean(x, axis=1))


def _class_token(width: int, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    return nnx.Param(_TOKEN_SPREAD * jax.random.normal(rngs.params(), (width,)))
