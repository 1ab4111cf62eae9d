"""Reads images from what `save_to_disk` of Hugging Face's datasets has written.

Nothing is downloaded: the folder has everything.
"""

import dataclasses
import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.files import check_whole, expanded
from prunex_jax.base.imports import need_package
from prunex_jax.data.image_files import (
    ImageFiles,
    broken_image,
    look_at,
    named_classes,
    only_of_kind,
)
from prunex_jax.data.images import BrokenImageError, Pixels, decode_image
from prunex_jax.data.order import Positions
from prunex_jax.data.settings import DataConfig, named_path
from prunex_jax.data.splits import SPLIT_NAMES, Labels, StoredSet, Uncached

HUGGINGFACE = "huggingface"


@dataclasses.dataclass(frozen=True, eq=False)
class _HuggingFaceSource(Uncached):
    """Labelled images of one split."""

    folder: str  # Of the set.
    image: str  # Column of the images.
    label: str  # Column of their classes.
    split: str  # As the set calls it; empty where it has none.
    rows: Positions  # int64[size], those that are read.
    num_channels: int  # 1 or 3.

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Positions) -> tuple[list[Pixels], Labels]:
        """Decodes the images at `indices`."""
        for path, size in self._sizes.items():
            check_whole(path, size)
        try:
            found = self._table[self.rows[indices].tolist()]
            labels = np.array(found[self.label], np.int32)
        except UserError:
            raise
        except Exception as error:  # Damaged files raise all kinds of errors.
            several = " or a later one" * (len(indices) > 1)
            raise UserError(
                f"{self.name(int(min(indices)))}{several} cannot be read "
                f"({one_line(error, 200)}); put the set back as it was"
            ) from error
        pairs = zip(indices, found[self.image], strict=True)
        images = [self._decoded(index, image) for index, image in pairs]
        return images, labels

    def labels(self) -> Labels:
        """All labels, int32[size]; -1 where there is none."""
        column = self._table.select_columns([self.label])
        found = column[self.rows.tolist()][self.label]
        return np.array([-1 if x is None else x for x in found], np.int32)

    def file(self, index: int) -> IO[bytes]:
        """An image as it is stored."""
        return io.BytesIO(_bytes(self._table[int(self.rows[index])][self.image]))

    def name(self, index: int) -> str:
        """What people call an image."""
        split = f" of split {self.split!r}" if self.split else ""
        return f"image {self.rows[index]}{split} of {self.folder}"

    def _decoded(self, index: int, image: Mapping[str, Any] | None) -> Pixels:
        try:
            return decode_image(_bytes(image), self.num_channels)
        except BrokenImageError as error:
            raise broken_image(self.name(index), error) from error

    @functools.cached_property
    def _sizes(self) -> dict[Path, int]:
        """Bytes of each mapped file when it was opened."""
        paths = [Path(file["filename"]) for file in self._table.cache_files]
        return {path: path.stat().st_size for path in paths}

    @functools.cached_property
    def _table(self) -> Any:
        import datasets

        found = _load(self.folder)
        table = found[self.split] if self.split else found
        table = table.with_format(None).select_columns([self.image, self.label])
        # Decoding stays here.
        return table.cast_column(self.image, datasets.Image(decode=False))


def open_huggingface(config: DataConfig) -> StoredSet:
    """Opens what `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.

    Splits are train, validation (or valid, val) and test; a set without splits is that
    of training.
    """
    tables = _tables(config)
    features = tables["train"][1].features
    image, label = _columns(config, features)
    classes = tuple(features[label].names)
    sources = {}
    for split, (name, table) in tables.items():
        if table.features != features:
            raise UserError(
                f"splits of {config.dir} differ in columns or classes: make them alike"
            )
        rows = np.arange(len(table))
        sources[split] = _HuggingFaceSource(config.dir, image, label, name, rows, 3)
        _check_labels(sources[split], len(classes))
    places = [(each, row) for each in sources.values() for row in range(len(each))]
    files = ImageFiles(
        size=len(places),
        num_bytes=sum(table.data.nbytes for _, table in tables.values()),
        open=lambda number: _HuggingFaceSource.file(*places[number]),
        name=lambda number: _HuggingFaceSource.name(*places[number]),
    )
    found = look_at(files, config)
    kept = [places[number] for number in found.kept]

    def kept_of(source: _HuggingFaceSource) -> _HuggingFaceSource:
        return dataclasses.replace(
            source,
            rows=np.array([row for each, row in kept if each is source], np.int64),
            num_channels=found.image_shape[-1],
        )

    return StoredSet(
        name=config.name,
        sources={split: kept_of(source) for split, source in sources.items()},
        num_classes=len(classes),
        image_shape=found.image_shape,
        class_names=classes,
        remarks=(
            named_classes(classes),
            f"columns {image} and {label}",
            *found.remarks,
        ),
    )


def _tables(config: DataConfig) -> dict[str, tuple[str, Any]]:
    """Split -> what the set calls it, and its table."""
    named_path(config, "FOLDER, which save_to_disk wrote")
    found = _load(config.dir)
    if not isinstance(found, dict):
        return {"train": ("", found)}
    tables: dict[str, tuple[str, Any]] = {}
    for name, table in found.items():
        split = SPLIT_NAMES.get(name)
        if split in tables:
            raise UserError(f"{config.dir} has two splits of validation: leave one out")
        if split is not None and len(table):
            tables[split] = (name, table)
    if "train" not in tables:
        raise UserError(
            f"{config.dir} has the splits {', '.join(found)}: training needs 'train', "
            "with examples"
        )
    return tables


def _load(folder: str) -> Any:
    """A data set, or a dict of them."""
    need_package("datasets", "huggingface", "config.data.name='huggingface'")
    import datasets

    try:
        return datasets.load_from_disk(str(expanded(folder)))
    except Exception as error:  # Damaged files raise all kinds of errors.
        raise UserError(
            f"config.data.dir={folder!r} cannot be read: {error}"
        ) from error


def _columns(config: DataConfig, features: Mapping[str, Any]) -> tuple[str, str]:
    """Finds the image and the class by the types of the columns."""
    import datasets

    def only(kind: type, preferred: str) -> str:
        name = only_of_kind(features, kind, preferred)
        if name is None:
            said = ", ".join(f"{k} ({type(v).__name__})" for k, v in features.items())
            raise UserError(
                f"{config.dir} has the columns {said}, and needs one of type "
                f"{kind.__name__}, or one of them called {preferred!r}: "
                "cast or rename columns, and save it again"
            )
        return name

    return only(datasets.Image, "image"), only(datasets.ClassLabel, "label")


def _check_labels(source: _HuggingFaceSource, num_classes: int) -> None:
    labels = source.labels()
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise UserError(
            f"{source.name(wrong[0])} has no label in 0..{num_classes - 1}: save the "
            "set without such examples or splits"
        )


def _bytes(image: Mapping[str, Any] | None) -> bytes:
    """What an undecoded image has in its row."""
    if image is None:
        raise BrokenImageError("there is none")
    encoded: bytes | None = image["bytes"]
    if encoded is None:  # Written by a version that left files where they were.
        raise BrokenImageError(f"it is in file {image['path']}, outside of the set")
    return encoded
