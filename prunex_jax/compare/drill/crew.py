"""The processes of a drill: where they run, and the files in which they meet."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.files import read_object
from prunex_jax.compare.drill.hosts import Hosts
from prunex_jax.compare.drill.plan import Plan, Start

PLAN_FILE = "plan.json"


class DrillFailedError(RuntimeError):
    """The drill itself cannot go on; says what it waited for in vain."""


@dataclasses.dataclass(frozen=True)
class Record:
    """How one process of a start ended."""

    process: int
    code: int | None  # None: it did not end within the limit, and was killed.
    step: int  # Steps done.
    ended: float  # Time of its end; of the Unix epoch, as machines share no other.
    acted: float | None = None  # When the fault was done to it.
    resumed: int = 0  # The step it went on from.
    digest: str = ""  # Of its part of the state after the last step.
    left_over: int = 0  # Processes that outlived it.


@dataclasses.dataclass(frozen=True)
class Crew:
    """The processes of a drill, and where they run."""

    num_processes: int
    workdir: Path  # Shared by all.
    hosts: Hosts  # Each process is on the one of its number.
    coordinator: Callable[[Start], str]  # Where the processes of a start meet.
    silence_seconds: int
    limit_seconds: float  # For one start.

    def run_folder(self, start: Start) -> Path:
        """The run folder of a start."""
        return self.workdir / start.plan.method / start.run

    def log(self, start: Start, process: int) -> Path:
        """What a process of a start has printed."""
        name = f"{start.name}_process{process}.log"
        return self.workdir / start.plan.method / "logs" / name

    def record_file(self, start: Start, process: int) -> Path:
        """Where the record of a process is."""
        name = f"{start.name}_process{process}.json"
        return self.workdir / start.plan.method / "records" / name

    def records(self, start: Start) -> list[Record]:
        """The records of a start that are there, in the order of processes."""
        files = [self.record_file(start, n) for n in range(self.num_processes)]
        found = [read_object(file) for file in files if file.exists()]
        return [Record(**content) for content in found if content is not None]

    def is_recorded(self, start: Start) -> bool:
        """Whether all processes of a start have ended and said so."""
        return len(self.records(start)) == self.num_processes

    def forget(self, start: Start) -> None:
        """Removes the run folder of a start, and its records."""
        shutil.rmtree(self.run_folder(start), ignore_errors=True)
        for process in range(self.num_processes):
            self.record_file(start, process).unlink(missing_ok=True)

    def described(self, plans: Sequence[Plan]) -> dict[str, Any]:
        """What tells drills apart, as the plan file holds it."""
        runs = {plan.method: [vars(blow) for blow in plan.blows] for plan in plans}
        return {"processes": self.num_processes, "runs": runs}
