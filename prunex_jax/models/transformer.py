"""Parts of networks that read tokens: attention, and units behind it.

Parameters are float32. Activations have the type that the specification names; norms,
softmax and logits are computed in float32. `query`, `key`, `value` and `out` are arrays
of their own with an axis of heads, so that heads and their features can be cut out.

References:
  Vaswani et al., Attention is all you need, 2017, arXiv:1706.03762.
  Ba et al., Layer normalization, 2016, arXiv:1607.06450.
  Zhang and Sennrich, Root mean square layer normalization, 2019, arXiv:1910.07467.
  Su et al., RoFormer, 2021, arXiv:2104.09864 (rotary positions).
  Ainslie et al., GQA, 2023, arXiv:2305.13245 (query heads that share a key head).
  Shazeer, GLU variants improve transformer, 2020, arXiv:2002.05202 (SwiGLU).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from prunex_jax.models.stream import (
    LayerNorm,
    Norm,
    RmsNorm,
    dropped,
    gelu,
    like_last,
    make_norm,
)

# Standard deviation of initial weights.
_SPREAD = 0.02
# Added to scores of positions that are not seen, which vanish in it. It is finite, as
# all has to be that a removed head computes.
_UNSEEN = -1e30


@dataclasses.dataclass(frozen=True)
class TransformerSpec:
    """Widths and parts of a network; the defaults are those of Llama.

    Attributes:
      vocabulary: Number of tokens.
      layers: Blocks of attention and unit.
      width: Of the stream.
      heads: Query heads.
      key_heads: Key and value heads, each of which serves as many query heads.
      head_width: Features of a head; even for rotary positions.
      hidden: Width of the unit.
      positions: Number of learned positions; 0 turns queries and keys instead.
      rotary_base: Of the angles by which they are turned.
      norm: RMS norm, or layer norm.
      epsilon: Added to the mean square in norms.
      unit: What every position does by itself: SwiGLU, or one layer of GELU.
      has_bias: Whether matrix products have a bias behind them.
      is_tied: Whether logits are products with the embedding of tokens.
      is_causal: Whether a position sees only those before it and itself.
      dropout: Share of embeddings, attention weights and what is added to the stream
        that is dropped in training.
      dtype: float32 or bfloat16, of activations.
      recomputes: As of `stream.through`.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int
    positions: int = 0
    rotary_base: float = 10_000.0
    norm: Norm = "rms"
    epsilon: float = 1e-6
    unit: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    has_bias: bool = False
    is_tied: bool = False
    is_causal: bool = True
    dropout: float = 0.0
    dtype: str = "float32"
    recomputes: bool = False

    @property
    def last_spread(self) -> float:
        """Of the weights that add to the stream: smaller, the more of them do."""
        return _SPREAD / (2 * self.layers) ** 0.5


def weights(
    rngs: nnx.Rngs, *shape: int, spread: float = _SPREAD
) -> nnx.Param[jax.Array]:
    """Normal numbers of this standard deviation, float32[shape]."""
    return nnx.Param(spread * jax.random.normal(rngs.params(), shape))


def bias(spec: TransformerSpec, *shape: int) -> nnx.Param[jax.Array] | None:
    """Zeros, float32[shape], where the network has biases."""
    return nnx.Param(jnp.zeros(shape)) if spec.has_bias else None


def product(
    equation: str,
    x: jax.Array,
    kernel: nnx.Param[jax.Array],
    offset: nnx.Param[jax.Array] | None = None,
) -> jax.Array:
    """An `einsum` of activations with parameters, in the type of the activations."""
    found = jnp.einsum(equation, x, kernel[...].astype(x.dtype))
    return found if offset is None else add(found, offset)


def add(x: jax.Array, offset: nnx.Param[jax.Array]) -> jax.Array:
    """Adds a parameter along the last axes."""
    return x + like_last(offset[...].astype(x.dtype), x)


def logits_of(x: jax.Array, kernel: jax.Array, equation: str) -> jax.Array:
    """Products of the stream with a head, added up in float32."""
    return jnp.einsum(
        equation, x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
    )


def dropout(spec: TransformerSpec, rngs: nnx.Rngs) -> nnx.Dropout | None:
    """A dropout with a random stream of its own; None where nothing is dropped."""
    return nnx.Dropout(spec.dropout, rngs=rngs) if spec.dropout else None


def norm_of(spec: TransformerSpec) -> LayerNorm | RmsNorm:
    """A norm of the stream."""
    return make_norm(spec.norm, spec.width, spec.epsilon)


