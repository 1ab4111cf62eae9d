"""Reads examples, and places their batches on the mesh.

In: data settings and a seed. Out: a `Dataset` of three splits, and batches of it.

    open_dataset -> make_loader(...).batches(step) -> place_batch -> training step
                 -> evaluation_batches             -> place_batch -> evaluation step

`sources` opens a set of images (digits and synthetic, or by `folder`, `npz`,
`huggingface`, `tfds_source` and `cifar`) and cuts its validation split; `own` opens
examples of any other kind, and `fingerprint` tells data apart; `splits` is what is
opened; `order` and `shards` say which example comes when and at which host; `images`
makes pixels, with `rand_augment`, and `mixing` mixes two of them. `text` opens text:
`text_files` finds it, `tokenizer` makes tokens, `encoded` keeps them in files, `tokens`
cuts them into sequences, `masking` hides some of them, and `token_files` opens those of
others.
"""

from prunex_jax.data.images import Normalization
from prunex_jax.data.loader import VALID, Loader, evaluation_batches, make_loader
from prunex_jax.data.masking import ASKED, TARGET, MaskedSplit, Masking
from prunex_jax.data.mixing import LABEL_SHARE, MIXING, OTHER_LABEL
from prunex_jax.data.own import EXAMPLE, OWN, names_arrays, open_named, open_own
from prunex_jax.data.placement import batch_rows, place_batch, placed_shapes
from prunex_jax.data.sources import OF_IMAGES, open_dataset
from prunex_jax.data.splits import Batch, Dataset, ImageDataset, ImageSplit, Split
from prunex_jax.data.text import (
    OF_TEXT,
    TextDataset,
    is_text,
    open_text,
    without_effect,
)
from prunex_jax.data.tokens import BYTES

__all__ = [
    "ASKED",
    "BYTES",
    "EXAMPLE",
    "LABEL_SHARE",
    "MIXING",
    "OF_IMAGES",
    "OF_TEXT",
    "OTHER_LABEL",
    "OWN",
    "TARGET",
    "VALID",
    "Batch",
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
    "is_text",
    "make_loader",
    "names_arrays",
    "open_dataset",
    "open_named",
    "open_own",
    "open_text",
    "place_batch",
    "placed_shapes",
    "without_effect",
]
