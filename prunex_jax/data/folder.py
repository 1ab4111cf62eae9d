"""Reads image files that lie in one folder per class.

photos/CLASS/*.jpg, or photos/{train,validation,test}/CLASS/*.jpg
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.data.image_files import ImageFiles, broken_image, look_at, named_classes
from prunex_jax.data.images import BrokenImageError, Pixels, decode_image
from prunex_jax.data.order import Positions
from prunex_jax.data.settings import DataConfig, named_path
from prunex_jax.data.splits import SPLIT_NAMES, SPLITS, Labels, StoredSet

_SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm".split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class _FolderSource:
    """Image files of one split."""

    root: str  # The folder that `files` are below.
    files: tuple[str, ...]  # With `/`, sorted.
    labels: Labels  # int32[size].
    num_channels: int  # 1 or 3.

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Positions) -> tuple[list[Pixels], Labels]:
        """Reads and decodes the files at `indices`."""
        images = [self._image(self.files[index]) for index in indices]
        return images, self.labels[indices]

    def _image(self, file: str) -> Pixels:
        path = Path(self.root, file)
        try:
            return decode_image(path.read_bytes(), self.num_channels)
        except (BrokenImageError, OSError) as error:
            raise broken_image(str(path), error) from error


def open_folder(config: DataConfig) -> StoredSet:
    """Opens a folder that has one folder of image files per class.

    Folders `train`, `validation` (or `val`) and `test` that have folders are splits.
    Otherwise there is no test split. Without a validation split,
    `validation_share` of every class is held out: the files whose path and
    `shuffle_seed` have the lowest hash, so that nearly all files stay where they are
    when some are added or removed.
    """
    root = named_path(config, "FOLDER, with one folder of image files per class")
    folders = _split_folders(root)
    classes = _classes(folders)
    listed, others = _listed(root, folders, classes)
    files = ImageFiles(
        size=len(listed),
        num_bytes=sum(_num_bytes(root / each.file) for each in listed),
        open=lambda number: (root / listed[number].file).open("rb"),
        name=lambda number: str(root / listed[number].file),
    )
    found = look_at(files, config)
    kept = [listed[number] for number in found.kept]
    if "validation" not in folders:
        kept = _with_validation(kept, config)
    _check_classes_are_trained(kept, classes, config)
    left_out = []
    if others:
        left_out = [f"{len(others)} files of other kinds left out, first {others[0]}"]

    def source_of(split: str) -> _FolderSource:
        part = [each for each in kept if each.split == split]
        return _FolderSource(
            str(root),
            tuple(each.file for each in part),
            np.array([each.label for each in part], np.int32),
            found.image_shape[-1],
        )

    return StoredSet(
        name=config.name,
        sources={split: source_of(split) for split in SPLITS},
        num_classes=len(classes),
        image_shape=found.image_shape,
        class_names=tuple(classes),
        remarks=(named_classes(classes), *left_out, *found.remarks),
    )


class _Listed(NamedTuple):
    """An image file."""

    split: str
    label: int
    file: str  # Below the root, with `/`.


def _split_folders(root: Path) -> dict[str, Path]:
    """Split -> the folder that has its classes; `train` alone where all are one."""
    splits = {name: SPLIT_NAMES.get(name.lower()) for name in _folders(root)}
    if not any(split and _folders(root / name) for name, split in splits.items()):
        return {"train": root}
    found: dict[str, Path] = {}
    for name, split in splits.items():
        if split is None or split in found:
            raise UserError(
                f"{root} has folders of splits, and {name!r} is "
                f"{'none of them' if split is None else f'a second one of {split}'}: "
                f"move it elsewhere; splits are {', '.join(SPLIT_NAMES)}"
            )
        found[split] = root / name
    if "train" not in found:
        raise UserError(
            f"{root} has folders of splits, {', '.join(splits)}, and no 'train'"
        )
    return found


def _folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted; hidden ones are left out."""
    try:
        with os.scandir(folder) as entries:
            names = [x.name for x in entries if x.is_dir() and x.name[0] != "."]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(names)


def _classes(folders: Mapping[str, Path]) -> list[str]:
    """Names of the classes, which all splits have."""
    found = {split: _folders(folder) for split, folder in folders.items()}
    classes = found["train"]
    if len(classes) < 2:
        has = f"only the folder {classes[0]!r}" if classes else "no folders"
        raise UserError(
            f"{folders['train']} has {has}, and needs one folder of image files for "
            "each of at least two classes"
        )
    for split, names in found.items():
        for name in sorted(set(classes) ^ set(names)):
            pair = [folders["train"], folders[split]]
            there, missing = reversed(pair) if name in names else pair
            raise UserError(
                f"class {name!r} is in {there} and not in {missing}: all splits need "
                "the same folders"
            )
    return classes


def _listed(
    root: Path, folders: Mapping[str, Path], classes: Sequence[str]
) -> tuple[list[_Listed], list[str]]:
    """All image files, sorted by split, class and path; and the other files."""
    listed: list[_Listed] = []
    others: list[str] = []
    for split, folder in folders.items():
        for label, name in enumerate(classes):
            found = _files(folder / name)
            files = [x for x in found if os.path.splitext(x)[1].lower() in _SUFFIXES]
            others += sorted(set(found) - set(files))
            if not files:
                raise UserError(
                    f"class {name!r} is empty: {folder / name} has no image files "
                    f"({', '.join(sorted(_SUFFIXES))}); add some, or delete the folder"
                )
            below = [os.path.relpath(file, root) for file in files]
            listed += [_Listed(split, label, file) for file in below]
    return listed, others


def _files(folder: Path) -> list[str]:
    """Paths of the files anywhere below a folder, sorted; hidden ones are left out."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error

    return sorted(
        os.path.join(parent, file)
        for parent, _, files in os.walk(folder, onerror=refuse, followlinks=True)
        for file in files
        if file[0] != "."
    )


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # Whoever opens it will say so.
        return 0


def _with_validation(listed: Sequence[_Listed], config: DataConfig) -> list[_Listed]:
    """The same files, with a share of every training class in validation."""

    def by_hash(each: _Listed) -> bytes:
        name = f"{config.shuffle_seed}/".encode() + os.fsencode(each.file)
        return hashlib.sha256(name).digest()

    held_out: set[_Listed] = set()
    trained = [each for each in listed if each.split == "train"]
    for _, same in itertools.groupby(trained, lambda each: each.label):
        files = sorted(same, key=by_hash)
        held_out.update(files[: round(config.validation_share * len(files))])
    return [x._replace(split="validation") if x in held_out else x for x in listed]


def _check_classes_are_trained(
    listed: Sequence[_Listed], classes: Sequence[str], config: DataConfig
) -> None:
    trained = {each.label for each in listed if each.split == "train"}
    for label, name in enumerate(classes):
        if label not in trained:
            raise UserError(
                f"class {name!r} has no image to train on: all are broken, or held out "
                f"by data.validation_share={config.validation_share}"
            )
