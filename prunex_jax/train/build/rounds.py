"""When things happen: which method at which step, and which exchange after which.

A schedule of methods is a list of entries, `method` or `method @ trigger`:

    ('dense', 'hsadmm @ 0.1', 'diloco @ 0.6')
    ('dense', 'topk @ accuracy > 0.5', 'dgc @ step 4000')

A trigger is a share of the run, a step, or a metric of the log with a bound; the first
entry starts the run and has none. Within a phase, the sparsity schedule says which
exchange chooses how many channels.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.methods import MethodConfig, RoundKind, check_method
from prunex_jax.sparsity import Stage, density_stairs, stage_at, step_of_share
from prunex_jax.sparsity.settings import SparsityConfig

_ENTRY = re.compile(r"\s*(\w+)\s*(?:@\s*(.*?)\s*)?")
_STEP = re.compile(r"step\s+(\d+)")
_BOUND = re.compile(r"(\w+)\s*([<>])\s*(\S+)")


@dataclasses.dataclass(frozen=True)
class Trigger:
    """What starts a phase: a step, or a metric beyond a bound."""

    step: int | None  # Steps done; None for a metric.
    metric: str = ""  # Of training or validation; empty for a step.
    is_above: bool = False  # Whether it must exceed the bound, or else stay below it.
    bound: float = 0.0  # The bound.

    def __str__(self) -> str:
        """When it is, for people."""
        if self.step is not None:
            return f"from step {self.step}"
        return f"once {self.metric} {'>' if self.is_above else '<'} {self.bound:g}"

    def is_due(self, num_steps: int, metrics: Mapping[str, float]) -> bool:
        """Whether the phase starts now.

        Example:
          >>> Trigger(None, 'accuracy', True, 0.9).is_due(10, {'accuracy': 0.95})
          True
        """
        if self.step is not None:
            return num_steps >= self.step
        if self.metric not in metrics:
            return False
        value = metrics[self.metric]
        return value > self.bound if self.is_above else value < self.bound


@dataclasses.dataclass(frozen=True)
class Phase:
    """One method of a run, by its key in `methods.METHODS`, and what starts it."""

    method: str
    trigger: Trigger


def parse_phases(
    config: MethodConfig, total_steps: int, metrics: Sequence[str]
) -> tuple[Phase, ...]:
    """Reads the schedule of methods.

    Args:
      config: Has the schedule.
      total_steps: Length of the run.
      metrics: What the log has of training since its last row; of the last validation
        it has the same, with `validation_` in front.
    Raises:
      UserError: An entry that means nothing, names no method, or starts before the one
        in front of it or after the run.
    Example:
      >>> from prunex_jax.methods import method_config
      >>> config = method_config(schedule=('dense', 'hsadmm @ 0.1', 'diloco @ step 80'))
      >>> [(p.method, p.trigger.step) for p in parse_phases(config, 100, ['loss'])]
      [('dense', 0), ('hsadmm', 10), ('diloco', 80)]
    """
    if not config.schedule:
        check_method(config.name)
        return (Phase(config.name, Trigger(0)),)
    known = (*metrics, *(f"validation_{name}" for name in metrics))
    phases, last = list[Phase](), 0
    for entry in config.schedule:
        phase = _phase(entry, not phases, total_steps, known)
        step = phase.trigger.step
        if phases and step is not None:
            if not last < step < total_steps:
                raise _refusal(
                    entry,
                    f", which is step {step}; it must lie after step {last} and before "
                    f"the end, step {total_steps}",
                )
            last = step
        phases.append(phase)
    return tuple(phases)


def _phase(
    entry: str, is_first: bool, total_steps: int, metrics: Sequence[str]
) -> Phase:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise _refusal(entry, "; write method or method @ trigger")
    name, trigger = found.groups()
    check_method(name, "config.method.schedule")
    if is_first and trigger is not None:
        raise _refusal(entry, ", which starts the run, so it takes no trigger")
    if not is_first and trigger is None:
        needed = "needs a trigger, such as `@ 0.3` or `@ accuracy > 0.9`"
        raise _refusal(entry, f", which {needed}")
    if trigger is None:
        return Phase(name, Trigger(0))
    return Phase(name, _trigger(trigger, entry, total_steps, metrics))


def _trigger(
    text: str, entry: str, total_steps: int, metrics: Sequence[str]
) -> Trigger:
    if step := _STEP.fullmatch(text):
        return Trigger(int(step[1]))
    if bound := _BOUND.fullmatch(text):
        metric, sign, number = bound.groups()
        if metric not in metrics:
            known = f"{suggest(metric, metrics)} (known: {', '.join(metrics)})"
            raise _refusal(entry, f": {metric!r} is not a metric{known}")
        return Trigger(None, metric, sign == ">", _number(number, entry))
    share = _number(text, entry)
    if not 0 < share < 1:
        raise _refusal(
            entry,
            ": a share of the run lies between 0 and 1; write `@ step 400` for a step",
        )
    return Trigger(max(1, round(share * total_steps)))


def _number(text: str, entry: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _refusal(
            entry,
            f": {text!r} is not a number; write a share such as 0.3, `step 400`, or a "
            "metric such as `accuracy > 0.9`",
        ) from None


def _refusal(entry: str, problem: str) -> UserError:
    return UserError(f"config.method.schedule has {entry!r}{problem}")


@dataclasses.dataclass(frozen=True)
class Round:
    """One exchange."""

    stage: Stage  # The stage of the sparsity schedule that it closes a part of.
    # Whether masks move, move for the last time, or stay.
    kind: RoundKind


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """All exchanges of a run with one method."""

    stages: tuple[Stage, ...]  # Densities over steps.
    sync: SyncSchedule | None  # When rounds end; None if the method has no exchange.
    # Length of the run. A last, shorter round ends it, so that no step is missing from
    # the consensus.
    total_steps: int
    # Steps after which dead channels are cut out and the small network trains on: those
    # of the freezing round or of a later one. None if they are cut out at the end only.
    shrink_step: int | None = None
    # Whether frozen rounds are part of the steps: then only those are rounds of their
    # own that settle everything, before a cut and at the end.
    streams: bool = False

    def round_after(self, num_steps: int) -> Round | None:
        """What happens when `num_steps` steps are done, if anything.

        Example:
          >>> stages = (Stage(0, 1.0, False), Stage(4, 0.5, False), Stage(8, 0.5, True))
          >>> plan = RoundPlan(stages, SyncSchedule(4), total_steps=18)
          >>> for step in range(1, 19):
          ...     if due := plan.round_after(step):
          ...         print(step, due.stage.density, due.kind)
          4 1.0 frozen
          8 0.5 moving
          12 0.5 freeze
          16 0.5 frozen
          18 0.5 frozen
        """
        if self.sync is None or num_steps < 1:
            return None
        if num_steps == self.total_steps:
            return self._round_at(num_steps, self.sync)
        if not self.sync.is_due(num_steps):
            return None
        due = self._round_at(num_steps, self.sync)
        settles = num_steps == self.shrink_step
        return None if self._streams(due) and not settles else due

    def streams_in(self, step: int) -> bool:
        """Whether step number `step`, from 0, may have its part of a round.

        Not where masks move, nor where a round follows that has it all.

        Example:
          >>> stages = (Stage(0, 1.0, True),)
          >>> plan = RoundPlan(stages, SyncSchedule(4), total_steps=8, streams=True)
          >>> [plan.streams_in(step) for step in (0, 6, 7)]
          [True, True, False]
        """
        if self.sync is None:
            return False
        due = self._round_at(step + 1, self.sync)
        return self._streams(due) and not self.round_after(step + 1)

    def _streams(self, due: Round) -> bool:
        return self.streams and due.stage.is_frozen and due.kind == "frozen"

    def round_to_leave(self, num_steps: int) -> Round | None:
        """What is still to be exchanged where the next method takes over.

        Example:
          >>> plan = RoundPlan((Stage(0, 1.0, True),), SyncSchedule(4), total_steps=18)
          >>> plan.round_to_leave(8), plan.round_to_leave(9).kind
          (None, 'frozen')
        """
        if self.sync is None or self.round_after(num_steps) is not None:
            return None
        return self._round_at(num_steps, self.sync)

    def _round_at(self, num_steps: int, sync: SyncSchedule) -> Round:
        """The round after so many steps, whether or not one is due."""
        stage = stage_at(self.stages, num_steps - 1)
        # With everything kept there is nothing to choose, and no score to send.
        if stage.density == 1.0:
            return Round(stage, "frozen")
        if not stage.is_frozen:
            return Round(stage, "moving")
        is_first = sync.start_of(num_steps - 1) <= stage.start_step
        return Round(stage, "freeze" if is_first else "frozen")


def make_round_plan(
    config: SparsityConfig,
    total_steps: int,
    sync: SyncSchedule | None,
    prunes: bool = True,
    streams: bool = False,
) -> RoundPlan:
    """Lays out the exchanges of a run.

    Raises:
      UserError: A schedule in which nothing would be pruned, or none is left to train
        the small network.
    """
    if sync is None or not prunes:
        dense = (Stage(0, 1.0, True),)
        return RoundPlan(dense, sync, total_steps, streams=streams)
    stages = density_stairs(config, total_steps, sync)
    plan = RoundPlan(stages, sync, total_steps, streams=streams)
    frozen, share = stages[-1], config.shrink_share
    if share == 1.0 or frozen.density == 1.0:
        return plan
    # The first round of the frozen stage settles the masks.
    step = max(step_of_share(share, total_steps, sync), sync.end_of(frozen.start_step))
    if step >= total_steps:
        raise UserError(
            f"sparsity.shrink_share = {share:g} leaves the small network no step: dead "
            f"channels would be cut out after step {step} of {total_steps}; lower it "
            "and sparsity.freeze_share, train longer, or set it to 1 to cut them out "
            "at the end"
        )
    return dataclasses.replace(plan, shrink_step=step)
