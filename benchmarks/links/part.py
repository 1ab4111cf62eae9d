"""A part of a split, spread evenly over it, where scoring all of it takes too long."""

import dataclasses

import numpy as np

from prunex_jax.data import Batch, Split
from prunex_jax.data.order import Positions
from prunex_jax.data.splits import Labels


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """So many examples of a split; see `Split`."""

    split: Split
    count: int

    @property
    def name(self) -> str:
        """As the split."""
        return self.split.name

    @property
    def in_memory(self) -> bool:
        """As the split."""
        return self.split.in_memory

    def __len__(self) -> int:
        """Number of examples."""
        return self.count

    def training_batch(
        self, examples: Positions, positions: Positions, seed: int
    ) -> Batch:
        """As that of the split."""
        return self.split.training_batch(self._whole(examples), positions, seed)

    def evaluation_batch(self, examples: Positions) -> Batch:
        """As that of the split."""
        return self.split.evaluation_batch(self._whole(examples))

    def finished(self, batch: Batch) -> Batch:
        """As the split."""
        return self.split.finished(batch)

    def why_no_labels(self) -> str:
        """As the split."""
        return self.split.why_no_labels()

    def labels(self) -> Labels:
        """Those of the part, int32[count]."""
        return self.split.labels()[self._whole(np.arange(self.count))]

    def _whole(self, examples: Positions) -> Positions:
        """Where examples of the part are in the split."""
        return examples * len(self.split) // self.count


def part_of(split: Split, count: int) -> Split:
    """A part of a split; all of it for 0, or more than it has.

    Args:
      split: The whole.
      count: Number of examples.
    Example:
      >>> from prunex_jax.data.settings import DataConfig
      >>> from prunex_jax.data import open_dataset
      >>> split = open_dataset(DataConfig(), seed=0).test
      >>> part = part_of(split, 3)
      >>> part.labels().tolist() == split.labels()[[0, 119, 239]].tolist(), len(part)
      (True, 3)
    """
    if not 0 < count < len(split):
        return split
    return _Part(split, count)
