"""The exceptions that end a run: the input was bad, or the training was.

They leave reporting to their callers: the command line prints the message as one line
and exits with code 2 or 1; a notebook shows an ordinary exception.
"""


class UserError(ValueError):
    """Raised when a value given by the user cannot be used.

    The message names the offending value and says what to do about it, in one line.
    """


class TrainingDivergedError(RuntimeError):
    """Raised when the loss is not finite any more, or copies leave their consensus.

    The message names the step, the last good checkpoint and a remedy.
    """
