"""What is learned: the examples, and the network that learns them.

All that knows images and labels is here, in `objective` and in `teaching`.
"""

import dataclasses

from prunex_jax.data import Dataset
from prunex_jax.models import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is learned, and by which network."""

    dataset: Dataset  # The examples.
    model: Model  # The network at full width.
