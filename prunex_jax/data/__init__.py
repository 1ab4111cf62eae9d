"""Reads image classification sets and places their batches on the mesh.

    open_dataset -> make_loader(...).batches(step) -> place_batch -> training step
                 -> evaluation_batches             -> place_batch -> evaluation step

Owns: sources, order, augmentation, reading ahead, padding, placement of batches.
Leaves to others: the mesh (topology) and what is done with a batch (step).
"""

from prunex_jax.data.augment import Normalization
from prunex_jax.data.evaluation import evaluation_batches, num_evaluation_batches
from prunex_jax.data.examples import Batch
from prunex_jax.data.loader import BatchIterator, Loader, make_loader
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
