"""The means of networks that a run keeps: of its own teacher, and of its end."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from prunex_jax.mesh import AnyMesh, sharding_on
from prunex_jax.models import Model
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.build.mean_plan import MeanPlan
from prunex_jax.train.steps.programs import Programs
from prunex_jax.train.steps.state import NetworkMean, TrainState

# Training batches from which the batch statistics of a mean are taken.
_STATISTICS_BATCHES = 32


class Means(NamedTuple):
    """Each from its first network on; None before, and where the run has none."""

    own_teacher: NetworkMean | None = None
    final: NetworkMean | None = None  # What the final network is.


def gather_means(
    means: Means, experiment: Experiment, step: int, state: TrainState
) -> tuple[Means, str]:
    """Takes the network of now into the means that it is one of.

    Args:
      means: Those so far, which are donated.
      experiment: The run.
      step: Steps done.
      state: What is trained.
    Returns:
      The means, and what people are told of them, or nothing.
    """
    teaching, news = experiment.teaching, ""
    if teaching is not None and teaching.own is not None:
        model = experiment.task.model
        own = _gathered(teaching.own, model, means.own_teacher, experiment, step, state)
        if own is not None and step == teaching.own.complete:
            count = round(float(own.num_networks))
            news = f"learns from the mean of its last {count} networks"
        keeps = teaching.holds_own_after(step)
        means = means._replace(own_teacher=own if keeps else None)
    if experiment.final_mean is not None:
        plan, model = experiment.final_mean, experiment.current.model
        final = _gathered(plan, model, means.final, experiment, step, state)
        means = means._replace(final=final)
    return means, news


def shapes_of_mean(model: Model, mesh: AnyMesh) -> NetworkMean:
    """Shapes, types and shardings of the mean of networks of a model."""
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    everywhere = sharding_on(mesh, jax.P())
    count: Any = jax.ShapeDtypeStruct((), np.float32)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
        NetworkMean(params, statistics, count),
    )


def empty_mean(model: Model, mesh: AnyMesh) -> NetworkMean:
    """The mean of no network of a model yet."""
    return jax.tree.map(_zeros, shapes_of_mean(model, mesh))


def with_network(
    mean: NetworkMean, programs: Programs, state: TrainState
) -> NetworkMean:
    """Takes the network that a state stands for into a mean; sends nothing.

    Args:
      mean: The mean so far, which is donated.
      programs: Those of the run.
      state: Its training state.
    """
    params = programs.average(mean.params, mean.num_networks, state)
    return mean._replace(params=params, num_networks=mean.num_networks + 1)


def _gathered(
    plan: MeanPlan,
    model: Model,
    mean: NetworkMean | None,
    experiment: Experiment,
    step: int,
    state: TrainState,
) -> NetworkMean | None:
    """A mean, with the network of now where it is one of its networks."""
    if plan.gathers_after(step):
        if mean is None:
            mean = empty_mean(model, experiment.mesh)
        mean = with_network(mean, experiment.current.programs, state)
    if mean is not None and step == plan.complete:
        return _with_statistics(mean, experiment, step, state)
    return mean


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


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, zeros.__getitem__)
