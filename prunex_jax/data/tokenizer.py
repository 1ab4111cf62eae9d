"""Turns text into tokens: bytes, or what a tokenizer of Hugging Face makes of it."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.files import expanded
from prunex_jax.base.imports import need_package
from prunex_jax.data.settings import DataConfig

# Tokens are bytes; 0, which no text has, ends a document.
NUM_BYTES = 256
# What ends a document, in the order in which it is looked for.
_END_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"),
    "[SEP]",
)
# What stands for a hidden token, likewise.
_MASK_TOKENS = ("[MASK]", "<mask>")
# Characters that are encoded as one piece, and at a time: both bound memory.
_PIECE = 2**20
_AT_A_TIME = 2**22


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Every byte is a token."""

    num_tokens = NUM_BYTES
    identity = "bytes"
    is_bytes = True
    mask = None

    def encode(self, documents: Iterable[bytes]) -> Iterator[npt.NDArray[np.uint8]]:
        """Bytes but 0, and a 0 behind every document.

        Example:
          >>> [part.tolist() for part in ByteTokenizer().encode([b'ab', b'c'])]
          [[97, 98, 0], [99, 0]]
        """
        for document in documents:
            whole = document.replace(b"\0", b"") + b"\0"
            yield np.frombuffer(whole, np.uint8)

    def about(self) -> Mapping[str, Any]:
        """That tokens are bytes."""
        return {"input": "bytes", "end_of_file": 0}


@dataclasses.dataclass(frozen=True, eq=False)
class _FileTokenizer:
    """A tokenizer of Hugging Face."""

    path: Path  # Its file.
    digest: str  # Of the file.
    end: int  # The token that ends a document.
    # The token that stands for a hidden one; None where there is none.
    mask: int | None
    num_tokens: int  # Size of the vocabulary, special tokens included.
    encoder: Any  # What the file holds, a `tokenizers.Tokenizer`.

    is_bytes = False

    @property
    def identity(self) -> str:
        """Differs from that of any other whose tokens may differ."""
        return f"{self.digest} {self.end}"

    def encode(self, documents: Iterable[bytes]) -> Iterator[npt.NDArray[Any]]:
        """Tokens of documents, each with an end behind it.

        Special tokens that stand in a text are read as such, and no others are added.
        What is no UTF-8 becomes U+FFFD. Documents of more than a million characters
        are encoded in pieces that end at the end of a line.
        """
        pieces: list[tuple[str, bool]] = []
        size = 0
        for document in documents:
            for piece in _pieces_of(document.decode(errors="replace")):
                pieces.append(piece)
                size += len(piece[0])
            if size >= _AT_A_TIME:
                yield self._encode_pieces(pieces)
                pieces, size = [], 0
        if pieces:
            yield self._encode_pieces(pieces)

    def _encode_pieces(self, pieces: list[tuple[str, bool]]) -> npt.NDArray[Any]:
        texts = [text for text, _ in pieces]
        found = self.encoder.encode_batch_fast(texts, add_special_tokens=False)
        parts = []
        for encoding, (_, is_last) in zip(found, pieces, strict=True):
            parts.append(np.array(encoding.ids, np.uint32))
            if is_last:
                parts.append(np.array([self.end], np.uint32))
        return np.concatenate(parts)

    def about(self) -> Mapping[str, Any]:
        """Which file it is, and the token that ends a document."""
        return {
            "input": "tokens",
            "tokenizer": self.path.name,
            "tokenizer_sha256": self.digest,
            "end_of_document": self.end,
        }


# What turns documents into tokens, each document with an end behind it.
Tokenizer = ByteTokenizer | _FileTokenizer


def _pieces_of(text: str) -> Iterator[tuple[str, bool]]:
    """Pieces of a text, with whether it is the last."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:stop], False
        start = stop
    yield text[start:], True


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Opens what turns text into tokens, as `tokenizer` and `end_token` say.

    Example:
      >>> open_tokenizer(DataConfig()).num_tokens
      256
    """
    if not config.tokenizer:
        return ByteTokenizer()
    path = expanded(config.tokenizer)
    said = f"config.data.tokenizer={config.tokenizer!r}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{said} cannot be read ({error.strerror}); give a tokenizer.json"
        ) from None
    encoder = _read_encoder(content, said)
    encoder.no_padding()
    encoder.no_truncation()
    words = encoder.get_vocab(with_added_tokens=True)
    wanted = (config.end_token,) if config.end_token else _END_TOKENS
    ends = [words[word] for word in wanted if word in words]
    if not ends and config.end_token:
        raise UserError(
            f"config.data.end_token={config.end_token!r} is no token of "
            f"{path.name}{suggest(config.end_token, words)}"
        )
    if not ends:
        raise UserError(
            f"{said} has none of the usual tokens that end a document "
            f"({', '.join(_END_TOKENS)}); name its own as config.data.end_token"
        )
    digest = hashlib.sha256(content).hexdigest()
    mask = next((words[word] for word in _MASK_TOKENS if word in words), None)
    return _FileTokenizer(path, digest, ends[0], mask, max(words.values()) + 1, encoder)


def _read_encoder(content: bytes, said: str) -> Any:
    need_package("tokenizers", "text", said)
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # The package raises nothing narrower.
        what = " ".join(str(error).split())[:200]
        raise UserError(
            f"{said} is no tokenizer of Hugging Face ({what}); give a tokenizer.json"
        ) from None
