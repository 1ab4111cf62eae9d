"""A masked language model as BERT: every position sees all others.

Layer norms stand behind attention and unit. Behind the last block, a layer with a norm
prepares the products with the embedding of tokens that are the logits.

References:
  Devlin et al., BERT, 2019, arXiv:1810.04805.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from prunex_jax.models.stream import dropped, gelu, through
from prunex_jax.models.transformer import (
    Block,
    TransformerSpec,
    bias,
    dropout,
    embedded,
    logits_of,
    norm_of,
    product,
    weights,
)


class Bert(nnx.Module):
    """Tokens int32[batch, length] -> logits float32[batch, length, vocabulary].

    Every sequence is one sentence to it: of the kinds of sentences that trained weights
    may know, it uses the first.

    Args:
      spec: Widths and parts; `positions` at least the length of sequences.
      rngs: Random streams.
      kinds: Kinds of sentences, each with an embedding; 0 has none.

    Example:
      >>> spec = TransformerSpec(16, layers=1, width=8, heads=2, key_heads=2,
      ...                        head_width=4, hidden=32, positions=5, norm='layer',
      ...                        unit='gelu', has_bias=True, is_causal=False)
      >>> Bert(spec, nnx.Rngs(0))(jnp.zeros((2, 5), jnp.int32)).shape
      (2, 5, 16)
    """

    def __init__(self, spec: TransformerSpec, rngs: nnx.Rngs, kinds: int = 0):
        self.dtype, self.recomputes = spec.dtype, spec.recomputes
        self.embedding = weights(rngs, spec.vocabulary, spec.width)
        self.positions = weights(rngs, spec.positions, spec.width)
        self.kinds = weights(rngs, kinds, spec.width) if kinds else None
        self.embedding_norm = norm_of(spec)
        self.dropout = dropout(spec, rngs)
        blocks = [Block(spec, rngs, is_post_norm=True) for _ in range(spec.layers)]
        self.blocks = nnx.List(blocks)
        self.transform = weights(rngs, spec.width, spec.width)
        self.transform_bias = bias(spec, spec.width)
        self.transform_norm = norm_of(spec)
        self.head_bias = nnx.Param(jnp.zeros(spec.vocabulary))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token that stands at every position."""
        x = embedded(tokens, self.embedding[...], self.dtype)
        x = x + self.positions[...][None, : tokens.shape[1]].astype(x.dtype)
        if self.kinds is not None:
            x = x + self.kinds[...][:1][None].astype(x.dtype)
        x = dropped(self.embedding_norm(x), self.dropout)
        x = through(self.blocks, x, self.recomputes)
        x = product("btd,de->bte", x, self.transform, self.transform_bias)
        x = self.transform_norm(gelu(x))
        logits = logits_of(x, self.embedding[...], "btd,vd->btv")
        return logits + self.head_bias[...][None, None]
