"""Traces a window of steps with jax's profiler, into RUN/profile."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Self

import jax

from prunex_jax.base.errors import UserError

PROFILE = "profile"
_WINDOW = re.compile(r"(\d{1,12}):(\d{1,12})")


def profile_window(text: str, num_steps: int) -> tuple[int, int] | None:
    """Reads which steps are traced.

    Args:
      text: `FIRST:LAST`: from when FIRST steps are done until LAST are; empty for none.
      num_steps: Length of the run.
    Raises:
      UserError: It is not of this form, empty, or beyond the run.
    Example:
      >>> profile_window('100:110', 200)
      (100, 110)
    """
    if not text:
        return None
    found = _WINDOW.fullmatch(text)
    if found is None:
        raise UserError(
            f"config.run.profile_steps={text!r} is no window of steps; write it as in "
            "100:110"
        )
    first, last = int(found[1]), int(found[2])
    if not first < last <= num_steps:
        raise UserError(
            f"config.run.profile_steps={text} must start before it ends, and end at "
            f"step {num_steps} of the run or before"
        )
    return first, last


class Profiler:
    """Traces this process while a window of steps runs."""

    def __init__(
        self,
        window: tuple[int, int] | None,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._window = window
        self._folder = folder
        self._tell = tell
        self._is_tracing = False

    def __enter__(self) -> Self:
        """Has nothing to do yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Writes a trace that the end of the run has cut short."""
        self._stop()

    def before_step(self, num_done: int) -> None:
        """Starts the trace if the next step is in the window."""
        if self._window is None or self._is_tracing:
            return
        if self._window[0] <= num_done < self._window[1]:
            jax.profiler.start_trace(str(self._folder))
            self._is_tracing = True

    def after_step(self, num_done: int, result: jax.Array) -> None:
        """Ends the trace after the last step of the window, whose result it awaits."""
        if self._is_tracing and self._window and num_done >= self._window[1]:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
            self._tell(f"the profile is in {self._folder}")
