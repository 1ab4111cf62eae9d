"""Trained weights in files that others have written.

In: safetensors with the names of torchvision, timm or Hugging Face. Out: arrays by the
paths of our parameters. `files` reads, `table` says what a table of names is and does
what it says, and each of the other modules is the table of one layout. Nothing is
unpickled.
"""

from prunex_jax.models.weights.files import Tensors, read_tensors
from prunex_jax.models.weights.layouts import LAYOUTS, Converted, to_ours
from prunex_jax.models.weights.table import Layout, Row

__all__ = [
    "LAYOUTS",
    "Converted",
    "Layout",
    "Row",
    "Tensors",
    "read_tensors",
    "to_ours",
]
