"""Reads arrays from an .npz file: labelled images, or examples of any kind.

    x_train, y_train[, x_validation, y_validation][, x_test, y_test]

as in the files of Keras; x and y (or images and labels) alone are split here. Nothing
is unpickled.
"""

import dataclasses
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.data.images import Pixels
from prunex_jax.data.settings import DataConfig, named_path
from prunex_jax.data.splits import Labels, LateArrays, StoredSet

NPZ = "npz"
# What entries are called before and after the name of their split.
_X_NAMES = ("x", "images")
_Y_NAMES = ("y", "labels")
_SUFFIXES = {
    "train": ("_train", ""),
    "validation": ("_validation", "_valid", "_val"),
    "test": ("_test",),
}
# Classes that labels may speak of, however few examples there are.
_MOST_CLASSES = 10_000
# RuntimeError is that of encrypted files, and of unknown kinds of compression.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a file, of which only the header was read."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_images(self) -> bool:
        """Whether these are uint8 images, grey or of three colours."""
        has_axes = len(self.shape) == 3 or self.shape[3:] in ((1,), (3,))
        return self.dtype == np.uint8 and has_axes

    @property
    def is_labels(self) -> bool:
        """Whether these are integers, one for each example."""
        return self.dtype.kind in "iu" and self.shape[1:] in ((), (1,))

    def read(self) -> np.ndarray:
        """The array, if it is still what it was when the file was opened."""
        try:
            # Numpy leaves a damaged file open that it has opened itself.
            with (
                open(self.file, "rb") as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                found: np.ndarray = arrays[self.name]
        except _UNREADABLE as error:
            raise UserError(
                f"entry {self.name!r} of {self.file} cannot be read: {error}"
            ) from error
        if (found.shape, found.dtype) != (self.shape, self.dtype):
            raise UserError(
                f"entry {self.name!r} of {self.file} was {self} when it was opened and "
                f"is {found.dtype}{list(found.shape)} now; put the file back"
            )
        return found


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a file has for one split."""

    x: Entry
    y: Entry | None

    @property
    def is_images(self) -> bool:
        """Whether these are images, each with a label."""
        return self.x.is_images and self.y is not None and self.y.is_labels

    def targets(self) -> np.ndarray:
        """The array y; labels without an axis of one."""
        assert self.y is not None
        found = self.y.read()
        return found.reshape(-1) if self.y.is_labels else found

    def labelled_images(self) -> tuple[Pixels, Labels]:
        """Images with an axis of channels, and labels, where `is_images`."""
        images = self.x.read()
        images = images[..., None] if images.ndim == 3 else images
        return images, self.targets().astype(np.int32)


def open_npz(config: DataConfig) -> StoredSet:
    """Opens labelled images that are arrays of a file."""
    parts = _parts(config)
    for part in parts.values():
        if not part.is_images:
            raise UserError(
                f"{config.dir} has {_said(part)}, which are no images uint8[n, height, "
                "width, 1 or 3] with labels int[n]; give a network of your own: "
                "--config.model.name=package.module:object"
            )
    train = parts["train"].x
    for part in parts.values():
        if part.x.shape[1:] != train.shape[1:]:
            raise UserError(
                f"{config.dir} has {part.x} beside {train}: make them alike"
            )
    height, width, *channels = train.shape[1:]
    return StoredSet(
        name=config.name,
        sources={
            split: LateArrays(part.labelled_images, part.x.shape[0])
            for split, part in parts.items()
        },
        num_classes=_num_classes(parts),
        image_shape=(height, width, channels[0] if channels else 1),
    )


def npz_has_images(config: DataConfig) -> bool:
    """Whether `open_npz` will do; otherwise `npz_arrays`."""
    return all(part.is_images for part in _parts(config).values())


def npz_arrays(config: DataConfig) -> dict[str, PyTree]:
    """Reads arrays of any kind, as `open_own` takes them: split -> (x, y) or x."""
    return {
        split: part.x.read() if part.y is None else (part.x.read(), part.targets())
        for split, part in _parts(config).items()
    }


def _parts(config: DataConfig) -> dict[str, _Part]:
    """Split -> its arrays, checked against each other."""
    entries = _entries(config)
    parts = {}
    for split, suffixes in _SUFFIXES.items():
        x, y = (_named(names, suffixes, entries) for names in (_X_NAMES, _Y_NAMES))
        if x is not None:
            parts[split] = _Part(x, y)
        elif y is not None:
            raise UserError(f"{config.dir} has {y} for {split} and no x beside it")
    if "train" not in parts:
        raise UserError(
            f"{config.dir} has the arrays {', '.join(entries) or 'none'}: name them "
            "x_train and y_train (and x_test, y_test), or x and y"
        )
    for part in parts.values():
        _check(part, parts["train"], config)
    return parts


def _check(part: _Part, train: _Part, config: DataConfig) -> None:
    for entry in filter(None, (part.x, part.y)):
        if entry.dtype.hasobject:
            raise UserError(
                f"entry {entry.name!r} of {config.dir} has Python objects, which would "
                "have to be unpickled: store numbers"
            )
        if not entry.shape or entry.shape[0] != part.x.shape[0]:
            raise UserError(
                f"{config.dir} has {_said(part)}: the examples must be along the first "
                "axis, as many in each"
            )
        if not entry.shape[0]:
            raise UserError(f"{config.dir} has {entry}, without an example")
    if (part.y is None) != (train.y is None):
        raise UserError(
            f"{config.dir} has {_said(part)} beside {_said(train)}: give all splits a "
            "y, or none"
        )


def _said(part: _Part) -> str:
    return f"{part.x}" if part.y is None else f"{part.x} and {part.y}"


def _named(
    names: tuple[str, ...], suffixes: tuple[str, ...], entries: Mapping[str, Entry]
) -> Entry | None:
    wanted = [name + suffix for suffix in suffixes for name in names]
    return next((entries[name] for name in wanted if name in entries), None)


def _entries(config: DataConfig) -> dict[str, Entry]:
    """Name -> array of a file, from headers."""
    file = named_path(config, "FILE.npz")
    try:
        with zipfile.ZipFile(file) as members:
            found = [
                Entry(str(file), name.removesuffix(".npy"), *_header(members, name))
                for name in members.namelist()
                if name.endswith(".npy")
            ]
    except _UNREADABLE as error:
        raise UserError(f"{file} cannot be read as an .npz file: {error}") from error
    return {entry.name: entry for entry in found}


def _header(
    members: zipfile.ZipFile, name: str
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with members.open(name) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    return shape, dtype


def _num_classes(parts: Mapping[str, _Part]) -> int:
    train = parts["train"]
    labels = {split: part.targets() for split, part in parts.items()}
    highest, size = int(labels["train"].max()), len(labels["train"])
    if highest >= max(_MOST_CLASSES, size):
        raise UserError(
            f"{train.y} of {train.x.file} has label {highest} among {size} examples, "
            f"for which a network would need {highest + 1} outputs: number the classes "
            "from 0, without gaps"
        )
    for split, part in parts.items():
        low, high = int(labels[split].min()), int(labels[split].max())
        if low < 0 or high > highest:
            wrong = low if low < 0 else high
            raise UserError(
                f"{part.y} of {part.x.file} has label {wrong}, outside of "
                f"0..{highest}, those of training: number classes from 0"
            )
    return highest + 1
