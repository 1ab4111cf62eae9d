"""Times the steps of a run, without compilation and evaluation, over its restarts."""

import collections
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

# Steps that the median looks at, so that memory is bounded; totals are over all.
_NUM_NEWEST = 512


@dataclasses.dataclass(frozen=True)
class ClockTotals:
    """What a clock has measured, as checkpoints keep it."""

    seconds_total: float = 0.0
    seconds_in_steps: float = 0.0
    num_steps: int = 0
    intervals: tuple[float, ...] = ()  # of the newest steps


class Clock:
    """Times steps between `resume` and `pause`; it starts paused, the total runs on.

    Args:
      earlier: What `totals` gave before a restart; it goes on from there.
      now: Seconds from any origin; a test passes its own.
    Example:
      >>> seconds = iter([0.0, 7.0, 7.5, 8.25, 60.0])
      >>> clock = Clock(now=lambda: next(seconds))  # At 0 s; compilation follows.
      >>> clock.resume()
      >>> clock.step_done()
      >>> clock.step_done()
      >>> clock.seconds_per_step_median, clock.seconds_total
      (0.625, 60.0)
    """

    def __init__(
        self,
        earlier: ClockTotals = ClockTotals(),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now = now
        self._intervals = collections.deque(earlier.intervals, maxlen=_NUM_NEWEST)
        self._earlier_seconds = earlier.seconds_total
        self._started = now()
        self._running_since: float | None = None
        # Time of the step in progress before a pause.
        self._carried = 0.0
        self.num_steps = earlier.num_steps
        self.seconds_in_steps = earlier.seconds_in_steps

    def resume(self) -> None:
        """Lets the time of steps run; does nothing if it runs."""
        if self._running_since is None:
            self._running_since = self._now()

    def pause(self) -> None:
        """Stops the time of steps; does nothing if it stands."""
        if self._running_since is not None:
            self._carried += self._now() - self._running_since
            self._running_since = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside out of the time of steps."""
        was_running = self._running_since is not None
        self.pause()
        try:
            yield
        finally:
            if was_running:
                self.resume()

    def step_done(self) -> None:
        """Records a step, whose time ran since the last one or the first `resume`.

        Devices work on after a step was started, so call this when its result is there.

        Raises:
          RuntimeError: The clock is paused.
        """
        if self._running_since is None:
            raise RuntimeError("a step was done while the clock was paused")
        now = self._now()
        seconds = self._carried + now - self._running_since
        self._running_since, self._carried = now, 0.0
        self.num_steps += 1
        self.seconds_in_steps += seconds
        self._intervals.append(seconds)

    def forget_steps(self) -> None:
        """Starts the median anew, where steps become others; totals stay."""
        self._intervals.clear()

    @property
    def seconds_total(self) -> float:
        """Wall-clock seconds since the first start, without the time between starts."""
        return self._earlier_seconds + self._now() - self._started

    @property
    def seconds_per_step_median(self) -> float:
        """Median over the newest steps; NaN before the first."""
        return statistics.median(self._intervals) if self._intervals else math.nan

    def totals(self) -> ClockTotals:
        """What has been measured until now."""
        newest = tuple(self._intervals)
        totals = self.seconds_total, self.seconds_in_steps, self.num_steps
        return ClockTotals(*totals, newest)
