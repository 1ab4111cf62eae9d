"""What the processes of a study are told, and the gates where they wait.

A process is told what to run by a `Spec`. Where it reaches a gate, it says what
happened since the last one and goes on when the runner says so; in between the runner
reads the byte counters and sets the speed of the links. One line of JSON each way, over
two pipes that the process has inherited. It needs neither jax nor torch.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a process runs."""

    config: Mapping[str, Any]  # Settings of the run.
    workdir: str  # Its folder.
    # Steps after which there is a gate; 0 is before the first.
    boundaries: tuple[int, ...]
    # Metric of the task by which the validation split is scored at every gate of a run
    # that is finished with its summary; empty where only steps are wanted.
    metric: str = ""
    # Examples of that split that are scored, spread evenly over it; 0: all.
    scored_examples: int = 0
    stand_in_seconds: float = 0.0  # Pause in every step.
    # Whether each step is a dense exchange and nothing else.
    exchange_only: bool = False
    hook: str = "dense"  # For peers.
    # Hosts that share the data; peers have one process or more on each.
    num_hosts: int = 1


def write_specs(path: Path, specs: Sequence[Spec]) -> None:
    """Writes what the processes of a session run, one after the other."""
    path.write_text(json.dumps([dataclasses.asdict(spec) for spec in specs]))


def read_specs(path: str | Path) -> list[Spec]:
    """Reads what `write_specs` wrote."""
    return [
        Spec(**{**values, "boundaries": tuple(values["boundaries"])})
        for values in json.loads(Path(path).read_text())
    ]


class Gatekeeper(Protocol):
    """Where a process tells what happened and waits until it may go on."""

    def arrive(self, **facts: Any) -> None:
        """As `Gate.arrive`."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """The process's end of the pipes: `news` to the runner, `orders` from it."""

    news: IO[str]
    orders: IO[str]

    @classmethod
    def of(cls, descriptors: str) -> "Gate":
        """Opens the inherited pipes, given by their numbers, as in "5,6"."""
        write, read = (int(number) for number in descriptors.split(","))
        return cls(os.fdopen(write, "w"), os.fdopen(read))

    def arrive(self, **facts: Any) -> None:
        """Tells the runner what happened, in plain values, and waits to go on.

        Raises:
          EOFError: The runner is gone.
        """
        self.news.write(json.dumps(facts) + "\n")
        self.news.flush()
        if not self.orders.readline():
            raise EOFError("the runner is gone")
