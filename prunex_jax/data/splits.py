"""Says what a data set is: three splits, of images or of anything else."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from prunex_jax.base.trees import PyTree
from prunex_jax.data.images import Images, Normalization, Pixels, Recipe
from prunex_jax.data.order import Positions, uniforms

Labels = npt.NDArray[np.int32]
# Any trees of numpy arrays, by name; the first axis of each is the batch.
Batch = dict[str, Any]
# Examples read at a time when a split is brought into memory.
_CHUNK = 512
SPLITS = ("train", "validation", "test")
# What splits are called -> which they are.
SPLIT_NAMES = {
    "train": "train",
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    "test": "test",
}


class Source(Protocol):
    """Random access to examples, batched: of images, of one stored split."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def read(self, indices: Positions) -> PyTree:
        """Returns a tree of arrays along the axis of `indices`, which may be empty.

        Of images, those, uint8[height, width, channels] each, and their labels.
        """


class Uncached:
    """A dataclass that is pickled as its fields alone.

    Open files and arrays do not travel to worker processes; they open and read their
    own.
    """

    def __getstate__(self) -> dict[str, Any]:
        fields: Any = self
        return {x.name: getattr(self, x.name) for x in dataclasses.fields(fields)}


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """A source that is in memory already: of images, a pair with their labels."""

    arrays: PyTree  # Arrays with all examples along their first axis.

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.arrays)[0])

    def read(self, indices: Positions) -> PyTree:
        """Returns copies of the examples at `indices`."""
        return jax.tree.map(lambda x: x[indices], self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class LateArrays(Uncached):
    """Arrays that come into memory at the first read."""

    make: Callable[[], PyTree]  # Picklable, for worker processes.
    size: int  # Number of examples, known before.

    def __len__(self) -> int:
        return self.size

    def read(self, indices: Positions) -> PyTree:
        """Returns copies of the examples at `indices`."""
        return self._made.read(indices)

    @functools.cached_property
    def _made(self) -> ArraySource:
        return ArraySource(self.make())


@dataclasses.dataclass(frozen=True)
class StoredSet:
    """What every kind of data set tells before the recipe is known."""

    name: str  # As the user wrote it.
    # Split -> its images. Without `validation`, a share of `train` becomes it.
    sources: Mapping[str, Source]
    num_classes: int  # Labels are 0 .. num_classes - 1.
    # Height, width, channels; None where images differ in size.
    image_shape: tuple[int | None, int | None, int]
    class_names: tuple[str, ...] = ()  # Name of every label; empty where they have none
    remarks: tuple[str, ...] = ()  # What people should know of it.


class Split(Protocol):
    """Part of a data set that one loop goes through.

    Grain's workers get copies by pickle.
    """

    @property
    def name(self) -> str:
        """train, validation or test."""

    @property
    def in_memory(self) -> bool:
        """Whether batches are made where they are used, or by grain while training."""

    def __len__(self) -> int:
        """Number of examples."""

    def training_batch(
        self, examples: Positions, positions: Positions, seed: int
    ) -> Batch:
        """Examples as training sees them.

        Args:
          examples: int64[batch], each in 0 .. len(self) - 1.
          positions: int64[batch], where they are in the endless stream: together with
            the seed they decide all that is random.
          seed: Of the run.
        Returns:
          The batch before `finished`; row k depends on row k of the arguments only.
        """

    def evaluation_batch(self, examples: Positions) -> Batch:
        """Examples as evaluation sees them, before `finished`; there may be none."""

    def finished(self, batch: Batch) -> Batch:
        """What is cheaper done once per batch, by the process that trains."""

    def why_no_labels(self) -> str:
        """Why `labels` cannot be asked for, and the remedy; empty if they can."""

    def labels(self) -> Labels:
        """All labels, int32[size], by which examples are dealt to hosts."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSplit(Uncached):
    """Labelled images; opened at the first read.

    Attributes:
      name: train, validation or test.
      source: Where the examples are.
      indices: int64[size], sorted, the examples of `source` that belong here.
      recipe: From stored images to batches.
      normalization: From uint8 to float32.
      in_memory: True keeps the split in memory; False reads it while training.
    """

    name: str
    source: Source
    indices: Positions
    recipe: Recipe
    normalization: Normalization
    in_memory: bool

    def __len__(self) -> int:
        return len(self.indices)

    def training_batch(
        self, examples: Positions, positions: Positions, seed: int
    ) -> Batch:
        """Augmented `image` uint8[batch, h, w, c] and `label` int32[batch]."""
        images, labels = self.read(examples)
        draws = uniforms(seed, positions, self.recipe.num_draws)
        return {"image": self.recipe.training_images(images, draws), "label": labels}

    def evaluation_batch(self, examples: Positions) -> Batch:
        """`image` uint8[batch, h, w, c] and `label` int32[batch]."""
        images, labels = self.read(examples)
        return {"image": self.recipe.evaluation_images(images), "label": labels}

    def finished(self, batch: Batch) -> Batch:
        """The batch with float32 images, as the model reads them."""
        images = np.asarray(batch["image"], np.uint8)
        return {**batch, "image": self.normalization.apply(images)}

    def read(self, examples: Positions) -> tuple[Images, Labels]:
        """Images as the recipe stores them, and labels, int32[batch].

        The images are one array where they are in memory.
        """
        if self.in_memory:
            images, labels = self._memory
            return images[examples], labels[examples]
        return self._read_stored(self.indices[examples])

    def labels(self) -> Labels:
        """Returns all labels, int32[size], of a split that is kept in memory."""
        assert not self.why_no_labels(), self.why_no_labels()
        return self._memory[1]

    def why_no_labels(self) -> str:
        """That the split is not in memory, if so."""
        if self.in_memory:
            return ""
        remedy = "set --config.data.loader=memory"
        if self.recipe.keeps_original_size:
            remedy += " (and another data.augment if images differ in size)"
        return f"and split {self.name!r} is not in memory: {remedy}"

    @functools.cached_property
    def _memory(self) -> tuple[Pixels, Labels]:
        num_chunks = -(-len(self) // _CHUNK)
        chunks = np.array_split(self.indices, max(num_chunks, 1))
        # Opens the source once, before the threads ask for it.
        self.source.read(self.indices[:1])
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            parts = list(pool.map(self._read_chunk, chunks))
        images, labels = zip(*parts, strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def _read_chunk(self, indices: Positions) -> tuple[Pixels, Labels]:
        images, labels = self._read_stored(indices)
        return np.stack(list(images)), labels

    def _read_stored(self, indices: Positions) -> tuple[Images, Labels]:
        images, labels = self.source.read(indices)
        return [self.recipe.stored(image) for image in images], labels


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """What is learned from, ready for training."""

    name: str  # As the user wrote it.
    train: Split  # What training goes through.
    validation: Split  # Held out, or given beside it; may be empty.
    test: Split  # Not opened before it is read; may be empty.

    @property
    def described(self) -> str:
        """What an example is, for people, after their number."""
        return "examples"

    def about(self) -> dict[str, Any]:
        """What an exported network says of what it has learned from."""
        return {"name": self.name}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset(Dataset):
    """An image classification set."""

    num_classes: int  # Labels are 0 .. num_classes - 1.
    image_shape: tuple[int, int, int]  # Height, width, channels in a batch.
    normalization: Normalization  # Per channel, shared by the splits.
    evaluation_share: float = 1.0  # Side of what evaluation sees of an image.
    class_names: tuple[str, ...] = ()  # Empty where they have none.
    remarks: tuple[str, ...] = ()  # What people should know of it.

    @property
    def described(self) -> str:
        """Size of the images, classes, and what else is to be said."""
        height, width, depth = self.image_shape
        size = f"images of {height}x{width}x{depth}, {self.num_classes} classes"
        return "; ".join([size, *self.remarks])

    def about(self) -> dict[str, Any]:
        """What has to be done to images, and what the classes mean."""
        height, width, channels = self.image_shape
        return {
            "name": self.name,
            "classes": {
                "count": self.num_classes,
                "names": list(self.class_names) or None,
            },
            "preprocessing": {
                "input": "uint8[height,width,channels], 0 to 255, RGB or grey",
                "crop": "largest centred rectangle of the wanted shape, sides times "
                "share",
                "crop_share": self.evaluation_share,
                "resize": "bilinear with antialiasing",
                "height": height,
                "width": width,
                "channels": channels,
                "normalize": "(x / 255 - mean) / std, per channel",
                "mean": list(self.normalization.mean),
                "std": list(self.normalization.std),
            },
        }
