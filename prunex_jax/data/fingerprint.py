"""Tells data apart: how many examples there are, their form, and what they hold."""

import hashlib
from typing import Any

import numpy as np

from prunex_jax.base.trees import flatten_by_path
from prunex_jax.data.order import Positions
from prunex_jax.data.own import OwnSplit
from prunex_jax.data.splits import SPLITS, Batch, Dataset, ImageSplit, Split

# Bytes that are read of a split in memory, and examples of one that is not.
_SAMPLE_BYTES = 2**26
_SAMPLE_SIZE = 32


def fingerprint_of(dataset: Dataset) -> dict[str, Any]:
    """What is described of a data set -> its value, which differs if it is another one.

    Evenly spaced examples are read: of a split in memory as many as fit into 64 MiB,
    which are mostly all, and 32 of others. The test split stays unread, and so does
    what a user's own data set holds, which may be another thing at every look, as where
    examples are augmented.
    """
    described: dict[str, Any] = {}
    for name in SPLITS:
        split = getattr(dataset, name)
        described[f"the number of examples in {name}"] = len(split)
        if len(split) and name != "test":
            first = _leaves(split, np.arange(1))
            form = [f"{k} {x.dtype}{list(x.shape[1:])}" for k, x in first.items()]
            described[f"the form of the examples in {name}"] = ", ".join(form)
            if isinstance(split, OwnSplit) and split.may_vary:
                continue
            # Samples of different sizes, as where another loader keeps the split in
            # memory, say nothing of each other: their names differ.
            sample = _sample(split, sum(x.nbytes for x in first.values()))
            what = f"the content of {len(sample)} examples in {name}"
            described[what] = _digest(split, sample)
    return described


def _sample(split: Split, bytes_of_one: int) -> Positions:
    """Evenly spaced examples, the first and the last among them."""
    is_quick = isinstance(split, OwnSplit) and split.is_loaded
    is_quick |= isinstance(split, ImageSplit) and split.in_memory
    count = _SAMPLE_BYTES // max(bytes_of_one, 1) if is_quick else _SAMPLE_SIZE
    count = min(max(count, _SAMPLE_SIZE), len(split))
    sample: Positions = np.arange(count) * (len(split) - 1) // max(count - 1, 1)
    return sample


def _leaves(split: Split, examples: Positions) -> dict[str, Any]:
    batch: Batch = split.evaluation_batch(examples)
    return {k: np.asarray(x) for k, x in sorted(flatten_by_path(batch).items())}


def _digest(split: Split, examples: Positions) -> str:
    content = hashlib.sha256()
    for path, array in _leaves(split, examples).items():
        content.update(f"{path} {array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).data)
    return content.hexdigest()[:16]
