"""Opens text as sequences of tokens: of files, of TFDS, or tokens as they are.

The source of Python's standard library is text that every machine has: some tens of
megabytes of it, so that a language model can be trained without a download. Which files
are there depends on the version of Python; the digest says so.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_settings
from prunex_jax.data.encoded import Encoded, encode_once
from prunex_jax.data.huggingface import HUGGINGFACE
from prunex_jax.data.npz import NPZ
from prunex_jax.data.own import OWN
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.sources import OF_IMAGES, split_numbers
from prunex_jax.data.splits import SPLITS, Dataset
from prunex_jax.data.text_files import FilePart, encode_files, stdlib_parts, text_parts
from prunex_jax.data.tfds_source import TextSource, is_text_set, open_text_set
from prunex_jax.data.token_files import TokenSet, open_token_files
from prunex_jax.data.tokenizer import Tokenizer, open_tokenizer
from prunex_jax.data.tokens import Sequences, TextSplit, TokenFile, Tokens

STDLIB, FILES, TOKENS = "stdlib", "text", "tokens"
# Names of sets of ours that have no text.
_NO_TEXT = ("digits", "synthetic", "folder", NPZ, HUGGINGFACE, OWN)
# Settings that say nothing of anything but text, and nothing of text.
OF_TEXT = (
    *("sequence_length", "tokenizer", "end_token", "cache_dir", "text_glob"),
    *("token_dtype", "vocabulary"),
)
_OF_OTHERS = ("dir", "shuffle_seed", *OF_IMAGES)
# Name -> which of them mean something; any other name is that of a set of TFDS.
_HEEDED = {
    STDLIB: ("tokenizer",),
    FILES: ("tokenizer", "dir", "text_glob"),
    TOKENS: ("dir", "token_dtype", "vocabulary"),
}
_HEEDED_OF_TFDS = ("tokenizer", "dir", "shuffle_seed", "cache_dir")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TextDataset(Dataset):
    """Text in tokens."""

    num_tokens: int  # Size of the vocabulary.
    length: int  # Tokens of a sequence.
    mask: int | None  # The token that stands for a hidden one, if there is one.
    has_bytes: bool  # Whether it is known how many bytes of text a token stands for.
    origin: str  # What the tokens are from, for people.
    digest: str  # Of names and contents of all that was read.
    preprocessing: Mapping[str, Any]  # From text to tokens.

    @property
    def described(self) -> str:
        """Length of the sequences, and what they are from."""
        is_bytes = self.preprocessing["input"] == "bytes"
        unit = "bytes" if is_bytes else f"tokens, vocabulary {self.num_tokens:,}"
        return (
            f"sequences of {self.length} {unit}, from {self.origin}, "
            f"digest {self.digest}"
        )

    def about(self) -> dict[str, object]:
        """What has to be done to text."""
        return {
            "name": self.name,
            "digest": self.digest,
            "vocabulary": self.num_tokens,
            "preprocessing": dict(self.preprocessing),
        }


def is_text(config: DataConfig) -> bool:
    """Whether a data set is text or tokens.

    Raises:
      UserError: It is unknown, or not prepared.
    Example:
      >>> is_text(DataConfig(name='stdlib')), is_text(DataConfig(name='digits'))
      (True, False)
    """
    if config.name in (STDLIB, FILES, TOKENS):
        return True
    return config.name not in _NO_TEXT and is_text_set(config.name, config.dir)


def without_effect(config: DataConfig) -> list[str]:
    """Settings that mean nothing for a set of text.

    Example:
      >>> 'end_token' in without_effect(DataConfig(name='stdlib'))
      True
      >>> 'end_token' in without_effect(DataConfig(name='stdlib', tokenizer='a.json'))
      False
    """
    heeded = {"sequence_length", *_HEEDED.get(config.name, _HEEDED_OF_TFDS)}
    if config.tokenizer:
        heeded |= {"end_token", "cache_dir"}
    return [name for name in (*OF_TEXT, *_OF_OTHERS) if name not in heeded]


def open_text(config: DataConfig) -> TextDataset:
    """Opens a data set of text or of tokens.

    Args:
      config: `name` and what it needs.
    Returns:
      Sequences of `sequence_length` tokens.
    Raises:
      UserError: There is no text, it is too short, cannot be encoded, or a setting does
        not fit it.
    """
    check_settings(config, "config.data")
    if config.name == STDLIB:
        return open_stdlib(config)
    if config.name == FILES:
        return _of_files(config, *text_parts(config), is_strict=True)
    if config.name == TOKENS:
        return _open_tokens(config)
    return _open_text_set(config)


def open_stdlib(config: DataConfig) -> TextDataset:
    """Opens the Python source of the standard library of this interpreter.

    Whole files are held out, by a hash of their path: 3 % for validation, and 3 % for
    testing. `validation_share=0` trains on the former, too. A tokenizer reads U+FFFD
    where a file (there are four) is not UTF-8.

    Example:
      >>> dataset = open_stdlib(DataConfig(name='stdlib', sequence_length=64))
      >>> dataset.train.evaluation_batch(np.arange(2))['example'].shape
      (2, 65)
    """
    return _of_files(config, stdlib_parts(config), 0, is_strict=False)


def _of_files(
    config: DataConfig, parts: Sequence[FilePart], num_left_out: int, is_strict: bool
) -> TextDataset:
    tokenizer = open_tokenizer(config)
    found, digest = encode_files(parts, config, tokenizer, is_strict=is_strict)
    num_files = len({part.name for part in parts})
    left_out = f" ({num_left_out} more in no split)" if num_left_out else ""
    origin = f"{_counted(num_files, 'file')}{left_out}"
    return _dataset(config, tokenizer, found, origin, digest)


def _open_text_set(config: DataConfig) -> TextDataset:
    """Text that TFDS has prepared; all of it is kept encoded, as reading it is slow."""
    tokenizer = open_tokenizer(config)
    sources = open_text_set(config.name, config.dir)
    sizes = {split: len(source) for split, source in sources.items()}
    numbers = split_numbers(config, config.name, sizes)
    read = {split: sources.get(split, sources["train"]) for split in numbers}
    found = {
        split: _encode_source(source, numbers[split], tokenizer, config)
        for split, source in read.items()
    }
    num_documents = sum(each.num_documents for each in found.values())
    whole = hashlib.sha256("".join(x.digest for x in read.values()).encode())
    origin = _counted(num_documents, "document")
    return _dataset(config, tokenizer, found, origin, whole.hexdigest())


def _encode_source(
    source: TextSource, numbers: np.ndarray, tokenizer: Tokenizer, config: DataConfig
) -> Encoded:
    which = hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
    digest = f"{source.digest} {source.split} {which}"
    return encode_once(lambda: source.documents(numbers), digest, tokenizer, config)


def _dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    found: Mapping[str, Encoded],
    origin: str,
    digest: str,
) -> TextDataset:
    total = sum(each.num_bytes for each in found.values())
    origin = f"{origin} of {total:,} bytes"
    if not tokenizer.is_bytes:
        mean = found["train"].bytes_per_token
        origin = f"{origin}, {mean:.2f} bytes per token in training"
    splits = {
        split: _split(
            split,
            _loaded(each.tokens, config),
            config,
            tokenizer.num_tokens,
            None if tokenizer.is_bytes else each.bytes_per_token,
        )
        for split, each in found.items()
    }
    splits.setdefault("test", _split("test", np.zeros(0, np.uint8), config, 1))
    return _of_splits(
        config,
        splits,
        num_tokens=tokenizer.num_tokens,
        mask=tokenizer.mask,
        has_bytes=True,
        origin=origin,
        digest=digest[:12],
        preprocessing=tokenizer.about(),
    )


def _of_splits(
    config: DataConfig, splits: Mapping[str, TextSplit], **about: Any
) -> TextDataset:
    train, length = splits["train"], config.sequence_length
    if not len(train):
        raise UserError(
            f"config.data.sequence_length={length} is longer than the "
            f"{len(train.source.tokens)} tokens of text; lower it"
        )
    return TextDataset(name=config.name, length=length, **{**splits, **about})


def _split(
    name: str,
    tokens: Tokens,
    config: DataConfig,
    num_tokens: int,
    bytes_per_token: float | None = None,
    numbers: np.ndarray | None = None,
) -> TextSplit:
    source = Sequences(tokens, config.sequence_length, num_tokens)
    return TextSplit(
        name=name,
        source=source,
        numbers=np.arange(len(source)) if numbers is None else numbers,
        bytes_per_token=bytes_per_token,
        is_read_ahead=config.loader == "grain",
    )


def _loaded(tokens: Tokens, config: DataConfig) -> Tokens:
    """Tokens where `loader` wants them."""
    is_file = isinstance(tokens, TokenFile)
    return tokens[:] if is_file and config.loader == "memory" else tokens


def _open_tokens(config: DataConfig) -> TextDataset:
    found: TokenSet = open_token_files(config)
    # Splits may be cut from one file, which is brought into memory once.
    loaded = {file: _loaded(file, config) for file in {*found.tokens.values()}}
    splits = {
        split: _split(
            split,
            loaded[found.tokens[split]],
            config,
            found.num_tokens,
            numbers=found.numbers.get(split),
        )
        for split in SPLITS
    }
    return _of_splits(
        config,
        splits,
        num_tokens=found.num_tokens,
        mask=None,
        has_bytes=False,
        origin=f"{_counted(found.num_files, 'file')} of {found.size:,} tokens",
        digest=found.digest,
        preprocessing={"input": "tokens"},
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
