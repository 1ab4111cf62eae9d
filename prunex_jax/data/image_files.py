"""What sets of image files share: a look at all of them before training starts."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.data.images import BrokenImageError, image_shape
from prunex_jax.data.order import Positions
from prunex_jax.data.settings import DataConfig

# Sets of up to so many bytes of files are decoded whole, which takes some seconds; of
# larger ones, only headers are read, unless broken files are to be skipped.
DECODED_BYTES = 2**28
_CHUNK = 256


@dataclasses.dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images in files, or in something like files."""

    size: int  # Their number.
    num_bytes: int  # Of all of them.
    open: Callable[[int], IO[bytes]]  # Number -> the file, open for reading.
    name: Callable[[int], str]  # Number -> what people call it.


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What was seen of image files."""

    kept: Positions  # int64[kept], sorted, numbers of those that can be read.
    # Height, width, channels; None where they differ in size. Three channels, unless
    # all are grey.
    image_shape: tuple[int | None, int | None, int]
    remarks: tuple[str, ...]  # What people should know.


def look_at(files: ImageFiles, config: DataConfig) -> Found:
    """Reads the shapes of images, at least one, and finds broken ones."""
    skips = config.broken_files == "skip"
    whole = skips or files.num_bytes <= DECODED_BYTES

    def shapes_of(chunk: Sequence[int]) -> list[tuple[int, int, int] | None]:
        return [_shape_of(files, number, whole, skips) for number in chunk]

    numbers = range(files.size)
    chunks = [numbers[start : start + _CHUNK] for start in numbers[::_CHUNK]]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = list(itertools.chain(*pool.map(shapes_of, chunks)))
    kept = np.array([shape is not None for shape in found])
    broken = np.flatnonzero(~kept)
    if len(broken) == files.size:
        raise UserError(f"all {files.size} images are broken, {files.name(0)} first")
    shapes = {shape for shape in found if shape is not None}
    heights, widths, channels = map(set, zip(*shapes, strict=True))
    remarks = []
    if not whole:
        remarks.append(f"only the headers of {files.size} files were checked")
    if len(broken):
        first = files.name(broken[0])
        remarks.append(f"{len(broken)} broken files skipped, first {first}")
    return Found(
        kept=np.flatnonzero(kept),
        image_shape=(_only(heights), _only(widths), max(channels)),
        remarks=tuple(remarks),
    )


def only_of_kind(features: Mapping[str, Any], kind: type, preferred: str) -> str | None:
    """The only feature of a kind, or of several the one that is called so."""
    names = [name for name in features if isinstance(features[name], kind)]
    if preferred in names:
        return preferred
    return names[0] if len(names) == 1 else None


def named_classes(names: Sequence[str]) -> str:
    """Names of classes, for people; of many, some.

    Example:
      >>> named_classes(["cat", "dog"])
      'classes cat, dog'
      >>> named_classes([f"n{k:02}" for k in range(30)])
      'classes n00, n01, n02, n03, n04, n05, n06, n07, ..., n29'
    """
    shown = [*names[:8], "...", names[-1]] if len(names) > 10 else names
    return f"classes {', '.join(shown)}"


def broken_image(name: str, error: Exception) -> UserError:
    """The error that names a broken image."""
    reason = getattr(error, "strerror", None) or error
    return UserError(
        f"{name} is broken ({reason}): replace or delete it, or set "
        "data.broken_files=skip"
    )


def _shape_of(
    files: ImageFiles, number: int, whole: bool, skips: bool
) -> tuple[int, int, int] | None:
    try:
        with files.open(number) as file:
            return image_shape(file, whole)
    except (BrokenImageError, OSError) as error:
        if skips:
            return None
        raise broken_image(files.name(number), error) from error


def _only(values: set[int]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None
