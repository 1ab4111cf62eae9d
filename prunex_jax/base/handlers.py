"""Handlers of signals, for as long as they are wanted.

For commands that start others. It needs the standard library only, as supervisors do
that run under any Python.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    """Handles signals while it is entered; those that are ignored stay so.

    Args:
      numbers: The signals. Under nohup, for one, some are ignored.
      handler: Called with the number of the signal and the interrupted frame.

    Example:
      >>> heard = []
      >>> with handling([signal.SIGTERM], lambda number, frame: heard.append(number)):
      ...     signal.raise_signal(signal.SIGTERM)
      >>> heard == [signal.SIGTERM]
      True
    """
    heard = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)
