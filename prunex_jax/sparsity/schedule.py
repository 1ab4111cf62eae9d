"""Says which density rules at which step of a run.

A run passes through a few stages of constant density: dense warm-up, falling stairs,
frozen mask. Densities become channel counts in `targets`.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_settings
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.sparsity.quanta import read_multiples
from prunex_jax.sparsity.settings import SparsityConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the run with one density.

    Attributes:
      start_step: First step of the stage; it ends where the next one starts.
      density: Share of the channels that is kept.
      is_frozen: Whether the mask stays as it is from here on.
    """

    start_step: int
    density: float
    is_frozen: bool


def validate_sparsity(config: SparsityConfig) -> None:
    """Refuses sparsity settings that contradict themselves.

    Args:
      config: The settings of a run.
    Raises:
      UserError: A number outside its range; a start after the freeze, or a freeze
        after the shrinking; more channels to remove than every group may lose; an
        unknown budget; an empty exclude pattern; a row of multiples that cannot be
        read.
    """
    check_settings(config, "sparsity")
    read_multiples(config.multiples)
    if config.start_share > config.freeze_share:
        raise UserError(
            f"sparsity.start_share = {config.start_share:g} is after "
            f"sparsity.freeze_share = {config.freeze_share:g}; prune first, then freeze"
        )
    if config.freeze_share > config.shrink_share:
        raise UserError(
            f"sparsity.shrink_share = {config.shrink_share:g} is before "
            f"sparsity.freeze_share = {config.freeze_share:g}; channels can be cut out "
            "when it is settled which ones, so raise it"
        )
    if config.unit == "channels" and config.sparsity > config.max_group_sparsity:
        raise UserError(
            f"sparsity.sparsity = {config.sparsity:g} of the channels is out of reach: "
            "no group may lose more than sparsity.max_group_sparsity = "
            f"{config.max_group_sparsity:g} of them; lower the one or raise the other"
        )
    if "" in config.exclude:
        raise UserError(
            "sparsity.exclude has an empty pattern '', which every name contains; "
            "set sparsity.sparsity = 0 to prune nothing"
        )


def density_stairs(
    config: SparsityConfig, total_steps: int, sync: SyncSchedule
) -> tuple[Stage, ...]:
    """Lays out the stages of a run.

    Dense until `start_share` of the run; then stair k of n, each lasting one n-th of
    the time until `freeze_share`, with

        density_k = 1 - sparsity * (1 - (1 - k / n)^3),   k = 1..n

    so that most channels go early, while the network can still recover; then frozen.
    The last stair has the final density already, with the mask still free, so that
    copies settle on it before it is frozen.

    Every stage starts where a round ends, rounded up, so that whole rounds have one
    density. Where that leaves no room for all stairs, later ones replace
    earlier ones that start at the same step; the frozen stage always gets at least one
    full round, earlier than `freeze_share` if need be.

    Args:
      config: Settings; sparsity 0 gives one dense stage, frozen from the start.
      total_steps: Length of the run.
      sync: When rounds end.
    Returns:
      Stages by strictly rising `start_step`, the first at 0, the last frozen at density
      1 - sparsity.
    Raises:
      UserError: Settings that `validate_sparsity` refuses, or a run in which no round
        happens.
    Example:
      >>> config = SparsityConfig(sparsity=0.5, num_stairs=2)
      >>> for stage in density_stairs(config, 100, SyncSchedule(4)):
      ...     print(stage.start_step, stage.density, stage.is_frozen)
      0 1.0 False
      12 0.5625 False
      32 0.5 False
      52 0.5 True

    References:
      Zhu and Gupta, To prune, or not to prune, 2017, arXiv:1710.01878 (the cubic).
    """
    validate_sparsity(config)
    if total_steps < 1:
        raise UserError(f"a run of {total_steps} steps is empty; give it at least 1")
    if config.sparsity == 0.0:
        return (Stage(0, 1.0, True),)
    last_end = sync.start_of(total_steps)
    if not last_end:
        raise UserError(
            f"a run of {total_steps} steps has no round with sync_period = "
            f"{sync.end_of(0)}, so nothing would be pruned; train longer or lower it"
        )

    def start_of(share: float) -> int:
        return step_of_share(share, total_steps, sync)

    last_start = sync.start_of(last_end - 1)
    freeze_step = min(start_of(config.freeze_share), last_start)
    densities = {0: 1.0}
    span = config.freeze_share - config.start_share
    for k in range(1, config.num_stairs + 1):
        progress = k / config.num_stairs
        start = start_of(config.start_share + span * (k - 1) / config.num_stairs)
        density = 1.0 - config.sparsity * (1.0 - (1.0 - progress) ** 3)
        densities[start] = density
    stairs = [
        Stage(s, d, False) for s, d in sorted(densities.items()) if s < freeze_step
    ]
    return (*stairs, Stage(freeze_step, 1.0 - config.sparsity, True))


def step_of_share(share: float, total_steps: int, sync: SyncSchedule) -> int:
    """Turns a share of a run into a step between two rounds, rounded up.

    Args:
      share: In [0, 1].
      total_steps: Length of the run.
      sync: When rounds end.
    Returns:
      Where a round ends, beyond the end of the run if need be.
    Example:
      >>> sync = SyncSchedule(4)
      >>> step_of_share(0.1, 1000, sync), step_of_share(0.5, 26, sync)
      (100, 16)
    """
    # The slack absorbs products such as 0.1 * 1000 = 100.00000000000001.
    step = max(0, math.ceil(share * total_steps - 1e-9))
    return sync.at_or_after(step)


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """Finds the stage that rules a step.

    Args:
      stages: From `density_stairs`.
      step: Counted from 0; past the end of the run the last stage rules.
    Returns:
      The last stage that starts at or before `step`.
    Raises:
      UserError: The step is before the first stage.
    """
    after = bisect.bisect_right(stages, step, key=lambda stage: stage.start_step)
    if after == 0:
        raise UserError(f"step {step} is before the first stage of the run")
    return stages[after - 1]
