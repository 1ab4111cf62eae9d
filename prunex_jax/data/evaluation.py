"""Goes through a split once, so that every example counts exactly once.

Owns: padding and the `valid` mask.
Leaves to others: sums over the mask (metrics), placement.
Flow: like loader, without order and augmentation.
"""

from collections.abc import Generator

import numpy as np

from prunex_jax.data.examples import Batch, EvaluationExamples, normalized
from prunex_jax.data.loader import BatchIterator, ElementSource, read_with_grain
from prunex_jax.data.order import Positions
from prunex_jax.data.splits import Split


def num_evaluation_batches(split: Split, batch_size: int) -> int:
    """Returns the number of batches of one evaluation, equal on every process."""
    return -(-len(split) // batch_size)


def evaluation_batches(
    split: Split, batch_size: int, rows: Positions, num_workers: int = 0
) -> BatchIterator:
    """Returns an iterator over one evaluation of a split.

    Every process gets the same number of batches, whatever the size of the split; the
    last batch is padded with black images of label 0, and `valid` is 0.0 for them.

    Args:
      split: What is evaluated; an empty split has no batches.
      batch_size: Rows of the global batch.
      rows: int64[local], rows that this process produces.
      num_workers: Worker processes where the split is not in memory.
    Returns:
      Dicts with `image` float32[local, h, w, c], `label` int32[local] and `valid`
      float32[local].

    Example:
      >>> from prunex_jax.base.settings import DataConfig
      >>> from prunex_jax.data import open_dataset
      >>> digits = open_dataset(DataConfig(), seed=0)
      >>> with evaluation_batches(digits.test, 64, np.arange(64)) as batches:
      ...     counted = sum(batch["valid"].sum() for batch in batches)
      >>> int(counted) == len(digits.test)
      True
    """
    rows = np.asarray(rows, np.int64)
    return BatchIterator(_generate(split, batch_size, rows, num_workers))


def _generate(
    split: Split, batch_size: int, rows: Positions, num_workers: int
) -> Generator[Batch, None, None]:
    examples = EvaluationExamples(split)
    num_batches = num_evaluation_batches(split, batch_size)
    if split.in_memory or not num_batches:
        for first in range(0, num_batches * batch_size, batch_size):
            yield normalized(examples(first + rows), split.normalization)
        return
    source = ElementSource(examples, batch_size, rows, 0, num_batches)
    for batch in read_with_grain(source, len(rows), num_workers):
        yield normalized(batch, split.normalization)
