"""Says what a data set is: three splits with a shared recipe and normalisation."""

import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prunex_jax.data.images import Images, Normalization, Pixels, Recipe
from prunex_jax.data.order import Positions

Labels = npt.NDArray[np.int32]
# Examples read at a time when a split is brought into memory.
_CHUNK = 512


class Source(Protocol):
    """Random access to the decoded examples of one stored split."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def read(self, indices: Positions) -> tuple[Images, Labels]:
        """Returns the images, uint8[height, width, channels] each, and their labels."""
        ...


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A source that is in memory already."""

    images: Pixels  # uint8[size, height, width, channels].
    labels: Labels  # int32[size].

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Positions) -> tuple[Images, Labels]:
        """Returns copies of the examples at `indices`."""
        return self.images[indices], self.labels[indices]


@dataclasses.dataclass(frozen=True)
class StoredSplit:
    """One split as a data set stores it, before anything is read from it."""

    # Opens it; called at the first read, and picklable for worker processes.
    open: Callable[[], Source]
    num_examples: int  # Its length, known without opening it.


@dataclasses.dataclass(frozen=True)
class StoredSet:
    """What every kind of data set tells before the recipe is known."""

    name: str  # As the user wrote it.
    train: StoredSplit  # Training split, which validation is taken from.
    test: StoredSplit  # Test split.
    num_classes: int  # Labels are 0 .. num_classes - 1.
    # Height, width, channels; None where images differ in size.
    image_shape: tuple[int | None, int | None, int]
    class_names: tuple[str, ...] = ()  # Name of every label; empty where they have none


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Part of a data set that one loop goes through; opened at the first read.

    Attributes:
      name: train, validation or test.
      stored: Where the examples are.
      indices: int64[size], sorted, the examples of `stored` that belong here.
      recipe: From stored images to batches.
      normalization: From uint8 to float32.
      in_memory: True keeps the split in memory; False reads it while training.
    """

    name: str
    stored: StoredSplit
    indices: Positions
    recipe: Recipe
    normalization: Normalization
    in_memory: bool

    def __len__(self) -> int:
        return len(self.indices)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens the split itself; nothing cached travels.
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields}

    def read(self, examples: Positions) -> tuple[Images, Labels]:
        """Reads examples of this split.

        Args:
          examples: int64[batch], each in 0 .. len(self) - 1.
        Returns:
          The images as the recipe stores them (one array where they are in memory),
          and int32[batch] labels.
        """
        if self.in_memory:
            images, labels = self._memory
            return images[examples], labels[examples]
        return self._read_stored(self.indices[examples])

    def labels(self) -> Labels:
        """Returns all labels, int32[size], of a split that is kept in memory."""
        assert self.in_memory, f"split {self.name!r} is not in memory"
        return self._memory[1]

    @functools.cached_property
    def _source(self) -> Source:
        return self.stored.open()

    @functools.cached_property
    def _memory(self) -> tuple[Pixels, Labels]:
        num_chunks = -(-len(self) // _CHUNK)
        chunks = np.array_split(self.indices, max(num_chunks, 1))
        _ = self._source  # Opened once, before the threads ask for it.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            parts = list(pool.map(self._read_chunk, chunks))
        images, labels = zip(*parts, strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def _read_chunk(self, indices: Positions) -> tuple[Pixels, Labels]:
        images, labels = self._read_stored(indices)
        return np.stack(list(images)), labels

    def _read_stored(self, indices: Positions) -> tuple[Images, Labels]:
        images, labels = self._source.read(indices)
        return [self.recipe.stored(image) for image in images], labels


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """An image classification set, ready for training.

    Attributes:
      name: As the user wrote it.
      num_classes: Labels are 0 .. num_classes - 1.
      image_shape: Height, width and channels of the images in a batch.
      train: What training goes through.
      validation: Held out of the stored training split; empty for share 0.
      test: The stored test split, not opened before it is read.
      normalization: Mean and standard deviation per channel, shared by the splits.
      class_names: Name of every label; empty where they have none.
    """

    name: str
    num_classes: int
    image_shape: tuple[int, int, int]
    train: Split
    validation: Split
    test: Split
    normalization: Normalization
    class_names: tuple[str, ...] = ()
