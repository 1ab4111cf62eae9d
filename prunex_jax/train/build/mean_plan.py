"""Which networks of a run are averaged: for its own teacher, and its final network.

A mean over rounds at a high learning rate is a better network than any of them. It has
parameters only; batch statistics of its own are taken from some batches at the end.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.train.build.rounds import Phase, RoundPlan


@dataclasses.dataclass(frozen=True)
class MeanPlan:
    """Which networks are in a mean: those at the ends of rounds, and the last one.

    Example:
      >>> plan = MeanPlan.over(25, complete=60, sync=SyncSchedule(10))
      >>> [step for step in range(100) if plan.gathers_after(step)]
      [40, 50, 60]
    """

    first: int  # Steps done when the first network is taken into the mean,
    complete: int  # and when the last one is.
    sync: SyncSchedule  # When networks change.

    @classmethod
    def over(cls, window: int, complete: int, sync: SyncSchedule | None) -> Self:
        """The networks of the last `window` steps, and at least the last one."""
        sync = sync or SyncSchedule(1)
        first = sync.at_or_after(max(complete - window, 1))
        return cls(min(first, complete), complete, sync)

    def gathers_after(self, num_steps: int) -> bool:
        """Whether the network is taken into the mean after so many steps."""
        if num_steps == self.complete:
            return True
        return self.first <= num_steps < self.complete and self.sync.is_due(num_steps)


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
    plan = MeanPlan.over(round(share * num_steps), num_steps, plans[-1].sync)
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
    if last.density == 1.0 or plan.sync is None:
        return 0
    left = math.inf if left_at is None else left_at + 1
    return max(plan.sync.end_of(last.start_step), (plan.shrink_step or 0) + 1, left)
