"""Which records may be compared with each other, and in which order they are shown."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from benchmarks.links.records import Curve, Measurement, Record, Setup
from benchmarks.report.marks import span
from prunex_jax.compare.report.tables import digits, many
from prunex_jax.compare.sweep.figure import Figure

DENSE = "dense"  # Row that all others are compared with: hierarchical dense float32.
COMPUTATION = "computation"  # Row that r is counted in; it exchanges nothing.


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """What records share that are compared with each other; fields as in `Setup`.

    0 hosts stand for any number of them.
    """

    study: str
    hosts_kind: str
    devices_per_host: int
    num_hosts: int = 0

    @classmethod
    def of(cls, setup: Setup) -> "Place":
        """The place of a record."""
        return cls(
            setup.study, setup.hosts_kind, setup.devices_per_host, setup.num_hosts
        )

    @property
    def of_any_size(self) -> "Place":
        """The same with any number of hosts."""
        return dataclasses.replace(self, num_hosts=0)

    @property
    def title(self) -> str:
        """In words."""
        size = f"{many(self.devices_per_host, 'device')} per host"
        if self.num_hosts:
            devices = many(self.devices_per_host, "device")
            size = f"{many(self.num_hosts, 'host')} x {devices}"
        kind = "" if self.hosts_kind == "namespaces" else f" ({self.hosts_kind})"
        return f"{self.study}, {size}{kind}"


# Row -> what it did over one link of one place.
Measured = Mapping[str, Measurement]
Curves = Mapping[str, Sequence[Curve]]
RecordT = TypeVar("RecordT", Measurement, Curve)


def measured(records: Iterable[Record]) -> dict[Place, dict[str, Measured]]:
    """Place -> link -> steady steps; what was measured twice counts the last time.

    Places come in the order of their hosts, links from the slowest to the fastest. The
    row that r is counted in is left out: it is in every `Setup`.
    """
    steady = [record for record in records if isinstance(record, Measurement)]
    kept = [record for record in steady if record.setup.row != COMPUTATION]
    found: dict[Place, dict[str, dict[str, Measurement]]] = {}
    for place, link, record in _in_order(kept):
        rows = found.setdefault(place, {}).setdefault(link, {})
        rows[record.setup.row] = record
    return {place: dict(links) for place, links in found.items()}


class Spot(NamedTuple):
    """Where whole runs are, and what they are scored by."""

    place: Place
    link: str
    figure: Figure


def curves(records: Iterable[Record]) -> dict[Spot, Curves]:
    """Spot -> whole runs, one per seed; the last one of a seed counts."""
    kept = [record for record in records if isinstance(record, Curve)]
    found: dict[Spot, dict[str, dict[int, Curve]]] = {}
    for place, link, curve in _in_order(kept):
        rows = found.setdefault(Spot(place, link, curve.figure), {})
        rows.setdefault(curve.setup.row, {})[curve.seed] = curve
    return {
        spot: {row: list(seeds.values()) for row, seeds in rows.items()}
        for spot, rows in found.items()
    }


def titles(records: Iterable[Record]) -> dict[str, str]:
    """Row -> what it is called: `dense` first, peers last, else as they came."""
    first: dict[str, Setup] = {}
    for record in records:
        first.setdefault(record.setup.row, record.setup)
    first.pop(COMPUTATION, None)
    rows = sorted(first.values(), key=lambda s: (s.row != DENSE, s.runtime == "torch"))
    return {setup.row: setup.title for setup in rows}


def link_title(setups: Sequence[Setup]) -> str:
    """A link with both its speed and its r, on two lines."""
    link = setups[0].link
    speeds = [setup.megabits for setup in setups if setup.megabits is not None]
    if not speeds:
        return link
    speed, ratio = f"{span(speeds)} Mbit/s", span([setup.r for setup in setups])
    if link.startswith("r="):
        return f"{link}\n{speed}"
    return f"{link}\nr={ratio}" if link == speed else f"{link}\n{speed}, r={ratio}"


def stand_in_notes(setups: Iterable[Setup]) -> tuple[str, ...]:
    """Says plainly if a pause stood for computation; nothing if none did."""
    pauses = {
        digits(setup.stand_in_seconds * setup.num_hosts)
        for setup in setups
        if setup.stand_in_seconds
    }
    return tuple(
        f"Stand-in: computation is a pause of {pause} s / hosts in every step, since "
        "one machine cannot compute for many hosts at once."
        for pause in sorted(pauses)
    )


def _in_order(records: Sequence[RecordT]) -> Iterator[tuple[Place, str, RecordT]]:
    """Records with their place and link, sorted by these; else as they came."""
    speeds = {(Place.of(r.setup), r.setup.link): r.setup.megabits for r in records}

    def spot(record: RecordT) -> tuple[Place, float]:
        place = Place.of(record.setup)
        return place, speeds[place, record.setup.link] or math.inf

    for record in sorted(records, key=spot):
        yield Place.of(record.setup), record.setup.link, record
