"""What runs learn: the loss of a batch, and what is measured of a network.

In: batches and a network's answers. Out: a loss, and sums that become metrics. `base`
has the interface that the trainer knows, `classification` that of labelled images.
"""

from prunex_jax.tasks.base import (
    LOSS,
    TEACHER,
    TEACHER_WEIGHT,
    VALID,
    Batch,
    Metric,
    Objective,
    Sums,
    Task,
)
from prunex_jax.tasks.classification import Classification

__all__ = [
    "LOSS",
    "TEACHER",
    "TEACHER_WEIGHT",
    "VALID",
    "Batch",
    "Classification",
    "Metric",
    "Objective",
    "Sums",
    "Task",
]
