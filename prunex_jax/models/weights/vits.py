"""Vision transformers of timm and of torchvision.

Queries, keys and values of a block lie in one tensor, one below the other. Positions
for another number of patches are interpolated on their grid, as timm does.

References:
  timm, vision_transformer.py and layers/pos_embed.py; torchvision,
  models/vision_transformer.py.
"""

import math

import jax
import numpy as np

from prunex_jax.models.weights.table import (
    CONV,
    FROM_HEADS,
    TO_HEADS,
    Layout,
    Row,
    Shape,
    dense_rows,
    norm_rows,
)

_PARTS = ("query", "key", "value")
_BLOCK = "blocks/{b}"


def resized_positions(positions: np.ndarray, wanted: Shape) -> np.ndarray | None:
    """Interpolates positions of a square grid of patches for another square grid.

    It is bicubic, with antialiasing. One position that belongs to no patch comes first,
    if there is one more than a square number. None if a grid is not square, or the
    width is another one.

    Example:
      >>> resized_positions(np.ones((1, 5, 3), np.float32), (1, 17, 3)).shape
      (1, 17, 3)
    """
    if len(wanted) != 3 or positions.shape[::2] != wanted[::2]:
        return None
    for first in (0, 1):
        side, new = (_side(count - first) for count in (positions.shape[1], wanted[1]))
        if side and new:
            grid = positions[0, first:].astype(np.float32).reshape(side, side, -1)
            made = jax.image.resize(grid, (new, new, wanted[2]), "cubic")
            flat = np.asarray(made).reshape(1, new * new, -1)
            return np.concatenate([positions[:, :first], flat], axis=1)
    return None


def _side(count: int) -> int:
    """Side of a square of so many patches; 0 if there is none."""
    side = math.isqrt(max(count, 0))
    return side if side**2 == count else 0


def _attention(fused: str, out: str) -> tuple[Row, ...]:
    """Rows of an attention; `fused` has `{}` where weight or bias stands."""
    heads = [f"{_BLOCK}/attention/{part}" for part in _PARTS]
    return (
        Row(fused.format("weight"), tuple(f"{x}/kernel" for x in heads), TO_HEADS),
        Row(fused.format("bias"), tuple(f"{x}/bias" for x in heads), ((0, 1),)),
        Row(f"{out}.weight", f"{_BLOCK}/attention/out/kernel", FROM_HEADS),
        Row(f"{out}.bias", f"{_BLOCK}/attention/out/bias"),
    )


def _stem(token: str, positions: str, patches: str) -> tuple[Row, ...]:
    return (
        Row(token, "token", ((), (), (0,))),
        Row(positions, "positions", ((), (0,), (1,)), resize=resized_positions),
        Row(f"{patches}.weight", "patches/kernel", CONV),
        Row(f"{patches}.bias", "patches/bias"),
    )


TIMM_VIT = Layout(
    name="timm ViT",
    marks=("pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"),
    rows=(
        *_stem("cls_token", "pos_embed", "patch_embed.proj"),
        *norm_rows("blocks.{b}.norm1", f"{_BLOCK}/attention_norm"),
        *_attention("blocks.{{b}}.attn.qkv.{}", "blocks.{b}.attn.proj"),
        *norm_rows("blocks.{b}.norm2", f"{_BLOCK}/mlp_norm"),
        *dense_rows("blocks.{b}.mlp.fc1", f"{_BLOCK}/mlp/up"),
        *dense_rows("blocks.{b}.mlp.fc2", f"{_BLOCK}/mlp/down"),
        *norm_rows("norm", "norm"),
        *dense_rows("head", "head", is_head=True),
    ),
)
_LAYER = "encoder.layers.encoder_layer_{b}"
TORCHVISION_VIT = Layout(
    name="torchvision ViT",
    marks=("class_token", "conv_proj.weight", "encoder.pos_embedding"),
    # As its first weights call them.
    renamed=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
    rows=(
        *_stem("class_token", "encoder.pos_embedding", "conv_proj"),
        *norm_rows(f"{_LAYER}.ln_1", f"{_BLOCK}/attention_norm"),
        *_attention(
            "encoder.layers.encoder_layer_{{b}}.self_attention.in_proj_{}",
            f"{_LAYER}.self_attention.out_proj",
        ),
        *norm_rows(f"{_LAYER}.ln_2", f"{_BLOCK}/mlp_norm"),
        *dense_rows(f"{_LAYER}.mlp.0", f"{_BLOCK}/mlp/up"),
        *dense_rows(f"{_LAYER}.mlp.3", f"{_BLOCK}/mlp/down"),
        *norm_rows("encoder.ln", "norm"),
        *dense_rows("heads.head", "head", is_head=True),
    ),
)
