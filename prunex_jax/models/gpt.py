"""Language models that predict the next token: the form of Llama, and that of GPT-2.

Which of them it is, the specification says: RMS norms, rotary positions and SwiGLU
without biases; or layer norms, learned positions, GELU and biases, with logits from the
embedding of tokens. Norms stand in front of attention and unit in both.

References:
  Touvron et al., LLaMA, 2023, arXiv:2302.13971.
  Radford et al., Language models are unsupervised multitask learners, 2019 (GPT-2).
"""

import jax
from flax import nnx

from prunex_jax.models.stream import dropped, through
from prunex_jax.models.transformer import (
    Block,
    TransformerSpec,
    dropout,
    embedded,
    logits_of,
    norm_of,
    weights,
)


class Gpt(nnx.Module):
    """Tokens int32[batch, length] -> logits float32[batch, length, vocabulary].

    Position t of the answer sees tokens 0 .. t.

    Example:
      >>> import jax.numpy as jnp
      >>> spec = TransformerSpec(16, layers=1, width=8, heads=2, key_heads=1,
      ...                        head_width=4, hidden=12)
      >>> Gpt(spec, nnx.Rngs(0))(jnp.zeros((2, 5), jnp.int32)).shape
      (2, 5, 16)
    """

    def __init__(self, spec: TransformerSpec, rngs: nnx.Rngs):
        self.dtype, self.recomputes = spec.dtype, spec.recomputes
        self.embedding = weights(rngs, spec.vocabulary, spec.width)
        has_positions = spec.positions > 0
        self.positions = (
            weights(rngs, spec.positions, spec.width) if has_positions else None
        )
        self.dropout = dropout(spec, rngs)
        self.blocks = nnx.List([Block(spec, rngs) for _ in range(spec.layers)])
        self.norm = norm_of(spec)
        self.head = None if spec.is_tied else weights(rngs, spec.width, spec.vocabulary)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token at every position."""
        x = embedded(tokens, self.embedding[...], self.dtype)
        if self.positions is not None:
            length = tokens.shape[1]
            x = x + self.positions[...][None, :length].astype(x.dtype)
        x = dropped(x, self.dropout)
        x = through(self.blocks, x, self.recomputes)
        x = self.norm(x)
        if self.head is None:
            return logits_of(x, self.embedding[...], "btd,vd->btv")
        return logits_of(x, self.head[...], "btd,dv->btv")
