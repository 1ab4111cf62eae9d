"""The methods of a run, one after the other, and what starts each of them.

A schedule is a list of entries, `method` or `method @ trigger`:

    ('dense', 'hsadmm @ 0.1', 'diloco @ 0.6')
    ('dense', 'topk @ accuracy > 0.5', 'dgc @ step 4000')

A trigger is a share of the run, a step, or a metric of the log with a bound. The first
entry starts the run and has none. It owns what a schedule may say; how a run goes from
one method to the next is in `handover`, when it looks in `loop`. How dense a pruned
network is at which step is said by `sparsity` alone.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import MethodConfig
from prunex_jax.methods import check_method

# Of training since the last logged step, and of the last validation.
METRICS = ("loss", "accuracy", "validation_loss", "validation_accuracy")
_ENTRY = re.compile(r"\s*(\w+)\s*(?:@\s*(.*?)\s*)?")
_STEP = re.compile(r"step\s+(\d+)")
_BOUND = re.compile(r"(\w+)\s*([<>])\s*(\S+)")


@dataclasses.dataclass(frozen=True)
class Trigger:
    """What starts a phase: a step, or a metric beyond a bound.

    Attributes:
      step: Steps done; None for a metric.
      metric: One of `METRICS`; empty for a step.
      is_above: Whether it must exceed the bound, or else stay below it.
      bound: The bound.
    """

    step: int | None
    metric: str = ""
    is_above: bool = False
    bound: float = 0.0

    def __str__(self) -> str:
        """When it is, for people."""
        if self.step is not None:
            return f"from step {self.step}"
        return f"once {self.metric} {'>' if self.is_above else '<'} {self.bound:g}"

    def is_due(self, num_steps: int, metrics: Mapping[str, float]) -> bool:
        """Whether the phase starts now.

        Args:
          num_steps: Steps done.
          metrics: Those that are new after this step.
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
    """One method of a run, and what starts it.

    Attributes:
      method: Key in `methods.METHODS`.
      trigger: What starts it.
    """

    method: str
    trigger: Trigger


def parse_phases(config: MethodConfig, total_steps: int) -> tuple[Phase, ...]:
    """Reads the schedule of methods.

    Args:
      config: `schedule`, or `name` for a run of one method.
      total_steps: Length of the run.
    Returns:
      The phases in order, one at least.
    Raises:
      UserError: An entry that means nothing, names no method, or starts before the one
        in front of it or after the run.
    Example:
      >>> config = MethodConfig(schedule=('dense', 'hsadmm @ 0.1', 'diloco @ step 80'))
      >>> [(p.method, p.trigger.step) for p in parse_phases(config, 100)]
      [('dense', 0), ('hsadmm', 10), ('diloco', 80)]
    """
    if not config.schedule:
        check_method(config.name)
        return (Phase(config.name, Trigger(0)),)
    entries = config.schedule
    phases = [_parse(entry, index, total_steps) for index, entry in enumerate(entries)]
    _check_order(phases, entries, total_steps)
    return tuple(phases)


def _parse(entry: str, index: int, total_steps: int) -> Phase:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise UserError(
            f"config.method.schedule has {entry!r}; write method or method @ trigger"
        )
    name, trigger = found.groups()
    check_method(name, "config.method.schedule")
    if (trigger is None) != (index == 0):
        wanted = "starts the run, so it takes no trigger" if index == 0 else (
            "needs a trigger, such as `@ 0.3` or `@ accuracy > 0.9`"
        )  # fmt: skip
        raise UserError(f"config.method.schedule has {entry!r}, which {wanted}")
    start = Trigger(0) if trigger is None else _trigger(trigger, entry, total_steps)
    return Phase(name, start)


def _trigger(text: str, entry: str, total_steps: int) -> Trigger:
    if step := _STEP.fullmatch(text):
        return Trigger(int(step[1]))
    if bound := _BOUND.fullmatch(text):
        metric, sign, number = bound.groups()
        if metric not in METRICS:
            raise UserError(
                f"config.method.schedule has {entry!r}: {metric!r} is not a metric"
                f"{suggest(metric, METRICS)} (known: {', '.join(METRICS)})"
            )
        return Trigger(None, metric, sign == ">", _number(number, entry))
    share = _number(text, entry)
    if not 0 < share < 1:
        raise UserError(
            f"config.method.schedule has {entry!r}: a share of the run lies between 0 "
            "and 1; write `@ step 400` for a step"
        )
    return Trigger(max(1, round(share * total_steps)))


def _number(text: str, entry: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"config.method.schedule has {entry!r}: {text!r} is not a number; write a "
            "share such as 0.3, `step 400`, or a metric such as `accuracy > 0.9`"
        ) from None


def _check_order(
    phases: Sequence[Phase], entries: Sequence[str], total_steps: int
) -> None:
    last = 0
    for phase, entry in zip(phases[1:], entries[1:], strict=True):
        step = phase.trigger.step
        if step is None:
            continue
        if not last < step < total_steps:
            raise UserError(
                f"config.method.schedule has {entry!r}, which is step {step}; it must "
                f"lie after step {last} and before the end, step {total_steps}"
            )
        last = step
