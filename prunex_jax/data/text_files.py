"""Finds files of text, says what of them is held out, and reads them."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_defaults
from prunex_jax.data.encoded import Encoded, encode_once
from prunex_jax.data.settings import DataConfig, named_path
from prunex_jax.data.splits import SPLIT_NAMES, SPLITS
from prunex_jax.data.tokenizer import Tokenizer

# Share of what has no splits of its own that is for testing.
TEST_SHARE = 0.03
# Fewer files than these are cut, each into parts; of more, whole files are held out.
MANY_FILES = 100
# Of a hundred files of the standard library, so many each are for testing and for
# validation.
_HELD_OUT = 3
_ELSEWHERE = ("site-packages", "dist-packages", "__pycache__")


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A part of a file, or all of it: a document."""

    path: Path  # The file.
    name: str  # Relative path, with `/`.
    split: str  # Where it belongs.
    start: int = 0  # Bytes in front of the part.
    stop: int | None = None  # End of the part, in bytes; None for that of the file.

    def read(self) -> bytes:
        """Its bytes."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                return file.read(-1 if self.stop is None else self.stop - self.start)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror}); mend it, or leave it "
                "out by config.data.text_glob"
            ) from None


def stdlib_parts(config: DataConfig) -> list[FilePart]:
    """The source of the standard library of this interpreter, by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        FilePart(path, name, _stdlib_split(name, config))
        for path, name in _below(root, "*.py")
        if not set(_ELSEWHERE) & set(name.split("/"))
    ]
    if not found:
        raise UserError(
            f"config.data.name='stdlib' finds no Python source in {root}; use a Python "
            "that has its standard library as files"
        )
    return found


def _stdlib_split(name: str, config: DataConfig) -> str:
    number = int.from_bytes(_hash(name)[:4]) % 100
    if number < _HELD_OUT:
        return "test"
    if number < 2 * _HELD_OUT and config.validation_share:
        return "validation"
    return "train"


def text_parts(config: DataConfig) -> tuple[list[FilePart], int]:
    """Files of text of the user's, as splits, and how many more belong to no split.

    Folders or files at the top that are called `train`, `validation` (or `valid`,
    `val`, `dev`) and `test` are splits where there is `train` and one of the others.
    Without validation, some of training becomes it. Where there are no splits,
    validation and test are both taken from all files.
    """
    root = named_path(config, "PATH of text")
    files = _files(root, config)
    by_split: dict[str, list[tuple[Path, str]]] = {}
    for path, name in files:
        top = Path(name.split("/")[0]).stem
        by_split.setdefault(SPLIT_NAMES.get(top, ""), []).append((path, name))
    if root.is_file() or not ("train" in by_split and len({*by_split} - {""}) > 1):
        parts = _divide(files, TEST_SHARE, config.validation_share)
        return parts, 0
    held_out = 0.0 if "validation" in by_split else config.validation_share
    parts = _divide(by_split["train"], 0.0, held_out)
    for split in ("validation", "test"):
        parts += [FilePart(*file, split) for file in by_split.get(split, ())]
    parts.sort(key=lambda part: (part.name, part.start))
    return parts, len(by_split.get("", ()))


def _files(root: Path, config: DataConfig) -> list[tuple[Path, str]]:
    if root.is_file():
        check_defaults("data", config, ("text_glob",), "a single file")
        return [(root, root.name)]
    try:
        found = _below(root, config.text_glob)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"config.data.text_glob={config.text_glob!r} is no pattern of names "
            f"({error}); write one as in '*.txt'"
        ) from None
    if not found:
        raise UserError(
            f"config.data.dir={config.dir!r} has no files of "
            f"config.data.text_glob={config.text_glob!r}; change one of them"
        )
    return found


def _below(root: Path, pattern: str) -> list[tuple[Path, str]]:
    """Files below a folder and their relative paths, sorted; no hidden ones."""
    found = [(x, x.relative_to(root).as_posix()) for x in root.rglob(pattern)]
    shown = [(x, name) for x, name in found if not f"/{name}".count("/.")]
    return sorted((x for x in shown if x[0].is_file()), key=lambda x: x[0])


def _divide(
    files: Sequence[tuple[Path, str]], test_share: float, validation_share: float
) -> list[FilePart]:
    """Holds out whole files by the hash of their names, or the end of each of few."""
    if len(files) < MANY_FILES:
        shares = (1 - test_share) * (1 - validation_share), 1 - test_share
        return [part for file in files for part in _cut(*file, shares)]
    order = sorted(files, key=lambda file: _hash(file[1]))
    num_test = round(test_share * len(files))
    num_held = num_test + round(validation_share * (len(files) - num_test))
    split_of = dict.fromkeys((name for _, name in order), "train")
    split_of.update((name, "validation") for _, name in order[:num_held])
    split_of.update((name, "test") for _, name in order[:num_test])
    return [FilePart(path, name, split_of[name]) for path, name in files]


def _cut(path: Path, name: str, shares: Iterable[float]) -> list[FilePart]:
    """Training, validation and test of one file, in this order, where not empty."""
    size = path.stat().st_size
    places = [0, *(_start_of_character(path, round(x * size)) for x in shares), size]
    parts = [
        FilePart(path, name, split, start, stop)
        for split, start, stop in zip(SPLITS, places, places[1:], strict=False)
        if start < stop
    ]
    return parts or [FilePart(path, name, "train")]


def _start_of_character(path: Path, place: int) -> int:
    """The first place from here on that is not within a character of UTF-8."""
    with open(path, "rb") as file:
        file.seek(place)
        ahead = file.read(4)
    return place + next((k for k, x in enumerate(ahead) if x & 0xC0 != 0x80), 0)


def encode_files(
    parts: Sequence[FilePart], config: DataConfig, tokenizer: Tokenizer, is_strict: bool
) -> tuple[dict[str, Encoded], str]:
    """Reads files, and encodes them unless that was done before.

    Bytes are kept in memory, and other tokens in files. With `is_strict`, what is no
    text is refused instead of mended.

    Returns:
      Split -> its tokens; digest of names and contents of all files.
    """
    whole = hashlib.sha256()
    digests = {split: hashlib.sha256() for split in SPLITS}
    texts = {split: bytearray() for split in SPLITS}
    for part in parts:
        content = part.read()
        if is_strict:
            _check_is_text(part, content, tokenizer)
        if not part.start:
            whole.update(part.name.encode() + b"\0")
        whole.update(content)
        digests[part.split].update(b"%d " % len(content) + content)
        if tokenizer.is_bytes:
            for tokens in tokenizer.encode([content]):
                texts[part.split] += tokens.tobytes()

    def encoded(split: str) -> Encoded:
        own = [part for part in parts if part.split == split]
        if tokenizer.is_bytes:
            tokens = np.frombuffer(texts[split], np.uint8)
            return Encoded(tokens, len(tokens), len(own))
        digest = digests[split].hexdigest()
        return encode_once(
            lambda: (part.read() for part in own), digest, tokenizer, config
        )

    return {split: encoded(split) for split in SPLITS}, whole.hexdigest()


def _check_is_text(part: FilePart, content: bytes, tokenizer: Tokenizer) -> None:
    remedy = "mend it, or leave it out by config.data.text_glob, as in '*.txt'"
    if b"\0" in content:
        raise UserError(f"{part.path} has a byte 0, which no text has; {remedy}")
    if tokenizer.is_bytes:
        return
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{part.path} is no UTF-8 at byte {part.start + error.start}, and "
            f"config.data.tokenizer needs it; {remedy}"
        ) from None


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
