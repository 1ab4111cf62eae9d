"""The exceptions that end a run: the input was bad, or the training was.

They leave reporting to their callers: the command line prints the message as one line
and exits with code 2 or 1; a notebook shows an ordinary exception.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Raised when a value given by the user cannot be used.

    The message names the offending value and says what to do about it, in one line.
    """


class AgreedError(UserError):
    """A UserError that all processes of a run raise at the same time."""


class TrainingDivergedError(RuntimeError):
    """Raised when the loss is not finite any more, or copies leave their consensus.

    The message names the step, the last good checkpoint and a remedy.
    """


class RunStopped(KeyboardInterrupt):
    """Raised where a run was asked to stop, by Ctrl-C or a signal, and was saved.

    The same call goes on. It is a KeyboardInterrupt, so that `except Exception` in the
    caller's code does not take it for a failure.
    """


class AgreedStopError(Exception):
    """Raised by all processes of a run at the same time, to end it early."""


# What one process need not tell the others, because all of them raise it.
AGREED = (AgreedError, AgreedStopError, TrainingDivergedError)


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Says in one line what another package raised: its type, and its message.

    Args:
      error: What was raised.
      limit: Characters of the message; None for all.
    Example:
      >>> one_line(ValueError('not\\n  this'))
      'ValueError: not this'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:limit]}"


def suggest(word: str, known: Iterable[str]) -> str:
    """Says ", did you mean ...?" when something known resembles the word, else "".

    Example:
      >>> suggest('learning_rat', ['learning_rate', 'momentum'])
      ", did you mean 'learning_rate'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
