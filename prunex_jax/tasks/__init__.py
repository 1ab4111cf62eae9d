"""What runs learn: the loss of a batch, and what is measured of a network.

In: batches and a network's answers. Out: a loss, and sums that become metrics. `base`
has the interface that the trainer knows, `classification` that of labelled images, and
`own` takes networks, data and losses of the user's own.
"""

from prunex_jax.tasks.base import (
    LOSS,
    TEACHER,
    TEACHER_WEIGHT,
    Batch,
    Metric,
    Objective,
    Sums,
    Task,
)
from prunex_jax.tasks.classification import Classification
from prunex_jax.tasks.own import Own, own_task

__all__ = [
    "LOSS",
    "TEACHER",
    "TEACHER_WEIGHT",
    "Batch",
    "Classification",
    "Metric",
    "Objective",
    "Own",
    "Sums",
    "Task",
    "own_task",
]
