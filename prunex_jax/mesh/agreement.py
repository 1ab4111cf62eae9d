"""Processes fail together: one that stops alone leaves the others waiting."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from prunex_jax.base.errors import AgreedError, UserError

_Value = TypeVar("_Value")


def run_together(prepare: Callable[[], _Value]) -> _Value:
    """Runs something on every process, and goes on only if it worked on all of them.

    Also a barrier: nobody returns before everybody has run it.

    Args:
      prepare: May raise UserError; must not communicate.
    Returns:
      What it returned on this process.
    Raises:
      UserError: Its own; of several processes AgreedError, with the text of the first
        process on which it failed.
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
                raise AgreedError(f"process {process}: {text}") from problem
    if problem is not None:
        raise problem
    return value


def check_same(described: Mapping[str, Any], remedy: str) -> None:
    """Refuses to go on where processes differ in something.

    Args:
      described: What has to be the same -> its value, which JSON can hold; what tells
        people most comes first.
      remedy: What the user can do.
    Raises:
      AgreedError: Processes differ; it names the first thing in which, and both values.
    Collectives:
      As `gather_texts`; of few bytes where all are the same.
    """
    own = json.dumps(dict(described), sort_keys=True)
    digests = gather_texts(hashlib.sha256(own.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everybody = [json.loads(text) for text in gather_texts(json.dumps(dict(described)))]
    for process, values in enumerate(everybody):
        for key in {**everybody[0], **values}:
            here, there = (d.get(key, "absent") for d in (everybody[0], values))
            if here != there:
                raise AgreedError(
                    f"{key} is {here!r} on process 0 and {there!r} on process "
                    f"{process}; {remedy}"
                )


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
