"""What runs learn: the loss of a batch, and what is measured of a network.

In: batches and a network's answers. Out: a loss, and sums that become metrics. `base`
has the interface that the trainer knows, `classification` is that of labels, `language`
that of text, whole or with gaps, `own` takes networks, data and losses of the user's
own, and `table` says which of them settings mean.
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
from prunex_jax.tasks.language import Language, MaskedLanguage
from prunex_jax.tasks.own import Own, own_task
from prunex_jax.tasks.table import make_task

__all__ = [
    "LOSS",
    "TEACHER",
    "TEACHER_WEIGHT",
    "Batch",
    "Classification",
    "Language",
    "MaskedLanguage",
    "Metric",
    "Objective",
    "Own",
    "Sums",
    "Task",
    "make_task",
    "own_task",
]
