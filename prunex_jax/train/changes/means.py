"""The means of networks that a run keeps: of its own teacher, and of its end."""

import itertools
from typing import NamedTuple

from prunex_jax.models import Model
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.build.network_mean import (
    STATISTICS_BATCHES,
    MeanPlan,
    NetworkMean,
    empty_mean,
    with_network,
    with_statistics,
)
from prunex_jax.train.steps.state import TrainState


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


def _gathered(
    plan: MeanPlan,
    model: Model,
    mean: NetworkMean | None,
    experiment: Experiment,
    step: int,
    state: TrainState,
) -> NetworkMean | None:
    """A mean, with the network of now where it is one of its networks."""
    programs = experiment.current.programs
    if plan.gathers_after(step):
        if mean is None:
            mean = empty_mean(model, experiment.mesh)
        mean = with_network(mean, programs, state)
    if mean is not None and step == plan.complete:
        with experiment.batches(step) as batches:
            coming = itertools.islice(batches, STATISTICS_BATCHES)
            mean = with_statistics(mean, programs, state, coming)
    return mean
