"""Reads image classification sets and places their batches on the mesh.

In: data settings and a seed. Out: a `Dataset` of three splits, and batches of it.

    open_dataset -> make_loader(...).batches(step) -> place_batch -> training step
                 -> evaluation_batches             -> place_batch -> evaluation step

`sources` opens a set (digits and synthetic, or by `tfds_source`) and cuts its
validation split; `splits` is what is opened; `order` and `shards` say which example
comes when and at which host; `images` makes pixels.
"""

from prunex_jax.data.images import Normalization
from prunex_jax.data.loader import (
    Batch,
    BatchIterator,
    Loader,
    evaluation_batches,
    make_loader,
    num_evaluation_batches,
)
from prunex_jax.data.placement import batch_rows, place_batch
from prunex_jax.data.sources import open_dataset
from prunex_jax.data.splits import Dataset, Split

__all__ = [
    "Batch",
    "BatchIterator",
    "Dataset",
    "Loader",
    "Normalization",
    "Split",
    "batch_rows",
    "evaluation_batches",
    "make_loader",
    "num_evaluation_batches",
    "open_dataset",
    "place_batch",
]
