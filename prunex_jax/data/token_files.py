"""Opens tokens that others have encoded: files that are never read whole."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_defaults
from prunex_jax.data.order import Positions
from prunex_jax.data.settings import DataConfig, named_path
from prunex_jax.data.splits import SPLIT_NAMES, SPLITS
from prunex_jax.data.text_files import TEST_SHARE
from prunex_jax.data.tokens import TokenFile, check_tokens

_SUFFIXES = (".bin", ".npy")
# Before training, so many tokens of a file are looked at, in evenly spaced blocks.
LOOKED_AT = 2**26
_BLOCK = 2**20
_NONE = TokenFile(Path(os.devnull), "uint8", 0)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSet:
    """Files of tokens as splits."""

    # Split -> its file, or that of the split it is cut from.
    tokens: Mapping[str, TokenFile]
    # Split -> which sequences of its file belong to it, where not all do.
    numbers: Mapping[str, Positions]
    num_tokens: int  # Size of the vocabulary.
    num_files: int  # Number of files.
    size: int  # Tokens in all of them.
    digest: str  # Of names, sizes and the tokens that were looked at.


def open_token_files(config: DataConfig) -> TokenSet:
    """Opens files of tokens.

    A folder has `train`, and perhaps `validation` (or `valid`, `val`, `dev`) and
    `test`, as .bin (nothing but tokens, as nanoGPT writes them) or .npy. A single file
    is cut: its last 3 % are for testing, and `validation_share` of the rest, at its
    end, for validation; so is training where there is no validation beside it.
    """
    paths = _paths(config)
    if all(path.suffix == ".npy" for path in paths.values()):
        check_defaults("data", config, ("token_dtype",), ".npy files, which say theirs")
    files = {split: _open(path, config) for split, path in paths.items()}
    opened = list(files.values())
    is_cut = set(files) == {""}
    if is_cut:
        files = dict.fromkeys(SPLITS, opened[0])
    num_tokens = config.vocabulary or _largest(opened) + 1
    digest = hashlib.sha256()
    for path, file in zip(paths.values(), opened, strict=True):
        _look_at(path, file, num_tokens, digest)
    numbers = {}
    if "validation" not in paths:
        numbers = _numbers(files["train"], config, TEST_SHARE if is_cut else 0.0)
        files["validation"] = files["train"]
    return TokenSet(
        tokens={split: files.get(split, _NONE) for split in SPLITS},
        numbers={split: x for split, x in numbers.items() if is_cut or split != "test"},
        num_tokens=num_tokens,
        num_files=len(opened),
        size=sum(map(len, opened)),
        digest=digest.hexdigest()[:12],
    )


def _paths(config: DataConfig) -> dict[str, Path]:
    """Split -> its file; of a single file, the split is called ''."""
    root, said = named_path(config, "PATH of tokens"), f"config.data.dir={config.dir!r}"
    if root.is_file():
        if root.suffix not in _SUFFIXES:
            raise UserError(f"{said} is none of {', '.join(_SUFFIXES)}; give one")
        return {"": root}
    paths: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        split = SPLIT_NAMES.get(path.stem)
        if split is None or path.suffix not in _SUFFIXES:
            continue
        if split in paths:
            raise UserError(
                f"{said} has {paths[split].name} and {path.name} for {split}; keep one"
            )
        paths[split] = path
    if "train" not in paths:
        raise UserError(
            f"{said} has no train.bin or train.npy; give a folder that has, or a file"
        )
    return paths


def _open(path: Path, config: DataConfig) -> TokenFile:
    if path.suffix == ".npy":
        return _open_npy(path)
    dtype = np.dtype(config.token_dtype).newbyteorder("<")
    size, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest:
        raise UserError(
            f"{path} is no file of {config.token_dtype}, as {rest} bytes are left "
            "over; set config.data.token_dtype to what it holds"
        )
    return TokenFile(path, dtype.str, size)


def _open_npy(path: Path) -> TokenFile:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(
            f"{path} is no array that numpy can map ({error}); write it by numpy.save"
        ) from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(
            f"{path} is {found.dtype}{list(found.shape)}; tokens are integers, one "
            "after the other"
        )
    return TokenFile(path, found.dtype.str, len(found), found.offset)


def _largest(files: list[TokenFile]) -> int:
    """The largest token, which takes reading all of them."""
    starts = ((file, start) for file in files for start in range(0, len(file), _BLOCK))
    return max((int(f[k : k + _BLOCK].max()) for f, k in starts), default=0)


def _look_at(path: Path, file: TokenFile, num_tokens: int, digest: Any) -> None:
    digest.update(f"{path.name} {len(file)} {file.dtype} ".encode())
    num_blocks = -(-len(file) // _BLOCK)
    looked_at = min(num_blocks, LOOKED_AT // _BLOCK)
    for block in np.linspace(0, num_blocks - 1, looked_at).round().astype(int):
        tokens = file[block * _BLOCK : (block + 1) * _BLOCK]
        digest.update(tokens.tobytes())
        try:
            check_tokens(tokens, num_tokens)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _numbers(
    file: TokenFile, config: DataConfig, test_share: float
) -> dict[str, Positions]:
    """Which sequences of one file belong to which split, one split after the other."""
    size = max(len(file) - 1, 0) // config.sequence_length
    test = round((1 - test_share) * size)
    validation = round((1 - config.validation_share) * test)
    places = [0, validation, test, size]
    ranges = zip(SPLITS, places, places[1:], strict=False)
    return {split: np.arange(start, stop) for split, start, stop in ranges}
