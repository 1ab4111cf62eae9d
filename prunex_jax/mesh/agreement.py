"""Processes fail together: one that stops alone leaves the others waiting."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from prunex_jax.base.errors import UserError

Value = TypeVar("Value")


def run_together(prepare: Callable[[], Value]) -> Value:
    """Runs something on every process, and goes on only if it worked on all of them.

    Also a barrier: nobody returns before everybody has run it.

    Args:
      prepare: May raise UserError; must not communicate.
    Returns:
      What it returned on this process.
    Raises:
      UserError: Its own, or that of the first process on which it failed.
    Collectives:
      As `gather_texts`.
    """
    problem: UserError | None = None
    try:
        value = prepare()
    except UserError as error:
        problem = error
    if jax.process_count() > 1:
        for process, text in enumerate(gather_texts(str(problem or ""))):
            if text:
                raise UserError(f"process {process}: {text}")
    if problem is not None:
        raise problem
    return value


def gather_texts(text: str) -> list[str]:
    """Lets every process know what each has to say.

    Args:
      text: Of this process.
    Returns:
      The texts of all processes, in their order.
    Collectives:
      With several processes, a gather of a length, and unless all are zero one of the
      longest text.
    """
    if jax.process_count() == 1:
        return [text]
    own = text.encode()
    lengths = multihost_utils.process_allgather(np.asarray(len(own), np.int32))
    if not np.any(lengths):
        return [""] * len(lengths)
    padded = own.ljust(int(np.max(lengths)), b"\0")
    rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return [
        row.tobytes()[:length].decode()
        for row, length in zip(np.asarray(rows, np.uint8), lengths, strict=True)
    ]
