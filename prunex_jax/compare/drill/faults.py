"""The faults of a drill: how they are done, and how a run has to end after them."""

import dataclasses
import signal

from prunex_jax.base.command import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_STALLED,
    EXIT_STOPPED,
)

LINK, MOVED, HANG, FULL_DISK, STOP = "link", "moved", "hang", "full_disk", "stop"
# Where it was and what to do, at the end of the line that says whom others miss.
_AT = ("at step", "phase")
_PLACE = (*_AT, "the same command")
_NAMED, _SILENT = "error: process {process}", "has not answered for"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of fault, and what is right after it."""

    # Exit codes that are right for the process it is done to, and for all others.
    victim: tuple[int, ...]
    others: tuple[int, ...]
    number: signal.Signals | None = None  # Sent to the process, if it is a signal.
    is_own: bool = False  # Whether the training process does it to itself.
    only_first: bool = False  # Whether only process 0 notices it.
    # What an output has to say, of those that can; {process} is the victim.
    said: tuple[str, ...] = (_NAMED, *_PLACE)


_LOST, _STOPPED = (EXIT_LOST,), (EXIT_STOPPED,)
_SAVED = ("stopped at step", "and saved")

FAULTS: dict[str, Fault] = {
    "kill": Fault(
        (-signal.SIGKILL,),
        _LOST,
        number=signal.SIGKILL,
        said=(_NAMED, _SILENT, *_PLACE),
    ),
    "term": Fault(
        _STOPPED,
        _STOPPED,
        number=signal.SIGTERM,
        said=_SAVED,
    ),
    "int": Fault(
        _STOPPED,
        _STOPPED,
        number=signal.SIGINT,
        said=_SAVED,
    ),
    STOP: Fault(
        _LOST,
        _LOST,
        number=signal.SIGSTOP,
        said=(_NAMED, _SILENT, *_PLACE),
    ),
    "error": Fault((EXIT_FAILED,), _LOST, is_own=True),
    HANG: Fault(
        (EXIT_STALLED, EXIT_LOST),
        (EXIT_STALLED, EXIT_LOST),
        is_own=True,
        said=_AT,
    ),
    FULL_DISK: Fault(
        (EXIT_BAD_INPUT,),
        _LOST,
        is_own=True,
        only_first=True,
        said=(_NAMED, *_AT),
    ),
    MOVED: Fault(
        (EXIT_BAD_INPUT, EXIT_LOST),
        (EXIT_BAD_INPUT, EXIT_LOST),
        said=("error: process", *_AT),
    ),
    # Those on both sides of it miss each other.
    LINK: Fault(_LOST, _LOST, said=(_SILENT, *_PLACE)),
}
# What random drills choose from.
RANDOM = ("kill", "term", "int", STOP, LINK)
