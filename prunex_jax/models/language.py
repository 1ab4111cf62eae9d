"""Builds the networks that read text, from the settings that name them."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_defaults, check_settings
from prunex_jax.models.base import Model
from prunex_jax.models.bert import Bert
from prunex_jax.models.gpt import Gpt
from prunex_jax.models.own import nnx_model
from prunex_jax.models.resnet import scaled
from prunex_jax.models.settings import BertConfig, GptConfig, ModelConfig
from prunex_jax.models.transformer import TransformerSpec

# Networks that predict the next token, and those that fill in what is masked.
NEXT_TOKEN = ("gpt", "gpt2")
MASKED_TOKEN = ("bert",)


def make_language_model(config: ModelConfig, vocabulary: int, length: int) -> Model:
    """Builds the network of text that the settings name.

    Args:
      config: `gpt` or `bert`, whose widths `width` multiplies; results are rounded, and
        at least one, and widths of heads are even for rotary positions.
      vocabulary: Number of tokens.
      length: Tokens of a sequence.
    Returns:
      A network of tokens int32[batch, length] with logits float32[batch, length,
      vocabulary].
    Raises:
      UserError: Widths do not fit, or a setting has no effect.
    Example:
      >>> config = ModelConfig(name='gpt', width=0.5)
      >>> model = make_language_model(config, 256, 16)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['blocks']['0']['attention']['query'].shape
      (64, 2, 16)
    """
    check_settings(config, "config.model")
    example = jax.ShapeDtypeStruct((1, length), jnp.int32)
    make: Callable[..., nnx.Module]
    if config.name in MASKED_TOKEN:
        spec = _bert_spec(config, config.bert, vocabulary, length)
        make = functools.partial(Bert, kinds=config.bert.kinds)
    else:
        spec = _gpt_spec(config, config.gpt, vocabulary, length)
        make = Gpt

    def make_in(dtype: str, rngs: nnx.Rngs) -> nnx.Module:
        return make(dataclasses.replace(spec, dtype=dtype), rngs)

    return nnx_model(config.name, make_in, spec.dtype, example)


def _gpt_spec(
    config: ModelConfig, gpt: GptConfig, vocabulary: int, length: int
) -> TransformerSpec:
    is_gpt2 = config.name == "gpt2"
    none = ("rotary_base" if is_gpt2 else "positions",)
    check_defaults("model.gpt", gpt, none, f"model {config.name}")
    if gpt.head_width % 2 and not is_gpt2:
        raise UserError(
            f"config.model.gpt.head_width={gpt.head_width} is odd, and positions turn "
            "pairs of features; make it even"
        )
    by_width = functools.partial(scaled, scale=config.width)
    hidden = 4 * gpt.width if is_gpt2 else -(-gpt.width * 8 // 3 // 32) * 32
    spec = TransformerSpec(
        vocabulary=vocabulary,
        layers=gpt.layers,
        width=by_width(gpt.width),
        heads=by_width(gpt.heads),
        key_heads=by_width(gpt.key_heads),
        head_width=by_width(gpt.head_width, multiple=1 if is_gpt2 else 2),
        hidden=by_width(gpt.hidden or hidden),
        positions=_positions(gpt.positions, length, "gpt") if is_gpt2 else 0,
        rotary_base=gpt.rotary_base,
        norm="layer" if is_gpt2 else "rms",
        epsilon=gpt.norm_epsilon or (1e-5 if is_gpt2 else 1e-6),
        unit="gelu_tanh" if is_gpt2 else "swiglu",
        has_bias=is_gpt2,
        is_tied=is_gpt2 if gpt.head == "auto" else gpt.head == "tied",
        dropout=gpt.dropout,
        dtype=config.compute_dtype,
        recomputes=config.recompute == "blocks",
    )
    if spec.heads % spec.key_heads:
        raise UserError(
            f"config.model.gpt.key_heads={gpt.key_heads} does not divide "
            f"config.model.gpt.heads={gpt.heads} at config.model.width={config.width:g}"
        )
    return spec


def _bert_spec(
    config: ModelConfig, bert: BertConfig, vocabulary: int, length: int
) -> TransformerSpec:
    by_width = functools.partial(scaled, scale=config.width)
    return TransformerSpec(
        vocabulary=vocabulary,
        layers=bert.layers,
        width=by_width(bert.width),
        heads=by_width(bert.heads),
        key_heads=by_width(bert.heads),
        head_width=by_width(bert.head_width),
        hidden=by_width(bert.hidden or 4 * bert.width),
        positions=_positions(bert.positions, length, "bert"),
        norm="layer",
        epsilon=bert.norm_epsilon,
        unit="gelu",
        has_bias=True,
        is_tied=True,
        is_causal=False,
        dropout=bert.dropout,
        dtype=config.compute_dtype,
        recomputes=config.recompute == "blocks",
    )


def _positions(positions: int, length: int, model: str) -> int:
    if positions and positions < length:
        raise UserError(
            f"config.model.{model}.positions={positions} are fewer than the {length} "
            "tokens of a sequence; lower config.data.sequence_length, or set it to 0"
        )
    return positions or length
