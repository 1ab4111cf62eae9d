"""Tables of steady steps: their time, bytes, memory and scaling.

It owns what is compared with what: ratios to row `dense`, speed-ups over one host,
counted bytes against foreseen ones. It leaves how tables look to `cells` and `report`,
whole runs to `accuracy_tables`, the model of cost to `model_tables`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from prunex_jax.bench.links.records import Measurement, Record, Setup
from prunex_jax.bench.places import (
    DENSE,
    Bed,
    Measured,
    Place,
    by_place,
    link_title,
    measured,
    stand_in_notes,
    titles,
)
from prunex_jax.bench.report.cells import (
    Cell,
    Table,
    digits,
    figures,
    many,
    shown_bytes,
    shown_range,
    shown_seconds,
    span,
)

# Share and constant by which counted bytes may differ from those of trace and formula.
# A message from one host to another costs more than its payload: headers of Ethernet,
# IP and TCP, the acknowledgements of what comes the other way, and the small control
# messages with which gloo opens a transfer. A collective has one message per hop.
SHARE = 0.03
BYTES_PER_MESSAGE = 1_000.0


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """Counted bytes too far from those foreseen.

    Attributes:
      setup: Where.
      source: trace | formula.
      counted: Bytes per step at the interface.
      foreseen: Bytes per step by the source.
      allowed: How far they may differ.
    """

    setup: Setup
    source: str
    counted: float
    foreseen: float
    allowed: float

    @property
    def excess(self) -> float:
        """Bytes beyond what is allowed."""
        return abs(self.counted - self.foreseen) - self.allowed

    def __str__(self) -> str:
        where = f"{Place.of(self.setup).title}, {self.setup.link}, {self.setup.title}"
        return (
            f"{where}: {self.counted:,.0f} bytes per step at the interface and "
            f"{self.foreseen:,.0f} by {self.source}, {self.allowed:,.0f} apart at most"
        )


def byte_disagreements(
    records: Iterable[Record],
    share: float = SHARE,
    bytes_per_message: float = BYTES_PER_MESSAGE,
) -> list[Disagreement]:
    """Lists where counted bytes are not those of trace and formula.

    Args:
      records: Measured steps; curves, and what was not counted, are passed over.
      share: Of the foreseen bytes, by which the counted ones may differ.
      bytes_per_message: Allowed on top for each message of each device; a step with
        less than one message is allowed one, for what idle connections say.
    Returns:
      One entry for every source that disagrees.
    """
    return [
        gap
        for record in records
        if isinstance(record, Measurement)
        for gap in _gaps(record, share, bytes_per_message)
        if gap.excess > 0
    ]


def step_times(records: Sequence[Record]) -> list[Table]:
    """Seconds per step: methods by links, a table for every place."""
    tables, called = [], titles(records)
    for place, links in by_place(measured(records)).items():
        found = [each for rows in links.values() for each in rows.values()]
        rounds = span([len(each.seconds) for each in found], share=0.0)
        notes = (
            f"Median seconds per step of n = {rounds} measured rounds; their "
            f"quartiles; share of the time of row {DENSE!r} over the same link. r: "
            "time of a dense exchange over that of computing a step, which takes "
            f"{shown_seconds(found[0].setup.compute_seconds)} alone.",
            *stand_in_notes(each.setup for each in found),
        )
        header = [
            link_title([m.setup for m in rows.values()]) for rows in links.values()
        ]
        rows = [
            (Cell(called[row]), *(_step_cell(links[link], row) for link in links))
            for row in _present(called, links.values())
        ]
        title = f"Step time: {place.title}"
        tables.append(Table(title, ("method", *header), tuple(rows), notes))
    return tables


def bytes_per_step(
    records: Sequence[Record],
    share: float = SHARE,
    bytes_per_message: float = BYTES_PER_MESSAGE,
) -> list[Table]:
    """Bytes counted, traced and calculated; see `byte_disagreements` for the rest."""
    header = (
        *("method", "interface", "trace", "formula", "difference", "messages"),
        *("difference\nper message", "link"),
    )
    note = (
        "Bytes that a host sends in a step, over the link where they agree least. The "
        "difference is that of interface and trace (formula, where nothing is traced). "
        "Messages are those that one device sends, one per hop of a collective, and so "
        "is the difference per message. "
        f"(!): more than {100 * share:g} % and {digits(bytes_per_message)} bytes per "
        "message apart."
    )
    tables, called = [], titles(records)
    for place, links in by_place(measured(records)).items():
        rows = []
        for row in _present(called, links.values()):
            found = [at[row] for at in links.values() if row in at]
            excess = [_excess(each, share, bytes_per_message) for each in found]
            worst = excess.index(max(excess))
            cells = _byte_cells(found[worst], excess[worst] > 0)
            name = found[worst].setup.link
            if len(found) > 1:
                name += f"\nof {many(len(found), 'link')}"
            rows.append((Cell(called[row]), *cells, Cell(name)))
        title = f"Bytes per step: {place.title}"
        tables.append(Table(title, header, tuple(rows), (note,)))
    return tables


def peak_memory(records: Sequence[Record]) -> list[Table]:
    """Largest resident set of a process: methods by numbers of hosts."""
    note = "Largest resident set of a process, over all links."
    tables, called = [], titles(records)
    for bed, places in _by_bed(records).items():
        rows = []
        for row in _present(called, (at for p in places.values() for at in p.values())):
            cells = []
            for links in places.values():
                peaks = [at[row].peak_memory for at in links.values() if row in at]
                cells.append(
                    Cell(shown_bytes(max(peaks)), max(peaks)) if peaks else Cell()
                )
            rows.append((Cell(called[row]), *cells))
        header = ("method", *(many(place.num_hosts, "host") for place in places))
        tables.append(Table(f"Peak memory: {bed.title}", header, tuple(rows), (note,)))
    return tables


def scaling(records: Sequence[Record]) -> list[Table]:
    """Seconds per step by numbers of hosts, against one host where it was measured."""
    tables, called = [], titles(records)
    for bed, places in scaling_beds(records).items():
        everything = [at for links in places.values() for at in links.values()]
        setups = [each.setup for at in everything for each in at.values()]
        notes = (
            "Median seconds per step of the same global batch; speed-up over the same "
            "method on one host; efficiency: speed-up over hosts.",
            *stand_in_notes(setups),
        )
        header = ("method", *(many(place.num_hosts, "host") for place in places))
        for link in links_beyond_one_host(places):
            rows = []
            for row in _present(
                called, (p[link] for p in places.values() if link in p)
            ):
                times = step_seconds(places, link, row)
                cells = [_scaling_cell(times, place.num_hosts) for place in places]
                rows.append((Cell(called[row]), *cells))
            title = f"Scaling: {bed.title}, {link}"
            tables.append(Table(title, header, tuple(rows), notes))
    return tables


def scaling_beds(
    records: Sequence[Record],
) -> dict[Bed, dict[Place, dict[str, Measured]]]:
    """Where steps were measured on one host and on more, or with a stand-in."""
    return {
        bed: places
        for bed, places in _by_bed(records).items()
        if len(places) > 1
        and (min(place.num_hosts for place in places) == 1 or _stands_in(places))
    }


def step_seconds(
    places: Mapping[Place, Mapping[str, Measured]], link: str, row: str
) -> dict[int, float]:
    """Number of hosts -> median seconds per step of a row over a link.

    One host has no link, so its steps over any link will do.
    """
    found = {}
    for place, links in places.items():
        on_any = [at for at in links.values() if row in at]
        at = links.get(link, {})
        if row not in at and place.num_hosts == 1 and on_any:
            at = on_any[0]
        if row in at:
            found[place.num_hosts] = at[row].median
    return found


def _by_bed(
    records: Sequence[Record],
) -> dict[Bed, dict[Place, dict[str, Measured]]]:
    beds: dict[Bed, dict[Place, dict[str, Measured]]] = {}
    for place, links in by_place(measured(records)).items():
        beds.setdefault(place.bed, {})[place] = links
    return beds


def _stands_in(places: Mapping[Place, Mapping[str, Measured]]) -> bool:
    found = [at for links in places.values() for at in links.values()]
    return any(each.setup.stand_in_seconds for at in found for each in at.values())


def _present(called: Mapping[str, str], links: Iterable[Measured]) -> list[str]:
    """Rows that were measured over any of the links, in the order of tables."""
    rows = {row for at in links for row in at}
    return [row for row in called if row in rows]


def links_beyond_one_host(places: Mapping[Place, Mapping[str, Measured]]) -> list[str]:
    """Links in order, but for those that one host alone was measured with."""
    several = [links for place, links in places.items() if place.num_hosts > 1]
    return list(dict.fromkeys(link for links in several for link in links))


def _step_cell(rows: Measured, row: str) -> Cell:
    if row not in rows:
        return Cell()
    found, dense = rows[row], rows.get(DENSE)
    low, high = found.quartiles
    lines = [shown_seconds(found.median)]
    if len(found.seconds) > 1:
        lines.append(shown_range(low, high))
    if dense is not None:
        lines.append(f"{figures(found.median / dense.median)} of dense")
    return Cell("\n".join(lines), found.median)


def _scaling_cell(times: Mapping[int, float], num_hosts: int) -> Cell:
    if num_hosts not in times:
        return Cell()
    seconds = times[num_hosts]
    lines = [shown_seconds(seconds)]
    if 1 in times:
        speed_up = times[1] / seconds
        lines.append(f"{figures(speed_up)}x, {100 * speed_up / num_hosts:.0f} %")
    return Cell("\n".join(lines), seconds)


def _byte_cells(found: Measurement, is_flagged: bool) -> list[Cell]:
    """Interface, trace, formula, difference, messages, difference per message."""
    counted, traced = found.interface_bytes, found.traced_bytes
    foreseen = found.formula_bytes if traced is None else traced
    sizes = (counted, traced, found.formula_bytes)
    cells = [Cell() if s is None else Cell(shown_bytes(s), s) for s in sizes]
    share = each = Cell()
    if counted is not None and foreseen is not None:
        gap = counted - foreseen
        if foreseen:
            text = f"{100 * gap / foreseen:+.2f} %"
            share = Cell(text, gap / foreseen, is_flagged)
        if messages := found.hops * found.setup.devices_per_host:
            each = Cell(f"{gap / messages:+,.0f} B", gap / messages)
        if not foreseen:
            share = Cell(f"{gap:+,.0f} B", gap, is_flagged)
    return [*cells, share, Cell(digits(found.hops), found.hops), each]


def _gaps(
    found: Measurement, share: float, bytes_per_message: float
) -> list[Disagreement]:
    """How far counted bytes are from each source there is."""
    counted = found.interface_bytes
    if counted is None:
        return []
    messages = max(1.0, found.hops) * found.setup.devices_per_host
    sources = {"trace": found.traced_bytes, "formula": found.formula_bytes}
    return [
        Disagreement(
            setup=found.setup,
            source=source,
            counted=counted,
            foreseen=foreseen,
            allowed=share * foreseen + bytes_per_message * messages,
        )
        for source, foreseen in sources.items()
        if foreseen is not None
    ]


def _excess(found: Measurement, share: float, bytes_per_message: float) -> float:
    gaps = _gaps(found, share, bytes_per_message)
    return max((gap.excess for gap in gaps), default=0.0)