class Attention(nnx.Module):
    """Attention of positions to each other, over float[batch, length, width]."""

    def __init__(self, spec: TransformerSpec, rngs: nnx.Rngs):
        self.spec = spec
        features = spec.head_width
        shape = spec.width, spec.key_heads, features
        self.query = weights(rngs, spec.width, spec.heads, features)
        self.query_bias = bias(spec, spec.heads, features)
        self.key = weights(rngs, *shape)
        self.key_bias = bias(spec, *shape[1:])
        self.value = weights(rngs, *shape)
        self.value_bias = bias(spec, *shape[1:])
        back = spec.heads, features, spec.width
        self.out = weights(rngs, *back, spread=spec.last_spread)
        self.out_bias = bias(spec, spec.width)
        self.weights_dropout = dropout(spec, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What every position takes from those it sees, as wide as the stream."""
        query = product("btd,dhe->bthe", x, self.query, self.query_bias)
        key = product("btd,dge->btge", x, self.key, self.key_bias)
        value = product("btd,dge->btge", x, self.value, self.value_bias)
        if not self.spec.positions:
            query, key = (rotated(part, self.spec.rotary_base) for part in (query, key))
        batch, length, heads, features = query.shape
        grouped = query.reshape(batch, length, key.shape[2], -1, features)
        shares = self._shares(grouped, key).astype(x.dtype)
        mixed = jnp.einsum("bgrts,bsge->btgre", shares, value)
        mixed = mixed.reshape(batch, length, heads, features)
        return product("bthe,hed->btd", mixed, self.out, self.out_bias)

    def _shares(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """float32[batch, groups, heads, to, from]: from which position how much."""
        scores = (
            jnp.einsum(
                "btgre,bsge->bgrts", query, key, preferred_element_type=jnp.float32
            )
            * query.shape[-1] ** -0.5
        )
        if self.spec.is_causal:
            seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = scores + jnp.where(seen, 0.0, _UNSEEN)[None, None, None]
        return dropped(shares_of(scores), self.weights_dropout)


class Unit(nnx.Module):
    """What every position does by itself, over the last axis."""

    def __init__(self, spec: TransformerSpec, rngs: nnx.Rngs):
        self.kind = spec.unit
        is_gated = spec.unit == "swiglu"
        self.gate = weights(rngs, spec.width, spec.hidden) if is_gated else None
        self.up = weights(rngs, spec.width, spec.hidden)
        self.up_bias = bias(spec, spec.hidden)
        self.down = weights(rngs, spec.hidden, spec.width, spread=spec.last_spread)
        self.down_bias = bias(spec, spec.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What every position becomes, as wide as the stream."""
        up = product("btd,df->btf", x, self.up, self.up_bias)
        if self.gate is not None:
            hidden = jax.nn.silu(product("btd,df->btf", x, self.gate)) * up
        else:
            hidden = gelu(up) if self.kind == "gelu" else jax.nn.gelu(up)
        return product("btf,fd->btd", hidden, self.down, self.down_bias)


class Block(nnx.Module):
    """Attention and unit, each added to the stream.

    Norms stand in front of them, as in GPT-2 and Llama; or, with `is_post_norm`, behind
    every sum, as in BERT.
    """

    def __init__(
        self, spec: TransformerSpec, rngs: nnx.Rngs, is_post_norm: bool = False
    ):
        self.is_post_norm = is_post_norm
        self.attention_norm = norm_of(spec)
        self.attention = Attention(spec, rngs)
        self.unit_norm = norm_of(spec)
        self.unit = Unit(spec, rngs)
        self.dropout = dropout(spec, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream behind this block."""
        x = self._added(x, self.attention, self.attention_norm)
        return self._added(x, self.unit, self.unit_norm)

    def _added(
        self, x: jax.Array, part: Attention | Unit, norm: LayerNorm | RmsNorm
    ) -> jax.Array:
        if self.is_post_norm:
            return norm(x + dropped(part(x), self.dropout))
        return x + dropped(part(norm(x)), self.dropout)


def shares_of(scores: jax.Array) -> jax.Array:
    """The softmax over the last axis, float32[..., size].

    It says that the sum it divides by is not zero, which follows from the largest term,
    1, but is not seen by who traces the function. So heads can be cut out whose scores
    are those of a mask alone.

    Example:
      >>> shares_of(jnp.array([0.0, -1e30])).tolist()
      [1.0, 0.0]
    """
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    terms = jnp.exp(scores - largest)
    # Below the smallest sum, so that its slope is that of the sum.
    return terms / jnp.maximum(jnp.sum(terms, axis=-1, keepdims=True), 0.5)


def embedded(tokens: jax.Array, table: jax.Array, dtype: str) -> jax.Array:
    """Rows of a table, float[batch, length, width]."""
    return jnp.take(table, tokens, axis=0).astype(dtype)


def rotated(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns pairs of features by angles that grow with the position.

    Args:
      x: float[batch, length, heads, features]; feature i and i + features / 2 are a
        pair, as Hugging Face stores Llama's. Weights of the original Llama have pairs
        of neighbours, and need another order of features.
      base: Feature i turns by the position over base^(2 i / features).
    Example:
      >>> x = jnp.ones((1, 2, 1, 2))
      >>> rotated(x)[0, 0, 0].tolist()  # the first position stays
      [1.0, 1.0]
    """
    length, features = x.shape[1], x.shape[-1]
    powers = jnp.arange(0, features, 2) / features
    angles = jnp.arange(length)[:, None] / base ** powers[None]
    cosine, sine = (
        f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin)
    )
    first, second = jnp.split(x, 2, axis=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, axis=-1)
