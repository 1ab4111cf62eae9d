"""Measures how fast a run goes and says how far it is, in one line.

It owns the clock and the progress line. It leaves to its callers where the numbers come
from and where the line is shown. It sits beside `metrics`, left of `loop`, and imports
nothing of the package.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Clock:
    """Times steps, without compilation and evaluation, over restarts of a run.

    It starts paused. Steps are timed between `resume` and `pause`; the total runs on.
    Median and percentile are taken over the newest steps only, at most `capacity`, so
    that memory is bounded; totals are over all.

    Args:
      now: Seconds from any origin; a test passes its own.
      capacity: Number of steps that median and percentile look at.
      state: What `state_dict` gave before a restart; totals go on from there.
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
        now: Callable[[], float] = time.perf_counter,
        capacity: int = 512,
        state: Mapping[str, Any] | None = None,
    ):
        state = state or {}
        self._now = now
        self._intervals = deque[float](state.get("intervals", ()), maxlen=capacity)
        self._earlier_seconds = float(state.get("seconds_total", 0.0))
        self._started = now()
        self._running_since: float | None = None
        # Time of the step in progress before a pause.
        self._carried = 0.0
        self.num_steps = int(state.get("num_steps", 0))
        self.seconds_in_steps = float(state.get("seconds_in_steps", 0.0))

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

    def step_done(self, num_steps: int = 1) -> None:
        """Records that steps are done, since the last call or the first `resume`.

        Devices work on after a step was started, so call this when its result is there.

        Args:
          num_steps: Steps done since; each counts with the same share of the time.
        Raises:
          RuntimeError: The clock is paused.
        """
        if self._running_since is None:
            raise RuntimeError("a step was done while the clock was paused")
        now = self._now()
        seconds = self._carried + now - self._running_since
        self._running_since, self._carried = now, 0.0
        self.num_steps += num_steps
        self.seconds_in_steps += seconds
        repeats = min(num_steps, self._intervals.maxlen or num_steps)
        self._intervals.extend([seconds / num_steps] * repeats)

    def forget_steps(self) -> None:
        """Starts median and percentile anew, where steps become others; totals stay."""
        self._intervals.clear()

    @property
    def seconds_total(self) -> float:
        """Wall-clock seconds since the first start, without the time between starts."""
        return self._earlier_seconds + self._now() - self._started

    @property
    def seconds_per_step_median(self) -> float:
        """Median over the newest steps; NaN before the first."""
        return statistics.median(self._intervals) if self._intervals else math.nan

    @property
    def seconds_per_step_p95(self) -> float:
        """Smallest time that 95 % of the newest steps do not exceed; NaN before."""
        if not self._intervals:
            return math.nan
        ordered = sorted(self._intervals)
        return ordered[math.ceil(0.95 * len(ordered)) - 1]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON-able, at most `capacity` numbers and three."""
        return {
            "seconds_total": self.seconds_total,
            "seconds_in_steps": self.seconds_in_steps,
            "num_steps": self.num_steps,
            "intervals": list(self._intervals),
        }


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one progress line tells; NaN and None show as `nan` and `-`."""

    step: int
    num_steps: int
    # Examples per step over the whole mesh.
    batch_size: int
    seconds_per_step: float
    # Bytes sent over the host axis per host, on average over the run so far, and the
    # quotient by what hierarchical dense averaging would have sent.
    host_wire_bytes_per_step: float
    host_wire_ratio: float
    # Share of the channels removed now.
    sparsity: float
    loss: float
    # Share of the training examples classified right.
    accuracy: float
    # None for methods without one.
    primal_residual: float | None = None


def progress_of(row: Mapping[str, Any], num_steps: int, batch_size: int) -> Progress:
    """What a logged row tells people.

    Args:
      row: Of the metrics of a run, from training.
      num_steps: Length of the run.
      batch_size: Over the whole mesh.
    """
    return Progress(
        step=row["step"],
        num_steps=num_steps,
        batch_size=batch_size,
        seconds_per_step=row["seconds_per_step_median"],
        host_wire_bytes_per_step=row["host_wire_bytes"] / row["step"],
        host_wire_ratio=row["host_wire_ratio"],
        sparsity=row["sparsity"],
        loss=row["loss"],
        accuracy=row["accuracy"],
        primal_residual=row.get("primal_residual"),
    )


def format_progress(progress: Progress) -> str:
    """Writes one line of at most 120 columns, aligned with the lines of other steps.

    Args:
      progress: What to tell; up to 999,999 steps keep the width.
    Example:
      >>> line = format_progress(Progress(
      ...     step=1200, num_steps=20000, batch_size=64, seconds_per_step=0.0521,
      ...     host_wire_bytes_per_step=12.3e6, host_wire_ratio=0.065, sparsity=0.5,
      ...     loss=1.234, accuracy=0.712, primal_residual=1.2e-3))
      >>> print(line[:46].strip(), '...')
      1200/20000   6% eta   16m   1228 img/s 52.1ms ...
    """
    remaining = (progress.num_steps - progress.step) * progress.seconds_per_step
    speed = progress.batch_size / max(progress.seconds_per_step, 1e-9)
    width = len(str(progress.num_steps))
    percent = 100 * progress.step // max(progress.num_steps, 1)
    host_bytes = _bytes(progress.host_wire_bytes_per_step)
    return (
        f"{progress.step:>{width}}/{progress.num_steps} {percent:>3}%"
        f" eta {_duration(remaining):>5}  {_speed(speed):>5} img/s"
        f" {_step_time(progress.seconds_per_step):>6}"
        f"  host {host_bytes:>6} {_ratio(progress.host_wire_ratio):>6}"
        f"  sparsity {_percent(progress.sparsity, 0):>3}"
        f"  res {_power(progress.primal_residual):>6}"
        f"  loss {_four_digits(progress.loss):>5}"
        f"  acc {_percent(progress.accuracy, 1):>5}"
    )


def _duration(seconds: float) -> str:
    """At most five characters: 42s, 23m, 1h23m, 12h, 3d04h, 12d."""
    if not math.isfinite(seconds):
        return "-"
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m"
    if days < 1:
        return f"{hours}h{minutes % 60:02}m" if hours < 10 else f"{hours}h"
    return f"{days}d{hours % 24:02}h" if days < 10 else f"{days}d"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three digits and the unit; each unit is 1000 times the one before."""
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    digits = 1 if value < 99.95 else 0
    return f"{value:.{digits}f}{units[index]}"


def _speed(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value < 99999.5 else _scaled(value, ("", "k", "M", "G"))


def _step_time(seconds: float) -> str:
    return _scaled(1000 * seconds, ("ms", "s")) if math.isfinite(seconds) else "-"


def _bytes(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return _scaled(value / 1000, ("kB", "MB", "GB", "TB")) if value else "0B"


def _ratio(value: float) -> str:
    return f"x{value:.3f}" if value == 0 or not value < 0.001 else f"x{_power(value)}"


def _percent(share: float, digits: int) -> str:
    if not math.isfinite(share):
        return "-"
    percent = round(100 * share, digits)
    return "100%" if percent == 100 else f"{percent:.{digits}f}%"


def _power(value: float | None) -> str:
    """Two digits and a short exponent: 1.2e-3."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _four_digits(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    for limit, digits in ((9.9995, 3), (99.995, 2), (999.95, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0e}"
