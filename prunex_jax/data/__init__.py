"""Reads examples, and places their batches on the mesh.

In: data settings and a seed. Out: a `Dataset` of three splits, and batches of it.

    open_dataset -> make_loader(...).batches(step) -> place_batch -> training step
                 -> evaluation_batches             -> place_batch -> evaluation step

`sources` opens a set (digits and synthetic, or by `tfds_source`) and cuts its
validation split; `splits` is what is opened; `order` and `shards` say which example
comes when and at which host; `images` makes pixels, and `masking` hides tokens of text.
"""

from prunex_jax.data.images import Normalization
from prunex_jax.data.loader import (
    VALID,
    BatchIterator,
    Loader,
    evaluation_batches,
    make_loader,
    num_evaluation_batches,
)
from prunex_jax.data.masking import ASKED, TARGET, MaskedSplit, Masking
from prunex_jax.data.own import EXAMPLE, OWN, open_own
from prunex_jax.data.placement import batch_rows, place_batch
from prunex_jax.data.sources import open_dataset
from prunex_jax.data.splits import Batch, Dataset, ImageDataset, ImageSplit, Split
from prunex_jax.data.text import NUM_TOKENS, TextDataset, open_stdlib

__all__ = [
    "ASKED",
    "EXAMPLE",
    "NUM_TOKENS",
    "OWN",
    "TARGET",
    "VALID",
    "Batch",
    "BatchIterator",
    "Dataset",
    "ImageDataset",
    "ImageSplit",
    "Loader",
    "MaskedSplit",
    "Masking",
    "Normalization",
    "Split",
    "TextDataset",
    "batch_rows",
    "evaluation_batches",
    "make_loader",
    "num_evaluation_batches",
    "open_dataset",
    "open_own",
    "open_stdlib",
    "place_batch",
]
