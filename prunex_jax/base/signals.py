"""Handlers of signals, and those that stop a run as a question a training loop asks.

Supervisors that run under any Python import it, so jax is imported where it is used.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Self

# What schedulers send before they end a job: SIGTERM, or the warning of a time limit.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def handling(
    numbers: Sequence[signal.Signals],
    handler: Callable[[int, object], None],
    *,
    also_ignored: bool = False,
) -> Iterator[None]:
    """Handles signals while it is entered, on the main thread.

    Those that are ignored, as some are under nohup or in the background of a shell,
    stay so unless `also_ignored`.

    Example:
      >>> heard = []
      >>> with handling([signal.SIGTERM], lambda number, frame: heard.append(number)):
      ...     signal.raise_signal(signal.SIGTERM)
      >>> heard == [signal.SIGTERM]
      True
    """
    heard = [
        number
        for number in numbers
        if also_ignored or signal.getsignal(number) is not signal.SIG_IGN
    ]
    earlier = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)


class StopRequest:
    """Listens for Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 while it is entered.

    The first signal asks the run to stop, save and exit; a second Ctrl-C interrupts at
    once. Use it as a context manager, on the main thread. With several processes jax's
    preemption service hears SIGTERM on any of them and names one step at which all of
    them stop; the other signals are passed on to it.
    """

    def __init__(self) -> None:
        import jax

        self._received: int | None = None
        self._num_questions = 0
        self._is_agreed = False
        self._is_single = jax.process_count() == 1
        numbers = [signal.SIGINT, *STOPPING]
        if not self._is_single:
            # jax's service keeps it.
            numbers.remove(signal.SIGTERM)
        self._handling = handling(numbers, self._hear, also_ignored=True)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._handling.__exit__(None, None, None)

    def _hear(self, number: int, frame: object) -> None:
        del frame
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
        if not self._is_single:
            os.kill(os.getpid(), signal.SIGTERM)

    def is_due(self) -> bool:
        """Whether all processes should stop now.

        With several processes every one of them must ask equally often: the service
        names the number of the question at which all get the same answer.
        """
        if self._is_single:
            return self._received is not None
        from jax.experimental import multihost_utils

        self._num_questions += 1
        if not self._is_agreed:
            self._is_agreed = multihost_utils.reached_preemption_sync_point(
                self._num_questions
            )
        return self._is_agreed
