"""When exchanges happen, and of what kind: the sparsity schedule, round by round.

Turns the stages of `sparsity.schedule` into what the loop asks after every step. It
knows steps and counts only; what an exchange does is the method's business.
"""

import dataclasses

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import SparsityConfig
from prunex_jax.methods.transforms import RoundKind
from prunex_jax.sparsity import (
    Stage,
    density_stairs,
    stage_at,
    step_of_share,
)


@dataclasses.dataclass(frozen=True)
class Round:
    """One exchange.

    Attributes:
      stage: The stage it closes a part of.
      kind: Whether masks move, move for the last time, or stay.
    """

    stage: Stage
    kind: RoundKind


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """All exchanges of a run.

    Attributes:
      stages: Densities over steps.
      sync_period: Steps per round; 0 if the method has no exchange.
      total_steps: Length of the run. A last, shorter round ends it, so that no step is
        missing from the consensus.
      shrink_step: Steps after which dead channels are cut out and the small network
        trains on: those of the freezing round or of a later one. None if they are cut
        out at the end only.
    """

    stages: tuple[Stage, ...]
    sync_period: int
    total_steps: int
    shrink_step: int | None = None

    def round_after(self, num_steps: int) -> Round | None:
        """What happens when `num_steps` steps are done, if anything.

        Example:
          >>> stages = (Stage(0, 1.0, False), Stage(4, 0.5, False), Stage(8, 0.5, True))
          >>> plan = RoundPlan(stages, sync_period=4, total_steps=18)
          >>> for step in range(1, 19):
          ...     if due := plan.round_after(step):
          ...         print(step, due.stage.density, due.kind)
          4 1.0 frozen
          8 0.5 moving
          12 0.5 freeze
          16 0.5 frozen
          18 0.5 frozen
        """
        if not self.sync_period or num_steps < 1:
            return None
        if num_steps % self.sync_period and num_steps != self.total_steps:
            return None
        return self.round_at(num_steps)

    def round_at(self, num_steps: int) -> Round:
        """The round after so many steps, whether or not one is due."""
        stage = stage_at(self.stages, num_steps - 1)
        # With everything kept there is nothing to choose, and no score to send.
        is_dense = stage.density == 1.0
        if not stage.is_frozen:
            return Round(stage, "frozen" if is_dense else "moving")
        is_first = num_steps - self.sync_period <= stage.start_step
        return Round(stage, "freeze" if is_first and not is_dense else "frozen")


def make_round_plan(
    config: SparsityConfig, total_steps: int, sync_period: int, prunes: bool = True
) -> RoundPlan:
    """Lays out the exchanges of a run.

    Args:
      config: What is pruned, and when.
      total_steps: Length of the run.
      sync_period: Steps per round; 0 if the method has no exchange.
      prunes: Whether the method prunes; its exchanges are dense if not.
    Raises:
      UserError: A schedule in which nothing would be pruned, or none is left to train
        the small network.
    """
    if not (sync_period and prunes):
        return RoundPlan((Stage(0, 1.0, True),), sync_period, total_steps)
    stages = density_stairs(config, total_steps, sync_period)
    shrink_step = _shrink_step(config, stages[-1], total_steps, sync_period)
    return RoundPlan(stages, sync_period, total_steps, shrink_step)


def _shrink_step(
    config: SparsityConfig, frozen: Stage, total_steps: int, sync_period: int
) -> int | None:
    """When the small network takes over, if it does before the end."""
    if config.shrink_share == 1.0 or frozen.density == 1.0:
        return None
    # The first round of the frozen stage settles the masks.
    step = max(
        step_of_share(config.shrink_share, total_steps, sync_period),
        frozen.start_step + sync_period,
    )
    if step >= total_steps:
        raise UserError(
            f"sparsity.shrink_share = {config.shrink_share:g} leaves the small network "
            f"no step: dead channels would be cut out after step {step} of "
            f"{total_steps}; lower it and sparsity.freeze_share, train longer, or set "
            "it to 1 to cut them out at the end"
        )
    return step
