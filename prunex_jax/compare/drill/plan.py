"""The faults of a drill: how they are done, and how a run has to end after them; and
which comes at which step of which process, the same for all, from a seed."""

import dataclasses
import itertools
import random
import signal
from collections.abc import Sequence

from prunex_jax.base.command import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_STALLED,
    EXIT_STOPPED,
)

# Steps of a run per fault, and how far from their ends a fault comes: the run is to be
# past the fault before when the next one comes.
STEPS_PER_FAULT, _MARGIN = 20, 4
CHECKPOINT_STEPS = 8
UNDISTURBED, DISTURBED = "undisturbed", "disturbed"

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
_UNHEARD = (_NAMED, _SILENT, *_PLACE)
_HUNG, _GONE = (EXIT_STALLED, EXIT_LOST), (EXIT_BAD_INPUT, EXIT_LOST)

FAULTS: dict[str, Fault] = {
    "kill": Fault((-signal.SIGKILL,), _LOST, number=signal.SIGKILL, said=_UNHEARD),
    "term": Fault(_STOPPED, _STOPPED, number=signal.SIGTERM, said=_SAVED),
    "int": Fault(_STOPPED, _STOPPED, number=signal.SIGINT, said=_SAVED),
    STOP: Fault(_LOST, _LOST, number=signal.SIGSTOP, said=_UNHEARD),
    "error": Fault((EXIT_FAILED,), _LOST, is_own=True),
    HANG: Fault(_HUNG, _HUNG, is_own=True, said=_AT),
    FULL_DISK: Fault(
        (EXIT_BAD_INPUT,), _LOST, is_own=True, only_first=True, said=(_NAMED, *_AT)
    ),
    MOVED: Fault(_GONE, _GONE, said=("error: process", *_AT)),
    # Those on both sides of it miss each other.
    LINK: Fault(_LOST, _LOST, said=(_SILENT, *_PLACE)),
}
# What random drills choose from.
RANDOM = ("kill", "term", "int", STOP, LINK)


@dataclasses.dataclass(frozen=True)
class Blow:
    """One fault of a run."""

    fault: str  # A key of `FAULTS`.
    process: int  # Whom it is done to.
    step: int  # When that process has done so many steps.


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run of one method and what happens to it, in order."""

    method: str
    blows: tuple[Blow, ...]

    @property
    def num_steps(self) -> int:
        """Length of the run: something is left to do after the last fault."""
        return STEPS_PER_FAULT * (len(self.blows) + 1)

    @property
    def starts(self) -> "tuple[Start, ...]":
        """All starts of its processes: once undisturbed, then up to every fault."""
        blows = (*self.blows, None)
        disturbed = [Start(self, DISTURBED, n, blow) for n, blow in enumerate(blows)]
        return (Start(self, UNDISTURBED, 0, None), *disturbed)


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the processes of a run."""

    plan: Plan
    run: str  # UNDISTURBED or DISTURBED.
    number: int  # Of the starts of this run.
    blow: Blow | None  # None: to the end.

    @property
    def name(self) -> str:
        """As files are called that belong to it."""
        return f"{self.run}_{self.number}"


def every_fault(
    methods: Sequence[str], faults: Sequence[str], num_processes: int, seed: int
) -> list[Plan]:
    """A run per method, which suffers every fault once."""
    chooser = random.Random(seed)
    return [Plan(method, _blows(faults, num_processes, chooser)) for method in methods]


def random_faults(
    methods: Sequence[str],
    faults: Sequence[str],
    num_processes: int,
    count: int,
    seed: int,
) -> list[Plan]:
    """Runs that suffer `count` faults together; methods and faults take turns.

    Every fault is done about equally often, in an order that the seed shuffles; process
    and step are drawn.
    """
    chooser = random.Random(seed)
    drawn = [*itertools.islice(itertools.cycle(faults), count)]
    chooser.shuffle(drawn)
    shares = [drawn[first :: len(methods)] for first in range(len(methods))]
    return [
        Plan(method, _blows(share, num_processes, chooser))
        for method, share in zip(methods, shares, strict=True)
        if share
    ]


def _blows(
    faults: Sequence[str], num_processes: int, chooser: random.Random
) -> tuple[Blow, ...]:
    blows = []
    for number, fault in enumerate(faults):
        process = chooser.randrange(num_processes)
        step = chooser.randrange(_MARGIN, STEPS_PER_FAULT - _MARGIN)
        if FAULTS[fault].only_first:
            process = 0
        blows.append(Blow(fault, process, number * STEPS_PER_FAULT + step))
    return tuple(blows)
