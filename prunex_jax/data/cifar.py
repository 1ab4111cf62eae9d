"""Reads CIFAR-10 and CIFAR-100 from the archives of their authors, without TFDS.

Archives are pickles, whose loading could run anything; here nothing but arrays, lists,
texts and numbers is made of them.
"""

import dataclasses
import functools
import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.files import expanded
from prunex_jax.data.images import Pixels
from prunex_jax.data.splits import Labels, LateArrays, StoredSet

_SIDE, _COLOURS = 32, 3
_SIZES = {"train": 50_000, "test": 10_000}  # Examples of each split.
_CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


@dataclasses.dataclass(frozen=True)
class _Archive:
    """What a set is called in its archive."""

    folder: str  # Of its files, as torchvision leaves it.
    archive: str  # With this folder.
    files: dict[str, tuple[str, ...]]  # Of each split.
    labels: bytes  # Key of the labels in a file.
    num_classes: int
    class_names: tuple[str, ...] = ()


ARCHIVES = {
    "cifar10": _Archive(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        {
            "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
            "test": ("test_batch",),
        },
        b"labels",
        10,
        _CIFAR10_CLASSES,
    ),
    "cifar100": _Archive(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        {"train": ("train",), "test": ("test",)},
        b"fine_labels",
        100,
    ),
}


def find_archive(name: str, data_dir: str) -> Path | None:
    """The folder of files of a set, or its archive; None if neither is there."""
    known = ARCHIVES[name]
    root = expanded(data_dir or ".")
    places = (root / known.folder, root / known.archive, root)
    for place in places:
        if place.is_file() or (place / known.files["test"][0]).is_file():
            return place
    return None


def open_archive(name: str, place: Path) -> StoredSet:
    """Opens a set from what `find_archive` has found; nothing is read yet."""
    known = ARCHIVES[name]
    return StoredSet(
        name=name,
        sources={
            split: LateArrays(
                functools.partial(_read_split, name, str(place), split), size
            )
            for split, size in _SIZES.items()
        },
        num_classes=known.num_classes,
        image_shape=(_SIDE, _SIDE, _COLOURS),
        class_names=known.class_names,
    )


def where_archives_are_looked_for(name: str, data_dir: str) -> str:
    """Says for people where a set may lie, and where it comes from."""
    known = ARCHIVES[name]
    root = expanded(data_dir or ".")
    return (
        f"there is no {known.archive} and no folder {known.folder} in {root} either "
        f"(from https://www.cs.toronto.edu/~kriz/cifar.html, or as torchvision leaves "
        "them)"
    )


def _read_split(name: str, place: str, split: str) -> tuple[Pixels, Labels]:
    """Reads all images and labels of a split, or says which file is not right."""
    known, images, labels = ARCHIVES[name], list[Pixels](), list[Labels]()
    for file, content in _contents(known, Path(place), split):
        try:
            found = _Plain(io.BytesIO(content), encoding="bytes").load()
            pixels = np.asarray(found[b"data"])
            classes = np.asarray(found[known.labels], np.int32)
        except Exception as error:  # Damaged pickles raise all kinds of errors.
            raise UserError(
                f"{file} of {place} cannot be read ({one_line(error, 200)}); get it "
                f"again with {known.archive}"
            ) from error
        wanted = (len(classes), _COLOURS * _SIDE * _SIDE)
        in_range = not len(classes) or 0 <= classes.min() <= classes.max()
        if pixels.dtype != np.uint8 or pixels.shape != wanted or not in_range:
            raise UserError(
                f"{file} of {place} has {pixels.dtype}{list(pixels.shape)} with "
                f"{len(classes)} labels, and not images of {name}; get it again with "
                f"{known.archive}"
            )
        images.append(pixels.reshape(-1, _COLOURS, _SIDE, _SIDE))
        labels.append(classes)
    stacked, classes = np.concatenate(images), np.concatenate(labels)
    highest = int(classes.max(initial=0))
    if len(classes) != _SIZES[split] or highest >= known.num_classes:
        raise UserError(
            f"{place} has {len(classes)} images for {split} with labels up to "
            f"{highest}, and {name} has {_SIZES[split]} of {known.num_classes} "
            f"classes; get it again with {known.archive}"
        )
    return np.ascontiguousarray(stacked.transpose(0, 2, 3, 1)), classes


def _contents(known: _Archive, place: Path, split: str) -> Iterator[tuple[str, bytes]]:
    """The files of a split: name and bytes."""
    try:
        if place.is_dir():
            for file in known.files[split]:
                yield file, (place / file).read_bytes()
            return
        with tarfile.open(place) as archive:
            for file in known.files[split]:
                member = archive.extractfile(f"{known.folder}/{file}")
                if member is None:
                    raise KeyError(file)
                yield file, member.read()
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        raise UserError(
            f"{place} cannot be read ({one_line(error, 200)}); get it again with "
            f"{known.archive}"
        ) from error


class _Plain(pickle.Unpickler):
    """Makes arrays, and what needs no name: lists, dicts, texts and numbers."""

    _ALLOWED = (
        ("_codecs", "encode"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Refuses every name but those of arrays."""
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        # numpy has renamed its inner package.
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
