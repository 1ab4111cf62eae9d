"""Which records may be compared with each other, and in which order they are shown.

It owns grouping and order, which tables and plots share.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from prunex_jax.bench.links.records import Curve, Measurement, Record, Setup
from prunex_jax.bench.report.cells import digits, many, span

DENSE = "dense"  # Row that all others are compared with: hierarchical dense float32.
COMPUTATION = "computation"  # Row that r is counted in; it exchanges nothing.


@dataclasses.dataclass(frozen=True, order=True)
class Bed:
    """What records share that differ in numbers of hosts only.

    Attributes:
      study: `Study.name`.
      hosts_kind: namespaces | loopback | cluster.
      devices_per_host: Devices of every host.
    """

    study: str
    hosts_kind: str
    devices_per_host: int

    @property
    def title(self) -> str:
        """In words."""
        kind = "" if self.hosts_kind == "namespaces" else f" ({self.hosts_kind})"
        return f"{self.study}, {many(self.devices_per_host, 'device')} per host{kind}"


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """What records share that are compared with each other.

    Attributes:
      bed: Where.
      num_hosts: Size of the host axis.
    """

    bed: Bed
    num_hosts: int

    @classmethod
    def of(cls, setup: Setup) -> "Place":
        """The place of a record."""
        bed = Bed(setup.study, setup.hosts_kind, setup.devices_per_host)
        return cls(bed, setup.num_hosts)

    @property
    def title(self) -> str:
        """In words."""
        bed = self.bed
        kind = "" if bed.hosts_kind == "namespaces" else f" ({bed.hosts_kind})"
        size = (
            f"{many(self.num_hosts, 'host')} x {many(bed.devices_per_host, 'device')}"
        )
        return f"{bed.study}, {size}{kind}"


@dataclasses.dataclass(frozen=True)
class Spot:
    """Rows over one link at one place.

    Attributes:
      place: Where.
      link: As in `Study.links`.
    """

    place: Place
    link: str

    @classmethod
    def of(cls, setup: Setup) -> "Spot":
        """The spot of a record."""
        return cls(Place.of(setup), setup.link)

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.place.title}, {self.link}"


# Row -> what it did there.
Measured = Mapping[str, Measurement]
Curves = Mapping[str, Sequence[Curve]]
_Rows = TypeVar("_Rows")


def measured(records: Iterable[Record]) -> dict[Spot, Measured]:
    """Steady steps by place and link; what was measured twice counts the last time.

    Places come in the order of their hosts, links from the slowest to the fastest. The
    row that r is counted in is left out: it is in every `Setup`.
    """
    kept = [
        record
        for record in records
        if isinstance(record, Measurement) and record.setup.row != COMPUTATION
    ]
    found: dict[Spot, dict[str, Measurement]] = {spot: {} for spot in _spots(kept)}
    for record in kept:
        found[Spot.of(record.setup)][record.setup.row] = record
    return dict(found)


def curves(records: Iterable[Record]) -> dict[Spot, Curves]:
    """Whole runs by place and link, one per seed; the last one of a seed counts."""
    kept = [record for record in records if isinstance(record, Curve)]
    latest = {(Spot.of(c.setup), c.setup.row, c.seed): c for c in kept}
    found: dict[Spot, dict[str, list[Curve]]] = {spot: {} for spot in _spots(kept)}
    for (spot, row, _), curve in latest.items():
        found[spot].setdefault(row, []).append(curve)
    return {spot: dict(rows) for spot, rows in found.items()}


def by_place(found: Mapping[Spot, _Rows]) -> dict[Place, dict[str, _Rows]]:
    """Place -> link -> rows."""
    places: dict[Place, dict[str, _Rows]] = {}
    for spot, rows in found.items():
        places.setdefault(spot.place, {})[spot.link] = rows
    return places


def titles(records: Iterable[Record]) -> dict[str, str]:
    """Row -> what it is called: `dense` first, peers last, else as they came."""
    setups = [record.setup for record in records]
    first: dict[str, Setup] = {}
    for setup in setups:
        first.setdefault(setup.row, setup)
    first.pop(COMPUTATION, None)
    rows = sorted(first.values(), key=lambda s: (s.row != DENSE, s.runtime == "torch"))
    return {setup.row: setup.title for setup in rows}


def peers(records: Iterable[Record]) -> frozenset[str]:
    """Rows of another framework."""
    return frozenset(r.setup.row for r in records if r.setup.runtime == "torch")


def link_title(setups: Sequence[Setup]) -> str:
    """A link with both its speed and its r, on two lines.

    Args:
      setups: Of all rows over it.
    """
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


def _spots(records: Sequence[Record]) -> list[Spot]:
    def key(spot: Spot) -> tuple[Place, float]:
        return spot.place, speeds[spot] or math.inf

    speeds = {Spot.of(record.setup): record.setup.megabits for record in records}
    return sorted(speeds, key=key)
