"""Sequences of tokens that follow each other, in memory or in a file."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import check_whole
from prunex_jax.data.order import Positions
from prunex_jax.data.own import EXAMPLE, OwnSplit
from prunex_jax.data.splits import Batch

# Entry of a batch: float32[batch], the bytes of text that a sequence stands for. A
# batch without it has a byte for every token.
BYTES = "bytes"


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Tokens in a file, of which only those are read that are asked for.

    They are read and not mapped: reading a mapped file that is cut meanwhile kills the
    process, and here is refused.
    """

    path: Path  # The file.
    dtype: str  # Of a token, as numpy writes it.
    size: int  # Number of tokens.
    offset: int = 0  # Bytes in front of them.

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice) -> npt.NDArray[Any]:
        """Copies of the tokens from one place up to another."""
        start, stop, _ = places.indices(self.size)
        return self.rows(np.array([start]), max(stop - start, 0))[0]

    def rows(self, starts: Positions, length: int) -> npt.NDArray[Any]:
        """Copies of the `length` tokens from each start on, [len(starts), length]."""
        dtype = np.dtype(self.dtype)
        check_whole(self.path, self.offset + self.size * dtype.itemsize)
        found = np.empty((len(starts), length), dtype)
        try:
            with open(self.path, "rb") as file:
                for row, start in zip(found, starts.tolist(), strict=True):
                    file.seek(self.offset + start * dtype.itemsize)
                    if file.readinto(row) < row.nbytes:
                        raise UserError(f"{self.path} was cut; put the whole file back")
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        return found


# Unsigned integers one after the other.
Tokens = npt.NDArray[Any] | TokenFile


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences that follow each other, with the token behind each.

    Documents stand one behind the other in a stream, each with an end behind it, and
    the stream is cut into sequences of one length: nothing is filled up and nothing but
    the rest of the stream is left out. A sequence may hold the end of a document and
    the start of the next.
    """

    tokens: Tokens  # The stream, unsigned integers of any width.
    length: int  # Tokens of a sequence.
    # Size of the vocabulary; larger tokens are refused when they are read.
    num_tokens: int = 256

    def __len__(self) -> int:
        """Number of sequences; what is left at the end is too short for one."""
        return max(len(self.tokens) - 1, 0) // self.length

    def read(self, numbers: Positions) -> npt.NDArray[np.int32]:
        """int32[batch, length + 1] tokens: inputs, and with a shift of 1 the targets.

        Example:
          >>> Sequences(np.arange(8, dtype=np.uint8), 3).read(np.arange(2)).tolist()
          [[0, 1, 2, 3], [3, 4, 5, 6]]
        """
        found = _rows(self.tokens, numbers * self.length, self.length + 1)
        try:
            check_tokens(found, self.num_tokens)
        except UserError as error:
            wrong = np.any((found < 0) | (found >= self.num_tokens), axis=1)
            file = getattr(self.tokens, "path", "the text")
            where = f"sequence {numbers[wrong][0]} of {file}"
            raise UserError(f"{where}: {error}") from None
        return found.astype(np.int32)


def _rows(tokens: Tokens, starts: Positions, length: int) -> npt.NDArray[Any]:
    if isinstance(tokens, TokenFile):
        return tokens.rows(starts, length)
    return np.asarray(tokens)[starts[:, None] + np.arange(length)]


def check_tokens(tokens: npt.NDArray[Any], num_tokens: int) -> None:
    """Refuses tokens that are none of a vocabulary."""
    largest = int(tokens.max(initial=0))
    wrong = largest if largest >= num_tokens else int(tokens.min(initial=0))
    if not 0 <= wrong < num_tokens:
        raise UserError(
            f"token {wrong} is none of the {num_tokens} of the vocabulary, 0 to "
            f"{num_tokens - 1}; set config.data.vocabulary to what the tokenizer has, "
            "and check config.data.token_dtype"
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TextSplit(OwnSplit):
    """Some of the sequences of a stream."""

    source: Sequences
    # Bytes of text, ends of documents included, that a token of this split stands for
    # in the mean; None leaves `BYTES` out of batches.
    bytes_per_token: float | None = None
    is_read_ahead: bool = False  # Whether grain reads it, and not who uses it.

    @property
    def in_memory(self) -> bool:
        """Whether batches are made where they are used, also those of files."""
        return not self.is_read_ahead

    def evaluation_batch(self, examples: Positions) -> Batch:
        """Tokens as entry `EXAMPLE`, int32[batch, length + 1], and perhaps `BYTES`."""
        batch: Batch = {EXAMPLE: self.source.read(self.numbers[examples])}
        if self.bytes_per_token is not None:
            num_bytes = self.source.length * self.bytes_per_token
            batch[BYTES] = np.full(len(examples), num_bytes, np.float32)
        return batch

    def why_no_labels(self) -> str:
        """That text has none."""
        return "and text has none: set config.data.shards='iid'"
