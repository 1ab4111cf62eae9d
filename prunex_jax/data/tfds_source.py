"""Reads prepared TFDS sets in ArrayRecord format, without TensorFlow.

Preparing a set is left to TFDS, which needs TensorFlow for it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError, one_line, suggest
from prunex_jax.data.image_files import only_of_kind
from prunex_jax.data.images import BrokenImageError, Pixels, decode_image
from prunex_jax.data.order import Positions
from prunex_jax.data.splits import SPLITS, Labels, StoredSet, Uncached

# Documents that are read at a time.
_CHUNK = 512
# Sets whose published test labels are missing: the labelled split used instead.
_LABELLED_TEST = {"imagenet2012": "validation", "imagenet2012_subset": "validation"}


@dataclasses.dataclass(frozen=True)
class _TfdsSource(Uncached):
    """One split of a prepared TFDS set."""

    name: str  # TFDS name, with configuration and version where the user gave them.
    data_dir: str | None  # TFDS data directory; None for TFDS's own default.
    split: str  # Name of the split.
    image_key: str  # Feature that holds the encoded image.
    label_key: str  # Feature that holds the class.
    size: int  # Number of examples.
    num_channels: int  # 1 or 3.
    num_classes: int  # Labels outside 0 .. num_classes - 1 are refused.

    def __len__(self) -> int:
        return self.size

    def read(self, indices: Positions) -> tuple[list[Pixels], Labels]:
        """Reads and decodes the examples at `indices`."""
        wanted = indices.tolist()
        try:
            # Reading several at once starts threads, which costs one example dearly.
            if len(wanted) == 1:
                records = [self._records[wanted[0]]]
            else:
                records = self._records.__getitems__(wanted)
        except UserError:
            raise
        except Exception as error:  # Damaged files raise all kinds of errors.
            raise self._unreadable(wanted, error) from error
        labels = np.array([record[self.label_key] for record in records], np.int32)
        unlabelled = indices[(labels < 0) | (labels >= self.num_classes)]
        if len(unlabelled):
            raise UserError(
                f"example {unlabelled[0]} of split {self.split!r} of data set "
                f"{self.name!r} has no label in 0..{self.num_classes - 1}: "
                "choose a set whose splits are all labelled"
            )
        pairs = zip(wanted, records, strict=True)
        images = [self._decoded(number, x[self.image_key]) for number, x in pairs]
        return images, labels

    def _decoded(self, number: int, encoded: bytes) -> Pixels:
        try:
            return decode_image(encoded, self.num_channels)
        except BrokenImageError as error:
            raise self._unreadable([number], error) from error

    def _unreadable(self, numbers: list[int], error: Exception) -> UserError:
        """The error that names example and file, which is the first of several."""
        first = min(numbers)
        which = f"example {first}" + " or a later one" * (len(numbers) > 1)
        return UserError(
            f"{which} of split {self.split!r} of data set {self.name!r}"
            f"{self._file_of(first)} cannot be read ({one_line(error, 200)}); prepare "
            "or copy the set again"
        )

    def _file_of(self, number: int) -> str:
        """In which file an example is, where that can be told."""
        split = _prepared_builder(self.name, self.data_dir).info.splits[self.split]
        ends = np.cumsum(split.shard_lengths)
        shard = int(np.searchsorted(ends, number, side="right"))
        if shard >= len(ends):
            return ""
        record = number - int(ends[shard] - split.shard_lengths[shard])
        return f" (record {record} of {split.filepaths[shard]})"

    @functools.cached_property
    def _records(self) -> Any:
        import tensorflow_datasets as tfds

        # Decoding stays here: TFDS would use another library where one is installed.
        decoders = {self.image_key: tfds.decode.SkipDecoding()}
        builder = _prepared_builder(self.name, self.data_dir)
        return builder.as_data_source(split=self.split, decoders=decoders)


def open_tfds(name: str, data_dir: str) -> StoredSet:
    """Opens an image classification set that TFDS has prepared, without reading it.

    For imagenet2012, whose test labels are not public, validation takes the place of
    test.

    Args:
      name: As in TFDS, for instance cifar10, or imagenette/320px-v2.
      data_dir: TFDS data directory; empty for TFDS's own default.
    """
    builder = _prepared_builder(name, data_dir or None)
    info = builder.info
    image_key, label_key = _feature_keys(name, info.features)
    image, label = info.features[image_key], info.features[label_key]
    test = _test_split(name, builder.name, sorted(info.splits))

    def source_of(split: str) -> _TfdsSource:
        return _TfdsSource(
            name=name,
            data_dir=data_dir or None,
            split=split,
            image_key=image_key,
            label_key=label_key,
            size=info.splits[split].num_examples,
            num_channels=image.shape[-1],
            num_classes=label.num_classes,
        )

    return StoredSet(
        name,
        {"train": source_of("train"), "test": source_of(test)},
        label.num_classes,
        image.shape,
        tuple(label.names),
    )


@dataclasses.dataclass(frozen=True)
class TextSource:
    """One split of a prepared TFDS set of text."""

    name: str  # As of `_TfdsSource`.
    data_dir: str | None  # As of `_TfdsSource`.
    split: str  # Name of the split.
    text_key: str  # Feature that holds the text.
    size: int  # Number of documents.
    digest: str  # Of what TFDS says of the set, and the sizes of its files.

    def __len__(self) -> int:
        return self.size

    def documents(self, numbers: Positions) -> Iterator[bytes]:
        """Gives the texts of these documents, one after the other."""
        builder = _prepared_builder(self.name, self.data_dir)
        records = builder.as_data_source(split=self.split)
        for start in range(0, len(numbers), _CHUNK):
            chunk = numbers[start : start + _CHUNK].tolist()
            for record in records.__getitems__(chunk):
                text = record[self.text_key]
                yield text.encode() if isinstance(text, str) else bytes(text)


def is_text_set(name: str, data_dir: str) -> bool:
    """Whether a prepared set has text, and no images."""
    import tensorflow_datasets as tfds

    features = _prepared_builder(name, data_dir or None).info.features
    has_images = any(isinstance(x, tfds.features.Image) for x in features.values())
    return bool(_text_keys(features)) and not has_images


def open_text_set(name: str, data_dir: str) -> dict[str, TextSource]:
    """Opens a set of text that TFDS has prepared, such as lm1b, or wiki40b/en.

    The splits are `train`, and `validation` and `test` where the set has them. The text
    is feature `text`, or the only one that is text. No example is read.
    """
    builder = _prepared_builder(name, data_dir or None)
    keys = _text_keys(builder.info.features)
    if "text" not in keys and len(keys) != 1:
        raise UserError(
            f"data set {name!r} has no feature 'text', and "
            f"{', '.join(keys) or 'none'} are text: choose a set with one text each"
        )
    key = "text" if "text" in keys else keys[0]
    splits = builder.info.splits
    if "train" not in splits:
        raise UserError(
            f"data set {name!r} has the splits {', '.join(sorted(splits))}: training "
            "needs 'train'"
        )
    make = functools.partial(
        TextSource, name, data_dir or None, text_key=key, digest=_digest(builder)
    )
    return {
        split: make(split=split, size=splits[split].num_examples)
        for split in SPLITS
        if split in splits
    }


def _text_keys(features: Any) -> list[str]:
    import tensorflow_datasets as tfds

    kind = tfds.features.Text
    return sorted(key for key in features if isinstance(features[key], kind))


def _digest(builder: Any) -> str:
    """Tells a prepared set from others, without reading its examples."""
    digest = hashlib.sha256()
    for path in sorted(builder.data_path.iterdir()):
        digest.update(f"{path.name} {path.stat().length} ".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _prepared_builder(name: str, data_dir: str | None) -> Any:
    """Returns TFDS's reader of a set, or says in one line why there is none."""
    builder = _find_builder(name, data_dir)
    if not _is_prepared(builder) and ":" not in name:
        # An older prepared version serves as well as the one TFDS would make today.
        builder = _find_builder(f"{name}:*.*.*", data_dir)
    if not _is_prepared(builder):
        raise UserError(_how_to_prepare(name, builder))
    formats = {each.value for each in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise UserError(
            f"data set {name!r} in {builder.data_path} is stored as "
            f"{builder.info.file_format.value}, which only TensorFlow reads: "
            f"prepare it again with --file_format=array_record"
        )
    return builder


def _is_prepared(builder: Any) -> bool:
    # Looked up here, because TFDS logs a warning where the file is missing.
    return (builder.data_path / "dataset_info.json").exists()


def _find_builder(name: str, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        # TFDS prints a banner about TensorFlow; the message below says it in a line.
        with contextlib.redirect_stdout(io.StringIO()):
            return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        known = ["digits", "synthetic"]
        known += tfds.list_builders(with_community_datasets=False)
        hint = suggest(name, known) or "; check data.name and data.dir"
        raise UserError(
            f"data set {name!r} is unknown to TFDS and not found in {where}{hint}"
        ) from None
    except ValueError:
        raise UserError(
            f"data.name={name!r} is not a TFDS name: write name, name/config or "
            "name/config:version, as in cifar10"
        ) from None
    except ImportError as error:
        raise UserError(
            f"data set {name!r} needs a package that is not installed "
            f"({str(error).splitlines()[-1]}): install it, or choose another set"
        ) from None


def _how_to_prepare(name: str, builder: Any) -> str:
    root = str(builder.data_path).split(f"/{builder.name}/")[0]
    return (
        f"data set {name!r} is not prepared in {builder.data_path}: set data.dir to "
        "where it is, or prepare it once, on a machine with TensorFlow, with "
        f"`tfds build {name} --data_dir={root} --file_format=array_record`"
    )


def _feature_keys(name: str, features: Any) -> tuple[str, str]:
    """Finds the image and the class among the features of a set."""
    import tensorflow_datasets as tfds

    image_key = only_of_kind(features, tfds.features.Image, "image")
    label_key = only_of_kind(features, tfds.features.ClassLabel, "label")
    if image_key is None or label_key is None:
        raise UserError(
            f"data set {name!r} is not a set of images with one class each: "
            f"it has the features {', '.join(sorted(features))}"
        )
    image = features[image_key]
    if image.np_dtype != np.uint8 or image.shape[-1] not in (1, 3):
        raise UserError(
            f"data set {name!r} has images of shape {image.shape} and type "
            f"{np.dtype(image.np_dtype)}: only uint8 images of 1 or 3 channels are read"
        )
    return image_key, label_key


def _test_split(name: str, base: str, splits: list[str]) -> str:
    wanted = _LABELLED_TEST.get(base)
    candidates = [wanted] if wanted else ["test", "validation"]
    for split in candidates:
        if "train" in splits and split in splits:
            return split
    raise UserError(
        f"data set {name!r} has the splits {', '.join(splits)}: training needs "
        f"'train' and {' or '.join(repr(split) for split in candidates)}"
    )
