"""Times calls so that the times can be compared: in turn, after warm-up, until done.

It owns the stop watch of everything that is compared in one table, and what is done
every so often while something else runs. Times of steps in a run are `progress`'s
business. It imports nothing of the package.
"""

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, measured several times."""

    seconds: tuple[float, ...]  # In the order in which they were measured; at least two

    @property
    def median(self) -> float:
        """Half of the calls took at most this."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the calls took at most the first, three quarters the second."""
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


def time_in_turn(
    calls: Mapping[str, Callable[[], Any]],
    num_calls: int = 20,
    warm_up: int = 2,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times several calls in turn, so that a machine whose speed drifts slows all.

    Args:
      calls: What to call, by name; what they return is waited for.
      num_calls: Times each is measured, at least two.
      warm_up: Calls of each before, which compile and fill caches.
      now: Seconds from any origin; a test passes its own.
    Returns:
      The times, by name; the i-th of all were measured one after the other.
    """
    for _ in range(warm_up):
        for call in calls.values():
            jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(2, num_calls)):
        for name, call in calls.items():
            start = now()
            jax.block_until_ready(call())
            seconds[name].append(now() - start)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


@contextlib.contextmanager
def meanwhile(
    name: str, do: Callable[[], None], pause: Callable[[], float]
) -> Iterator[None]:
    """Does something on another thread while it is entered, after every `pause()`
    seconds.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(pause()):
            do()

    # A daemon: a process that is told to end does not wait for it.
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
