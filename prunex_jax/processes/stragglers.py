"""Finds out which processes hold up all others, from what each says of its own steps.

Steps of all processes take equally long, because everyone waits for the slowest. So a
process measures what contains no waiting: steps in which nothing travels between hosts,
as most of a method that exchanges every few steps; and how long its devices stood still
until its batch was read. Where every step has an exchange, only the latter is known.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import NamedTuple

# What is compared: at least so many seconds and steps of every process ...
_SECONDS = 5.0
_STEPS = 8
_OWN_STEPS = 16  # Where those are compared.
# ... so often in a row, as one slow moment is no straggler.
_TIMES = 3
# A step may take so many times the median of the others, and so many seconds more.
_FACTOR = 1.5
_FLOOR = 0.005


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """What the steps of a process have taken; seconds."""

    steps: int = 0  # Since its start.
    seconds: float = 0.0  # Of these, with waiting for others.
    data_seconds: float = 0.0  # Of that: its devices stood still for want of a batch.
    own_steps: int = 0  # Those of the steps in which it waited for nobody.
    # Of one of the newest of them, on average without the very longest.
    own_seconds: float = 0.0
    own_data_seconds: float = 0.0  # Of that: as above.

    def since(self, before: "StepTimes") -> "StepTimes":
        """The steps after earlier ones."""
        return dataclasses.replace(
            self,
            steps=self.steps - before.steps,
            seconds=self.seconds - before.seconds,
            data_seconds=self.data_seconds - before.data_seconds,
            own_steps=self.own_steps - before.own_steps,
        )


NO_STEP_TIMES = StepTimes()  # Before the first step.


class Slow(NamedTuple):
    """How a process holds up the others."""

    cause: str  # By which part of its work: "data" or "step".
    figures: str  # What is said of it.


class Stragglers:
    """Says which processes have become slow, or have caught up; each change once."""

    def __init__(self, now: float) -> None:
        self._compared = now
        self._before: dict[int, StepTimes] = {}
        # Cause, empty where there is none: as found last, how often in a row, as said.
        self._found: dict[int, tuple[str, int]] = {}
        self._said: dict[int, str] = {}

    def news(self, times: Mapping[int, tuple[str, StepTimes]], now: float) -> list[str]:
        """What has changed in the newest steps of all processes, one line per process.

        `times` are, by process, its machine and its steps so far; `now` is in seconds.
        """
        newest = {
            process: each.since(self._before.get(process, NO_STEP_TIMES))
            for process, (_, each) in times.items()
        }
        if now - self._compared < _SECONDS or not _can_compare(newest):
            return []
        self._compared = now
        self._before = {process: each for process, (_, each) in times.items()}
        slow, lines = slow_among(newest), []
        for process, (machine, _) in sorted(times.items()):
            found = slow.get(process)
            if self._is_change(process, found.cause if found else ""):
                said = found.figures if found else "is as fast as the others again"
                lines.append(f"process {process} on {machine} {said}")
        return lines

    def _is_change(self, process: int, cause: str) -> bool:
        """Whether it has been so for a while, and has not been said."""
        last, times = self._found.get(process, ("", 0))
        times = times + 1 if cause == last else 1
        self._found[process] = cause, times
        if times < _TIMES or self._said.get(process, "") == cause:
            return False
        self._said[process] = cause
        return True


def _can_compare(times: Mapping[int, StepTimes]) -> bool:
    """Whether there are enough steps; few own ones may become more, up to a time."""
    steps = min(each.steps for each in times.values())
    own = [each.own_steps for each in times.values()]
    is_clear = min(own) >= _OWN_STEPS or not max(own)
    return steps >= _STEPS and (is_clear or steps >= 20 * _OWN_STEPS)


def slow_among(times: Mapping[int, StepTimes]) -> dict[int, Slow]:
    """Which of some processes hold up the others, and how."""
    found = {}
    for process in times if len(times) > 1 else ():
        slow = _in_own_steps(process, times) or _in_data(process, times)
        if slow is not None:
            found[process] = slow
    return found


def _in_own_steps(process: int, times: Mapping[int, StepTimes]) -> Slow | None:
    """By steps in which it waits for nobody."""
    if any(each.own_steps < _OWN_STEPS for each in times.values()):
        return None
    own = {p: each.own_seconds for p, each in times.items()}
    data = {p: each.own_data_seconds for p, each in times.items()}
    usual = _median_of_others(process, own)
    excess = own[process] - usual
    if excess < _FLOOR or own[process] < _FACTOR * usual:
        return None
    figures = (
        f"needs {own[process] / usual:.1f} times as long as the median of the others "
        f"per step: {_ms(own[process])} against {_ms(usual)}"
    )
    if data[process] - _median_of_others(process, data) < excess / 2:
        return Slow("step", figures)
    return Slow("data", f"{figures}; for {_ms(data[process])} of it waits for its data")


def _in_data(process: int, times: Mapping[int, StepTimes]) -> Slow | None:
    """By all steps, as loaders may stand still for one step out of many."""
    if any(each.steps < _STEPS for each in times.values()):
        return None
    data = {p: each.data_seconds / each.steps for p, each in times.items()}
    step = times[process].seconds / times[process].steps
    usual = _median_of_others(process, data)
    excess = data[process] - usual
    if excess < _FLOOR or step < _FACTOR * (step - excess):
        return None
    return Slow(
        "data",
        f"holds up the others: for {_ms(data[process])} of {_ms(step)} per step it "
        f"waits for its data, the others for {_ms(usual)}",
    )


def _median_of_others(process: int, values: Mapping[int, float]) -> float:
    return statistics.median(x for other, x in values.items() if other != process)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
