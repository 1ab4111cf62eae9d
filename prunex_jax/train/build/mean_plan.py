"""Which networks of a run are averaged: for its own teacher, and its final network.

A mean over rounds at a high learning rate is a better network than any of them. It has
parameters only; batch statistics of its own are taken from some batches at the end.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

from prunex_jax.base.errors import UserError
from prunex_jax.train.build.rounds import Phase, RoundPlan


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
