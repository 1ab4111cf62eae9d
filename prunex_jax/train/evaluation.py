"""Scores a network on a split, every example once, on all devices of the mesh."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prunex_jax.base.trees import PyTree
from prunex_jax.data import Split, evaluation_batches, place_batch
from prunex_jax.mesh import AnyMesh
from prunex_jax.train.program import Program


class Result(NamedTuple):
    """Means over a split."""

    loss: float
    accuracy: float
    examples: int


def evaluate_split(
    program: Program,
    params: PyTree,
    statistics: PyTree,
    split: Split,
    *,
    mesh: AnyMesh,
    batch_size: int,
    rows: np.ndarray,
    num_workers: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result | None:
    """Evaluates a network.

    Args:
      program: `step.Programs.evaluate` of this network's model.
      params: Replicated over the mesh.
      statistics: Replicated over the mesh.
      split: What it is scored on.
      mesh: The mesh.
      batch_size: Examples per batch over the whole mesh.
      rows: Rows of the batch that this process produces.
      num_workers: Worker processes where the split is not in memory.
      should_stop: Asked before every batch, the same on every process.
    Returns:
      Means over all examples, or None if it was stopped.
    Collectives:
      One sum over the mesh of three numbers per batch.
    """
    loss = correct = examples = 0.0
    with evaluation_batches(split, batch_size, rows, num_workers) as batches:
        for batch in batches:
            if should_stop():
                return None
            score = program(params, statistics, place_batch(batch, mesh, rows))
            loss += float(score.loss)
            correct += float(score.correct)
            examples += float(score.examples)
    if not examples:
        return None
    return Result(loss / examples, correct / examples, round(examples))
