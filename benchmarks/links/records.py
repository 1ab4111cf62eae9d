"""What a study over links finds, as lines of `records.jsonl`.

`runner` writes them; tables, plots and the model of cost read them.
"""

import dataclasses
import json
import operator
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunex_jax.compare.sweep.figure import Figure, Point

RECORDS_FILE = "records.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Where something was measured."""

    study: str  # `Study.name`.
    row: str  # `Row.name`.
    title: str  # `Row.title`.
    runtime: str  # jax | torch.
    num_hosts: int  # Size of the host axis.
    devices_per_host: int  # Devices of every host.
    # namespaces (counted and shaped) | loopback (neither) | cluster (counted, not
    # shaped; other traffic of the machine counts too).
    hosts_kind: str
    link: str  # As in `LinkStudy.links`.
    megabits: float | None  # Its speed in Mbit/s, each way; None if it is not limited.
    # Computation of a step of the unpruned network: that of method `none` on as many
    # hosts.
    compute_seconds: float
    dense_bytes: float  # What a host sends in a hierarchical dense float32 exchange.
    # Part of the step that was a pause, per host; 0 if none was.
    stand_in_seconds: float = 0.0

    @property
    def r(self) -> float:
        """Time of a dense exchange at the speed of the link, of that of computing."""
        if self.megabits is None:
            return 0.0
        return 8 * self.dense_bytes / 1e6 / self.megabits / self.compute_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Steady steps of one row over one link."""

    setup: Setup  # Where.
    # Per step, one number for every measured round; of the slowest host.
    seconds: tuple[float, ...]
    # Sent per step, mean over hosts, as their interfaces counted; None where nothing
    # could be counted.
    interface_bytes: float | None
    # Sent per step, by the traces of the programs that ran; None for peers.
    traced_bytes: float | None
    # What the model of cost foresees: the same by a trace on an abstract mesh.
    formula_bytes: float | None
    # Times per step that a message has to reach a neighbour before the next can leave;
    # see `comm.count_hops`.
    hops: float
    peak_memory: int  # Largest resident set of a process so far, in bytes.

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the rounds took at most the first, three quarters the second."""
        if len(self.seconds) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A whole run of one row over one link."""

    setup: Setup  # Where.
    points: tuple[Point, ...]  # In the order of steps.
    seed: int  # Of the run.
    summary: Mapping[str, Any]  # `summary.json` of the run; {} for peers.
    # What its points have the values of.
    figure: Figure = dataclasses.field(default_factory=Figure)

    def reached(self, target: float) -> Point | None:
        """The first point that is as good on the validation split, or better."""
        reaches = operator.le if self.figure.less_is_better else operator.ge
        return next((p for p in self.points if reaches(p.value, target)), None)


Record = Measurement | Curve


def write_record(folder: Path, record: Record) -> None:
    """Appends a record to the folder's file, after its last whole line."""
    kind = type(record).__name__.lower()
    line = json.dumps({"kind": kind, **dataclasses.asdict(record)}) + "\n"
    path = folder / RECORDS_FILE
    with open(path, "r+b" if path.exists() else "w+b") as file:
        written = file.read()
        file.seek(written.rfind(b"\n") + 1)
        file.write(line.encode())
        file.truncate()


def read_records(folder: Path) -> list[Record]:
    """Reads what `write_record` wrote; [] if there is nothing."""
    path = folder / RECORDS_FILE
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [_record(json.loads(line)) for line in lines]


def forget_study(folder: Path, study: str) -> None:
    """Removes the records of a study, and of no other."""
    kept = [record for record in read_records(folder) if record.setup.study != study]
    (folder / RECORDS_FILE).unlink(missing_ok=True)
    for record in kept:
        write_record(folder, record)


def _point(values: dict[str, Any]) -> Point:
    # Earlier versions knew accuracies only.
    value = values.pop("accuracy", None)
    return Point(**values) if value is None else Point(value=value, **values)


def _record(values: dict[str, Any]) -> Record:
    kind, setup = values.pop("kind"), Setup(**values.pop("setup"))
    if kind == "curve":
        points = tuple(map(_point, values.pop("points")))
        # For the same reason they did not name the metric.
        figure = Figure(**values.pop("figure", {}))
        return Curve(setup=setup, points=points, figure=figure, **values)
    # Earlier versions counted collectives beside hops.
    values.pop("messages", None)
    return Measurement(setup=setup, seconds=tuple(values.pop("seconds")), **values)
