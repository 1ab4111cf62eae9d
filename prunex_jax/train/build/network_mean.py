"""Means of the networks of a run: its own teacher, and its final network.

A mean over rounds at a high learning rate is a better network than any of them. It has
parameters only; batch statistics of its own are taken from some batches at the end.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import AnyMesh, sharding_on
from prunex_jax.models import Model
from prunex_jax.tasks import Batch
from prunex_jax.train.build.rounds import Phase, RoundPlan
from prunex_jax.train.steps.programs import Programs
from prunex_jax.train.steps.state import Totals, TrainState

# Training batches from which the batch statistics of a mean are taken.
STATISTICS_BATCHES = 32


class NetworkMean(NamedTuple):
    """The mean of some networks of a run; replicated, saved with its checkpoints."""

    params: PyTree
    statistics: PyTree  # Zero until the mean is complete.
    num_networks: jax.Array  # float32[]: in the mean so far.


class SavedRun(NamedTuple):
    """What a checkpoint holds: the training state, and means of networks.

    The first fields are those of `TrainState`, so that its parts keep their paths.
    """

    step: jax.Array
    params: PyTree
    statistics: PyTree
    opt_state: PyTree
    totals: Totals
    own_teacher: NetworkMean | None = None
    final_mean: NetworkMean | None = None

    @property
    def state(self) -> TrainState:
        """The training state."""
        parts: tuple[Any, ...] = self
        return TrainState(*parts[: len(TrainState._fields)])


@dataclasses.dataclass(frozen=True)
class MeanPlan:
    """Which networks are in a mean: some at equal distances, the last one included.

    Example:
      >>> plan = MeanPlan.over(25, complete=60, period=10)
      >>> [step for step in range(100) if plan.gathers_after(step)]
      [40, 50, 60]
    """

    first: int  # Steps done when the first network is taken into the mean,
    complete: int  # and when the last one is.
    period: int  # Steps from one network to the next.

    @classmethod
    def over(cls, window: int, complete: int, period: int) -> Self:
        """The networks of the last `window` steps, and at least the last one."""
        period = max(period, 1)
        window = min(window, complete - 1)
        return cls(complete - window // period * period, complete, period)

    def gathers_after(self, num_steps: int) -> bool:
        """Whether the network is taken into the mean after so many steps."""
        is_inside = self.first <= num_steps <= self.complete
        return is_inside and (self.complete - num_steps) % self.period == 0


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


def with_statistics(
    mean: NetworkMean,
    programs: Programs,
    state: TrainState,
    batches: Iterable[Batch],
) -> NetworkMean:
    """Completes a mean with batch statistics of its own, which it has never had.

    Args:
      mean: The mean.
      programs: Those of the run.
      state: Its training state, which stays as it is.
      batches: What statistics are taken from.
    Collectives:
      Those of `step.Programs.network`.
    """
    statistics = state.statistics
    for number, batch in enumerate(batches):
        statistics = programs.estimate(mean.params, statistics, batch, number)
    _, found = programs.network(state._replace(statistics=statistics))
    return mean._replace(statistics=found)


def final_mean_plan(
    share: float, num_steps: int, plans: Sequence[RoundPlan], phases: Sequence[Phase]
) -> MeanPlan | None:
    """The networks that the final one is the mean of; None if it is the last one.

    Args:
      share: Share of the run, at its end.
      num_steps: Length of the run.
      plans: Rounds of its methods, one after the other.
      phases: What starts them.
    Raises:
      UserError: Channels would go while networks are averaged.
    """
    if not share:
        return None
    plan = MeanPlan.over(round(share * num_steps), num_steps, plans[-1].sync_period)
    starts = [phase.trigger.step for phase in phases[1:]]
    settled = max(map(_settled_step, plans, [*starts, 0]))
    if plan.first < settled:
        until = "an unknown step" if settled == math.inf else f"step {settled}"
        raise UserError(
            f"run.average_share={share:g} averages networks from step {plan.first} on, "
            f"and channels go until {until}; lower it, prune earlier, or start the "
            "method after the pruning one at a step"
        )
    return plan


def _settled_step(plan: RoundPlan, left_at: int | None) -> float:
    """Steps done when the network loses nothing more with a method.

    The cut of a method that prunes is at the latest where the next one starts, which
    is at `left_at`, 0 if there is none, or None if a metric decides.
    """
    last = plan.stages[-1]
    if last.density == 1.0:
        return 0
    left = math.inf if left_at is None else left_at + 1
    return max(last.start_step + plan.sync_period, (plan.shrink_step or 0) + 1, left)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, zeros.__getitem__)
