"""The mean of networks that a run learns from: its own teacher."""

import itertools
from typing import Any

import jax
import numpy as np

from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.steps.compiled import shapes_on
from prunex_jax.train.steps.state import NetworkMean, TrainState

# Training batches from which the batch statistics of a mean are taken.
_STATISTICS_BATCHES = 32


def gather_own_teacher(
    own: NetworkMean | None, experiment: Experiment, step: int, state: TrainState
) -> tuple[NetworkMean | None, str]:
    """Takes the network of now into the run's own teacher, where it is one of its.

    The teacher so far is donated; it is None before its first network.

    Returns:
      The teacher, None where the run has none or asks it no more; and what people are
      told of it, or nothing.
    """
    teaching, news = experiment.teaching, ""
    if teaching is None or teaching.own is None:
        return None, news
    if teaching.own.gathers_after(step):
        own = with_network(own, experiment, state)
    if own is not None and step == teaching.own.complete:
        own = _with_statistics(own, experiment, step, state)
        count = round(float(own.num_networks))
        news = f"learns from the mean of its last {count} networks"
    return own if teaching.holds_own_after(step) else None, news


def with_network(
    mean: NetworkMean | None, experiment: Experiment, state: TrainState
) -> NetworkMean:
    """Takes the network of a state into a mean, which is donated; sends nothing."""
    mean = _nothing(experiment) if mean is None else mean
    average = experiment.current.programs.average
    params = average(mean.params, mean.num_networks, state)
    return mean._replace(params=params, num_networks=mean.num_networks + 1)


def shapes_of_mean(experiment: Experiment) -> NetworkMean:
    """Shapes, types and shardings of a mean of networks at full width."""
    init, count = experiment.task.model.init, jax.ShapeDtypeStruct((), np.float32)
    params, statistics = jax.eval_shape(init, jax.random.key(0))
    shapes: Any = (params, statistics, count)
    return shapes_on(experiment.mesh, jax.P(), NetworkMean(*shapes))


def _nothing(experiment: Experiment) -> NetworkMean:
    """The mean of no network yet."""

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        part = np.zeros(like.shape, like.dtype).__getitem__
        return jax.make_array_from_callback(like.shape, like.sharding, part)

    return jax.tree.map(zeros, shapes_of_mean(experiment))


def _with_statistics(
    mean: NetworkMean, experiment: Experiment, step: int, state: TrainState
) -> NetworkMean:
    """Completes a mean with batch statistics of its own, which it has never had.

    Collectives:
      Those of `programs.Programs.network`.
    """
    programs, statistics = experiment.current.programs, state.statistics
    with experiment.batches(step) as batches:
        coming = itertools.islice(batches, _STATISTICS_BATCHES)
        for number, batch in enumerate(coming):
            statistics = programs.estimate(mean.params, statistics, batch, number)
    _, found = programs.network(state._replace(statistics=statistics))
    return mean._replace(statistics=found)
