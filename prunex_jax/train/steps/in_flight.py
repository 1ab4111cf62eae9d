"""Keeps few steps in flight, and measures which part of them no other process causes.

Nothing is waited for that would not be waited for otherwise.
"""

import collections
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from prunex_jax.processes import StepTimes

# Steps started ahead of the one that is waited for. On CPU the devices share threads,
# and collectives of several steps at once could wait for each other for ever.
_STEPS_IN_FLIGHT = {"cpu": 0}
_DEFAULT_STEPS_IN_FLIGHT = 2
# Own steps that are averaged, and how many of them, the longest, say nothing: what
# happens in one of 20 steps, such as a stopped process, is seen, a single pause is not.
_NUM_NEWEST = 32
_NUM_LONGEST = 2
_T = TypeVar("_T")


class StepsInFlight:
    """The steps in flight of this process.

    Args:
      num_ahead: Steps started before one is waited for; None asks the devices.
      now: Seconds from any origin; a test passes its own.
    """

    def __init__(
        self,
        num_ahead: int | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_ahead, self._now = num_ahead, now
        # Of every step in flight what says that it is done, and whether, from the end
        # of the one before it, nothing has travelled between hosts.
        self._in_flight: collections.deque[tuple[Any, bool]] = collections.deque()
        self._has_exchanged = True
        self._is_own, self._data_seconds = False, 0.0
        self._steps, self._seconds, self._total_data_seconds = 0, 0.0, 0.0
        # Of own steps: seconds, and those of them for want of a batch.
        self._own_steps = 0
        self._newest: collections.deque[tuple[float, float]]
        self._newest = collections.deque(maxlen=_NUM_NEWEST)

    def next_of(self, batches: Iterator[_T]) -> _T:
        """The next batch; waiting for it counts where the devices have nothing to do.

        Raises:
          StopIteration: There is none.
        """
        started = self._now()
        batch = next(batches)
        is_idle = not self._in_flight or self._in_flight[-1][0].is_ready()
        self._data_seconds = self._now() - started if is_idle else 0.0
        return batch

    def started(self, ticket: jax.Array, *, is_local: bool) -> None:
        """Adds a step to those in flight.

        Its ticket is ready when it is done; local is what no other host waits for.
        """
        self._in_flight.append((ticket, is_local and not self._has_exchanged))
        self._has_exchanged = False

    def wait(self) -> None:
        """Waits until few steps are in flight, so that what is timed has happened."""
        if self._num_ahead is None:
            platform = jax.default_backend()
            default = _DEFAULT_STEPS_IN_FLIGHT
            self._num_ahead = _STEPS_IN_FLIGHT.get(platform, default)
        self._is_own = False
        while len(self._in_flight) > self._num_ahead:
            ticket, self._is_own = self._in_flight.popleft()
            jax.block_until_ready(ticket)

    def exchanged(self) -> None:
        """Something between hosts was started after the newest step."""
        self._has_exchanged = True

    def drained(self) -> None:
        """Something waits for the steps in flight, outside the time of steps."""
        self._in_flight = collections.deque((t, False) for t, _ in self._in_flight)

    def step_done(self, seconds: float) -> None:
        """Counts a step that took so long, with the wait for its batch."""
        data_seconds = min(self._data_seconds, seconds)
        self._steps += 1
        self._seconds += seconds
        self._total_data_seconds += data_seconds
        if self._is_own:
            self._own_steps += 1
            self._newest.append((seconds, data_seconds))

    def times(self) -> StepTimes:
        """What steps take; any thread may ask."""
        kept = sorted(self._newest.copy())[:-_NUM_LONGEST]
        own, own_data = 0.0, 0.0
        if kept:
            own, own_data = (math.fsum(x) / len(kept) for x in zip(*kept, strict=True))
        return StepTimes(
            self._steps,
            self._seconds,
            self._total_data_seconds,
            self._own_steps,
            own,
            own_data,
        )
