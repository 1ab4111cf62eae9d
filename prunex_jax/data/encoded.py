"""Keeps encoded text in files, so that a tokenizer reads it once."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import cache_folder, expanded, one_at_a_time
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.tokenizer import Tokenizer
from prunex_jax.data.tokens import TokenFile, Tokens

# Encoding more text takes so long that people are told of it.
_LONG = 2**26
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of a split."""

    tokens: Tokens  # Of its documents, with an end behind each.
    # Of its text; the end of a document counts as one byte, so that bits per byte are
    # over the same bytes for every tokenizer.
    num_bytes: int
    num_documents: int  # In it.

    @property
    def bytes_per_token(self) -> float:
        """Their quotient."""
        return self.num_bytes / max(len(self.tokens), 1)


def encode_once(
    documents: Callable[[], Iterable[bytes]],
    digest: str,
    tokenizer: Tokenizer,
    config: DataConfig,
) -> Encoded:
    """Encodes documents into a file, or finds what was encoded before.

    Processes of a machine that ask for the same wait for the first of them. Files are
    written beside and renamed, so that what is found is whole.

    Args:
      documents: Gives them one after the other.
      digest: Of all of them: what it was is found again by it.
      tokenizer: Makes the tokens.
      config: `cache_dir`.
    """
    key = hashlib.sha256(f"1 {digest} {tokenizer.identity}".encode()).hexdigest()[:32]
    try:
        folder = _folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        found = _find(folder, key)
        if found is None:
            with one_at_a_time(folder / f"{key}.lock"):
                found = _find(folder, key) or _write(folder, key, documents, tokenizer)
    except OSError as error:
        raise UserError(
            f"config.data.cache_dir={config.cache_dir!r}: encoded text cannot be kept "
            f"({error}); set it to a folder that can be written"
        ) from None
    return found


def _folder(config: DataConfig) -> Path:
    if config.cache_dir:
        return expanded(config.cache_dir).absolute()
    try:
        return cache_folder() / "tokens"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def _find(folder: Path, key: str) -> Encoded | None:
    """What was kept; None if it is not there, or not whole."""
    path = folder / f"{key}.bin"
    try:
        about = json.loads((folder / f"{key}.json").read_text())
        tokens = TokenFile(path, about["dtype"], about["tokens"])
        is_whole = path.stat().st_size == len(tokens) * np.dtype(tokens.dtype).itemsize
        found = Encoded(tokens, about["bytes"], about["documents"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return found if is_whole else None


def _write(
    folder: Path,
    key: str,
    documents: Callable[[], Iterable[bytes]],
    tokenizer: Tokenizer,
) -> Encoded:
    counts = {"tokens": 0, "bytes": 0, "documents": 0}

    def counted() -> Iterator[bytes]:
        is_told = False
        for document in documents():
            counts["bytes"] += len(document) + 1
            counts["documents"] += 1
            if counts["bytes"] > _LONG and not is_told:
                is_told = True
                _logger.warning("encoding text, once; it is kept in %s", folder)
            yield document

    dtype = np.min_scalar_type(tokenizer.num_tokens - 1)
    with _replacing(folder / f"{key}.bin") as file:
        for part in tokenizer.encode(counted()):
            counts["tokens"] += len(part)
            file.write(part.astype(dtype).tobytes())
    # Written last: it says that the other is whole.
    with _replacing(folder / f"{key}.json") as file:
        file.write(json.dumps({**counts, "dtype": dtype.name}).encode())
    found = _find(folder, key)
    assert found is not None, key
    return found


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is whole, whoever else writes the same."""
    descriptor, name = tempfile.mkstemp(".tmp", f"{path.name}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
