"""Text as sequences of bytes: the source of Python's standard library.

Every machine that runs this has some tens of megabytes of it, so that a language model
can be trained without a download. Which files are there depends on the version of
Python; the digest says so.
"""

import dataclasses
import functools
import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import DataConfig
from prunex_jax.data.order import Positions
from prunex_jax.data.own import OwnSplit
from prunex_jax.data.splits import Dataset

# Tokens are bytes; 0, which no file has, ends a file.
NUM_TOKENS = 256
_END = b"\0"
# Of a hundred files, so many each are for testing and for validation.
_HELD_OUT = 3
_ELSEWHERE = ("site-packages", "dist-packages", "__pycache__")


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of a text that follow each other, with the token behind each.

    Attributes:
      text: uint8[size], files with an end behind each.
      length: Tokens of a sequence.
    """

    text: npt.NDArray[np.uint8]
    length: int

    def __len__(self) -> int:
        """Number of sequences; what is left at the end is too short for one."""
        return max(len(self.text) - 1, 0) // self.length

    def read(self, numbers: Positions) -> npt.NDArray[np.int32]:
        """int32[batch, length + 1] tokens: inputs, and with a shift of 1 the targets.

        Example:
          >>> Sequences(np.arange(8, dtype=np.uint8), 3).read(np.arange(2)).tolist()
          [[0, 1, 2, 3], [3, 4, 5, 6]]
        """
        places = numbers[:, None] * self.length + np.arange(self.length + 1)[None]
        return self.text[places].astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TextDataset(Dataset):
    """Text in bytes."""

    num_files: int  # In all splits.
    num_bytes: int  # In all splits, ends of files included.
    length: int  # Tokens of a sequence.
    digest: str  # Of names and contents of all files.

    @property
    def described(self) -> str:
        """Length of the sequences, and what they are from."""
        return (
            f"sequences of {self.length} bytes, from {self.num_files} files of "
            f"{self.num_bytes:,} bytes, digest {self.digest}"
        )

    def about(self) -> dict[str, object]:
        """What has to be done to text."""
        return {
            "name": self.name,
            "digest": self.digest,
            "preprocessing": {"input": "bytes", "end_of_file": 0},
        }


def open_stdlib(config: DataConfig) -> TextDataset:
    """Opens the Python source of the standard library of this interpreter.

    Whole files are held out, by a hash of their path: 3 % for validation, and 3 % for
    testing. `validation_share=0` trains on the former, too.

    Args:
      config: `sequence_length` and `validation_share`.
    Raises:
      UserError: This Python has no source of its library, or sequences are too long.
    Example:
      >>> dataset = open_stdlib(DataConfig(sequence_length=64))
      >>> dataset.train.evaluation_batch(np.arange(2))['example'].shape
      (2, 65)
    """
    parts: dict[str, list[bytes]] = {"train": [], "validation": [], "test": []}
    files, digest = _files(), hashlib.sha256()
    for name, content in files.items():
        digest.update(name.encode() + _END + content)
        parts[_split_of(name, config)].append(content)
    texts = {
        split: np.frombuffer(b"".join(x + _END for x in found), np.uint8)
        for split, found in parts.items()
    }
    length = config.sequence_length
    sources = {split: Sequences(text, length) for split, text in texts.items()}
    if not len(sources["train"]):
        raise UserError(
            f"config.data.sequence_length={length} is longer than the "
            f"{len(texts['train'])} bytes of text; lower it"
        )
    splits = {
        split: OwnSplit(split, source, np.arange(len(source)))
        for split, source in sources.items()
    }
    return TextDataset(
        name=config.name,
        num_files=len(files),
        num_bytes=sum(map(len, texts.values())),
        length=length,
        digest=digest.hexdigest()[:12],
        **splits,
    )


@functools.cache
def _files() -> dict[str, bytes]:
    """Relative path -> content, sorted; the same for every process of a machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {
        path.relative_to(root).as_posix(): path.read_bytes().replace(_END, b"")
        for path in sorted(root.rglob("*.py"))
        if not set(_ELSEWHERE) & set(path.relative_to(root).parts)
    }
    if not found:
        raise UserError(
            f"config.data.name='stdlib' finds no Python source in {root}; use a Python "
            "that has its standard library as files"
        )
    return found


def _split_of(name: str, config: DataConfig) -> str:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 100
    if number < _HELD_OUT:
        return "test"
    if number < 2 * _HELD_OUT and config.validation_share:
        return "validation"
    return "train"
