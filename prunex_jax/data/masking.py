"""Hides some tokens of every sequence, for networks that learn to fill them in.

Which ones follows from the seed and the position in the stream in training, so that a
resumed run hides the same, on any mesh; in evaluation from the number of the example,
so that every evaluation asks the same.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from prunex_jax.data.order import Positions, uniforms
from prunex_jax.data.own import EXAMPLE
from prunex_jax.data.splits import Batch
from prunex_jax.data.tokens import TextSplit

# Entries of a batch: the tokens as they were, and 1.0 where they are asked for.
TARGET = "target"
ASKED = "asked"
# Of the tokens that are asked for, so many are hidden; of the rest, one half is
# replaced and the other stays.
_HIDDEN, _REPLACED = 0.8, 0.9
# Of every evaluation.
_EVALUATION_SEED = -1

_Tokens = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Masking:
    """Hides tokens as BERT does.

    Attributes:
      mask: The token that stands for a hidden one.
      num_tokens: Tokens 0 .. num_tokens - 1 replace others.
      length: Tokens of a sequence.
      share: Of the tokens of a sequence that are asked for.

    References:
      Devlin et al., BERT, 2019, arXiv:1810.04805, section 3.1 and appendix A.1.
    """

    mask: int
    num_tokens: int
    length: int
    share: float = 0.15

    @property
    def _num_asked(self) -> int:
        """Tokens of a sequence that are asked for; the same of each, at least one."""
        return max(1, round(self.share * self.length))

    def batch(self, tokens: _Tokens, numbers: Positions, seed: int) -> Batch:
        """Makes what networks read, and what they are asked for.

        Args:
          tokens: int32[batch, length] or longer.
          numbers: int64[batch], which decide with the seed.
          seed: Of the choice.
        Returns:
          `EXAMPLE` and `TARGET`, int32[batch, length]; `ASKED`, float32[batch, length].
        Example:
          >>> masking = Masking(mask=99, num_tokens=10, length=20)
          >>> batch = masking.batch(np.full((2, 20), 7, np.int32), np.arange(2), seed=0)
          >>> batch['asked'].sum(axis=1).tolist()
          [3.0, 3.0]
        """
        tokens = tokens[:, : self.length]
        draws = uniforms(seed, numbers, 3 * self.length)
        order, fate, other = np.split(draws, 3, axis=1)
        asked = np.zeros(tokens.shape, bool)
        first = np.argsort(order, axis=1, kind="stable")[:, : self._num_asked]
        np.put_along_axis(asked, first, True, axis=1)
        random = (other * self.num_tokens).astype(np.int32)
        changed = np.where(fate < _REPLACED, random, tokens)
        changed = np.where(fate < _HIDDEN, np.int32(self.mask), changed)
        return {
            EXAMPLE: np.where(asked, changed, tokens),
            TARGET: tokens,
            ASKED: asked.astype(np.float32),
        }


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MaskedSplit(TextSplit):
    """Some of the sequences of a stream, with some of their tokens hidden.

    Attributes:
      masking: What is hidden.
    """

    masking: Masking

    @classmethod
    def of(cls, split: TextSplit, masking: Masking) -> "MaskedSplit":
        """The same sequences as a split has."""
        return cls(**vars(split), masking=masking)

    def training_batch(
        self, examples: Positions, positions: Positions, seed: int
    ) -> Batch:
        """Sequences of which other tokens are hidden whenever they come."""
        return self.masking.batch(self._tokens(examples), positions, seed)

    def evaluation_batch(self, examples: Positions) -> Batch:
        """Sequences of which always the same tokens are hidden."""
        return self.masking.batch(self._tokens(examples), examples, _EVALUATION_SEED)

    def _tokens(self, examples: Positions) -> _Tokens:
        return self.source.read(self.numbers[examples])
