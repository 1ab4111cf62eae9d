"""The interface between the trainer and what a run learns.

The trainer hands batches, any trees of arrays, to a task, and gets a loss and sums
back. It knows neither what the entries of a batch are, nor what is measured.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.data import VALID, Dataset
from prunex_jax.models import Model

Batch = Mapping[str, Any]
# float32[] each: what batches add up to.
Sums = dict[str, jax.Array]

# Entries of a batch: the teacher's answers, and their share of the loss of an example.
TEACHER = "teacher"
TEACHER_WEIGHT = "teacher_weight"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure of a network, mean over a split or over what was trained on."""

    name: str  # As in the log; summaries put the name of a split in front of it.
    label: str = ""  # On the line of progress; empty takes its name.
    is_share: bool = False  # Whether that line shows it in percent.


# What every task has.
LOSS = Metric("loss")


# (outputs, batch) -> float32[batch]: a figure of every example.
Measure = Callable[[PyTree, Batch], jax.Array]


class Objective(Protocol):
    """What a step minimises, and what is measured on the way.

    Called on one device with the examples that are there, inside of `shard_map`; sums
    are added up over devices and batches by who calls it.
    """

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What is reported; `LOSS` first."""

    @property
    def example(self) -> str:
        """What speed is counted in, in short: `img` of images per second."""

    @property
    def units_per_example(self) -> int:
        """How many of these an example is."""

    @property
    def can_be_taught(self) -> bool:
        """Whether `loss` heeds the answers of a teacher."""

    @property
    def unit(self) -> str:
        """The sum that losses are a mean over, such as examples or tokens."""

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the sums beside `loss`, the unit among them."""

    def inputs(self, batch: Batch) -> PyTree:
        """What the network reads of a batch."""

    def loss(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """What a step minimises: float32[], mean over the units of a device's batch."""

    def count(self, outputs: PyTree, batch: Batch) -> Sums:
        """What is counted in a batch: `counted`, without rows that are not `VALID`."""

    def score(self, outputs: PyTree, batch: Batch) -> Sums:
        """What evaluation adds up: `count`, and as `loss` the sum of plain losses."""

    def measures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of sums, arrays or numbers, by their names."""


def valid_rows(batch: Batch, size: int) -> jax.Array:
    """float32[size], 1 for the rows of a batch that count; all do in training."""
    valid: jax.Array = batch.get(VALID, jnp.ones(size, jnp.float32))
    return valid


def sum_valid(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Adds up float[batch, ...] where float32[batch] `valid` is 1.

    Other rows may hold anything, also no number.

    Example:
      >>> float(sum_valid(jnp.array([1.0, jnp.nan]), jnp.array([1.0, 0.0])))
      1.0
    """
    counts = valid.reshape(-1, *(1,) * (values.ndim - 1)) > 0
    return jnp.sum(jnp.where(counts, values, 0.0), dtype=jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is learned, and by which network."""

    dataset: Dataset  # The examples.
    model: Model  # The network at full width.
    objective: Objective  # What it minimises, and what is measured.
    warnings: tuple[str, ...] = ()  # What is odd about them, for people.
