"""Language models: a decoder of attention and gated units.

RMS norm in front of every part, rotary positions, several query heads per key head, and
SwiGLU, as language models are built since Llama. No layer has a bias.

References:
  Touvron et al., LLaMA, 2023, arXiv:2302.13971 (the parts and their order).
  Zhang and Sennrich, Root mean square layer normalization, 2019, arXiv:1910.07467.
  Su et al., RoFormer, 2021, arXiv:2104.09864 (rotary positions).
  Ainslie et al., GQA, 2023, arXiv:2305.13245 (query heads that share a key head).
  Shazeer, GLU variants improve transformer, 2020, arXiv:2002.05202 (SwiGLU).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0
# Standard deviation of initial weights.
_SPREAD = 0.02


@dataclasses.dataclass(frozen=True)
class GptSpec:
    """Widths of a decoder.

    Attributes:
      vocabulary: Number of tokens.
      layers: Blocks of attention and gated unit.
      width: Of the stream.
      heads: Query heads.
      key_heads: Key and value heads, each of which serves as many query heads.
      head_width: Features of a head; even, for rotary positions.
      hidden: Width of the gated unit.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int

    @property
    def last_spread(self) -> float:
        """Of the weights that add to the stream: smaller, the more of them do."""
        return _SPREAD / (2 * self.layers) ** 0.5


def _weights(
    rngs: nnx.Rngs, *shape: int, spread: float = _SPREAD
) -> nnx.Param[jax.Array]:
    return nnx.Param(spread * jax.random.normal(rngs.params(), shape))


class RmsNorm(nnx.Module):
    """Divides by the root mean square over features, and scales."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """float[batch, length, width], normalised."""
        square = jnp.mean(x * x, axis=-1, keepdims=True)
        scale = self.scale[...].reshape(*(1,) * (x.ndim - 1), -1)
        return x * jax.lax.rsqrt(square + _EPSILON) * scale


class Attention(nnx.Module):
    """Causal attention over float[batch, length, width]."""

    def __init__(self, spec: GptSpec, rngs: nnx.Rngs):
        keys = spec.width, spec.key_heads, spec.head_width
        self.query = _weights(rngs, spec.width, spec.heads, spec.head_width)
        self.key = _weights(rngs, *keys)
        self.value = _weights(rngs, *keys)
        shape = spec.heads, spec.head_width, spec.width
        self.out = _weights(rngs, *shape, spread=spec.last_spread)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What every position takes from those up to it, as wide as the stream."""
        query = rotated(jnp.einsum("btd,dhe->bthe", x, self.query[...]))
        key = rotated(jnp.einsum("btd,dge->btge", x, self.key[...]))
        value = jnp.einsum("btd,dge->btge", x, self.value[...])
        batch, length, heads, features = query.shape
        grouped = query.reshape(batch, length, key.shape[2], -1, features)
        scores = jnp.einsum("btgre,bsge->bgrts", grouped, key) * features**-0.5
        seen = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bgrts,bsge->btgre", weights, value)
        mixed = mixed.reshape(batch, length, heads, features)
        return jnp.einsum("bthe,hed->btd", mixed, self.out[...])


class GatedUnit(nnx.Module):
    """SwiGLU over the last axis."""

    def __init__(self, spec: GptSpec, rngs: nnx.Rngs):
        self.gate = _weights(rngs, spec.width, spec.hidden)
        self.up = _weights(rngs, spec.width, spec.hidden)
        self.down = _weights(rngs, spec.hidden, spec.width, spread=spec.last_spread)

    def __call__(self, x: jax.Array) -> jax.Array:
        """What every position becomes by itself, as wide as the stream."""
        hidden = jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])
        return hidden @ self.down[...]


class Block(nnx.Module):
    """Attention and gated unit, each added to the stream."""

    def __init__(self, spec: GptSpec, rngs: nnx.Rngs):
        self.attention_norm = RmsNorm(spec.width)
        self.attention = Attention(spec, rngs)
        self.unit_norm = RmsNorm(spec.width)
        self.unit = GatedUnit(spec, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The stream behind this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.unit(self.unit_norm(x))


class Gpt(nnx.Module):
    """Tokens int32[batch, length] -> logits float32[batch, length, vocabulary].

    Position t of the answer sees tokens 0 .. t.

    Example:
      >>> spec = GptSpec(16, layers=1, width=8, heads=2, key_heads=1, head_width=4,
      ...                hidden=12)
      >>> Gpt(spec, nnx.Rngs(0))(jnp.zeros((2, 5), jnp.int32)).shape
      (2, 5, 16)
    """

    def __init__(self, spec: GptSpec, rngs: nnx.Rngs):
        self.embedding = _weights(rngs, spec.vocabulary, spec.width)
        self.blocks = nnx.List([Block(spec, rngs) for _ in range(spec.layers)])
        self.norm = RmsNorm(spec.width)
        self.head = _weights(rngs, spec.width, spec.vocabulary)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token at every position."""
        x = jnp.take(self.embedding[...], tokens, axis=0)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.head[...]


def rotated(x: jax.Array) -> jax.Array:
    """Turns pairs of features by angles that grow with the position.

    Args:
      x: float[batch, length, heads, features]; feature i and i + features / 2 are a
        pair.
    Example:
      >>> x = jnp.ones((1, 2, 1, 2))
      >>> rotated(x)[0, 0, 0].tolist()  # the first position stays
      [1.0, 1.0]
    """
    length, features = x.shape[1], x.shape[-1]
    powers = jnp.arange(0, features, 2) / features
    angles = jnp.arange(length)[:, None] / _ROTARY_BASE ** powers[None]
    cosine, sine = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, axis=-1)
