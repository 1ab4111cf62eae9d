"""Turns Ctrl-C and SIGTERM into a question the loop asks after every step.

In one process it owns the two handlers. With several processes jax's preemption service
hears SIGTERM on any of them and names one step at which all of them stop; Ctrl-C is
passed on to it.
"""

import os
import signal
import types
from typing import Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Listens for Ctrl-C and SIGTERM while it is entered.

    The first signal asks the run to stop, save and exit; a second Ctrl-C interrupts at
    once. Use it as a context manager, on the main thread.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._earlier: dict[signal.Signals, object] = {}
        self._num_questions = 0
        self._is_agreed = False
        self._is_single = jax.process_count() == 1

    def __enter__(self) -> Self:
        # jax's service keeps SIGTERM where there are several processes.
        heard = [signal.SIGINT, signal.SIGTERM] if self._is_single else [signal.SIGINT]
        for number in heard:
            self._earlier[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
        if not self._is_single:
            os.kill(os.getpid(), signal.SIGTERM)

    def is_due(self) -> bool:
        """Whether all processes should stop now.

        With several processes every one of them must ask equally often: the service
        names the number of the question at which all get the same answer.
        """
        if self._is_single:
            return self._received is not None
        self._num_questions += 1
        if not self._is_agreed:
            self._is_agreed = multihost_utils.reached_preemption_sync_point(
                self._num_questions
            )
        return self._is_agreed
