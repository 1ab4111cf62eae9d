"""The one exception that means "the input was bad", and nothing else.

It leaves reporting to its callers: the command line prints the message as one line and
exits with code 2; a notebook shows it as an ordinary exception.
"""


class UserError(ValueError):
    """Raised when a value given by the user cannot be used.

    The message names the offending value and says what to do about it, in one line.
    """
