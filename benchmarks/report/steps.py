"""Tables and plots of steady steps: their time, bytes, memory and scaling."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.links.records import Measurement, Record, Setup
from benchmarks.report.marks import (
    draw_diagonal,
    draw_levels,
    shown_range,
    shown_seconds,
    span,
)
from benchmarks.report.places import (
    DENSE,
    Measured,
    Place,
    link_title,
    measured,
    stand_in_notes,
    titles,
)
from prunex_jax.compare.report.plots import XY, Looks, Plot, Series
from prunex_jax.compare.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    figures,
    make_table,
    many,
    method_table,
    shown_bytes,
)

# Share and constant by which counted bytes may differ from those of trace and model.
# A message from one host to another costs more than its payload: headers of Ethernet,
# IP and TCP, the acknowledgements of what comes the other way, and the small control
# messages with which gloo opens a transfer. A collective has one message per hop.
SHARE = 0.03
BYTES_PER_MESSAGE = 1_000.0
_PAUSE = ", with a pause instead of computing"
_UNLIMITED_GAP = 2.5  # Factor from the fastest link to the mark of no limit.

# Number of hosts -> link -> row -> what was measured.
Sizes = Mapping[int, Mapping[str, Measured]]
# Row -> number of hosts -> seconds per step.
Times = Mapping[str, Mapping[int, float]]
# Study, row, number of hosts -> speed of the link in Mbit/s and seconds per step.
Lines = Mapping[tuple[str, str, int], Sequence[XY]]


def byte_disagreements(records: Iterable[Record]) -> list[str]:
    """Says where counted bytes are not those of trace and model.

    They may differ by `SHARE` of the foreseen bytes, and by `BYTES_PER_MESSAGE` for
    each message of each device; a step with less than one message is allowed one, for
    what idle connections say.
    """
    return [
        f"{Place.of(each.setup).title}, {each.setup.link}, {each.setup.title}: "
        f"{each.interface_bytes:,.0f} bytes per step at the interface and "
        f"{foreseen:,.0f} by {source}, {allowed:,.0f} apart at most"
        for each in records
        if isinstance(each, Measurement)
        for source, foreseen, allowed in _foreseen(each)
        if _excess(each, foreseen, allowed) > 0
    ]


def step_times(records: Sequence[Record]) -> list[Table]:
    """Seconds per step: methods by links, a table for every place."""
    tables, called = [], titles(records)
    for place, links in measured(records).items():
        found = [each for rows in links.values() for each in rows.values()]
        rounds = span([len(each.seconds) for each in found], share=0.0)
        notes = (
            f"Median seconds per step of n = {rounds} measured rounds; their "
            f"quartiles; share of the time of row {DENSE!r} over the same link. r: "
            "time of a dense exchange over that of computing a step, which takes "
            f"{shown_seconds(found[0].setup.compute_seconds)} alone.",
            *stand_in_notes(each.setup for each in found),
        )
        columns = [
            Column(
                link_title([each.setup for each in rows.values()]),
                functools.partial(_step_cell, rows),
            )
            for rows in links.values()
        ]
        title = f"Step time: {place.title}"
        tables.append(method_table(title, called, columns, notes))
    return tables


def bytes_per_step(records: Sequence[Record]) -> list[Table]:
    """Bytes counted, traced and calculated; see `byte_disagreements` for the rest."""
    note = (
        "Bytes that a host sends in a step, over the link where they agree least. The "
        "difference is that of interface and trace (model, where nothing is traced). "
        "Messages are those that one device sends, one per hop of a collective, and so "
        "is the difference per message. "
        f"(!): more than {100 * SHARE:g} % and {digits(BYTES_PER_MESSAGE)} bytes per "
        "message apart."
    )
    tables, called = [], titles(records)
    for place, links in measured(records).items():
        found = [
            [at[row] for at in links.values() if row in at]
            for row in called
            if any(row in at for at in links.values())
        ]
        num_links = {each[0].setup.row: len(each) for each in found}
        columns: tuple[Column[Measurement], ...] = (
            Column("method", lambda each: called[each.setup.row]),
            Column("interface", lambda each: each.interface_bytes, shown_bytes),
            Column("trace", lambda each: each.traced_bytes, shown_bytes),
            Column("model", lambda each: each.formula_bytes, shown_bytes),
            Column("difference", _difference_cell),
            Column("messages", lambda each: each.hops),
            Column("difference\nper message", _per_message, "{:+,.0f} B".format),
            Column("link", functools.partial(_link_text, num_links)),
        )
        rows = [max(each, key=_worst_excess) for each in found]
        title = f"Bytes per step: {place.title}"
        tables.append(make_table(title, columns, rows, (note,)))
    return tables


def peak_memory(records: Sequence[Record]) -> list[Table]:
    """Largest resident set of a process: methods by numbers of hosts."""
    note = "Largest resident set of a process, over all links."
    tables, called = [], titles(records)
    for place, sizes in _by_size(records).items():
        columns = [
            Column(many(num, "host"), functools.partial(_peak, links), shown_bytes)
            for num, links in sizes.items()
        ]
        title = f"Peak memory: {place.title}"
        tables.append(method_table(title, called, columns, (note,)))
    return tables


def scaling(records: Sequence[Record]) -> list[Table]:
    """Seconds per step by numbers of hosts, against one host where it was measured."""
    tables, called = [], titles(records)
    for place, link, times, setups in _scalings(records):
        notes = (
            "Median seconds per step of the same global batch; speed-up over the same "
            "method on one host; efficiency: speed-up over hosts.",
            *stand_in_notes(setups),
        )
        columns = [
            Column(many(num, "host"), functools.partial(_scaling_cell, num, times))
            for num in sorted({setup.num_hosts for setup in setups})
        ]
        title = f"Scaling: {place.of_any_size.title}, {link}"
        tables.append(method_table(title, called, columns, notes))
    return tables


def step_time_plots(
    records: Sequence[Record], lines: Lines, looks: Looks
) -> list[Plot]:
    """Median step time and quartiles against the speed of links, and modelled lines."""
    plots = []
    for place, links in measured(records).items():
        found = [each for rows in links.values() for each in rows.values()]
        speeds = {each.setup.megabits for each in found}
        if len(speeds - {None}) < 2:
            continue
        unlimited = _UNLIMITED_GAP * max(speed for speed in speeds if speed)
        series = []
        for row in looks:
            mine = [each for each in found if each.setup.row == row]
            points = [(each.setup.megabits or unlimited, each.median) for each in mine]
            line = lines.get((place.study, row, place.num_hosts))
            if line is None:
                line = [point for point in points if point[0] < unlimited]
            if mine:
                spread = [each.quartiles for each in mine]
                series.append(Series(row, points, spread, line))
        pause = _PAUSE * bool(found[0].setup.stand_in_seconds)
        plot = Plot(
            plot_name("step-time", place),
            f"Step time: {place.title}{pause}",
            "Mbit/s of every host's link, each way",
            "seconds per step",
            series,
            looks,
            log="xy",
            draw_more=functools.partial(
                draw_levels,
                {found[0].setup.compute_seconds: "computation alone"},
                unlimited=unlimited if None in speeds else None,
            ),
        )
        plots.append(plot)
    return plots


def scaling_plots(records: Sequence[Record], looks: Looks) -> list[Plot]:
    """Speed-up over one host against hosts, where one host was measured too."""
    plots = []
    for place, link, times, setups in _scalings(records):
        pause = _PAUSE * any(setup.stand_in_seconds for setup in setups)
        title = f"Scaling: {place.of_any_size.title}, {link}{pause}"
        plots += speed_up_plot(plot_name("scaling", place, link), title, times, looks)
    return plots


def speed_up_plot(name: str, title: str, times: Times, looks: Looks) -> list[Plot]:
    """Plots speed-ups over one host; nothing where no row ran on one and on more."""
    series = [
        Series(row, [(n, times[row][1] / times[row][n]) for n in sorted(times[row])])
        for row in looks
        if 1 in times.get(row, {})
    ]
    if all(len(each.points) < 2 for each in series):
        return []
    up = "speed-up over one host"
    most = max(n for each in series for n, _ in each.points)
    more = functools.partial(draw_diagonal, 1, most, "ideal", 0.0)
    labels = name, title, "hosts", up
    return [Plot(*labels, series, looks, log="xy", log_base=2, draw_more=more)]


def plot_name(what: str, place: Place, link: str = "") -> str:
    """Name of the file of a plot: letters, digits, dots, dashes."""
    size = f"{place.num_hosts}x{place.devices_per_host}"
    parts = [what, place.study, size, place.hosts_kind, link]
    text = "_".join(part for part in parts if part and part != "namespaces")
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)


def _by_size(records: Sequence[Record]) -> dict[Place, dict[int, dict[str, Measured]]]:
    """Place of any size -> number of hosts -> link -> row -> what was measured."""
    beds: dict[Place, dict[int, dict[str, Measured]]] = {}
    for place, links in measured(records).items():
        beds.setdefault(place.of_any_size, {})[place.num_hosts] = links
    return beds


def _scalings(
    records: Sequence[Record],
) -> Iterator[tuple[Place, str, Times, list[Setup]]]:
    """Largest place, link, times and setups: for one host and more, or a stand-in.

    One host has no link, so its steps over any link will do.
    """
    for place, sizes in _by_size(records).items():
        links = [at for links in sizes.values() for at in links.values()]
        setups = [each.setup for at in links for each in at.values()]
        has_base = 1 in sizes or any(setup.stand_in_seconds for setup in setups)
        if len(sizes) < 2 or not has_base:
            continue
        largest = dataclasses.replace(place, num_hosts=max(sizes))
        alone = collections.ChainMap(*map(dict, sizes.get(1, {}).values()))
        for link in dict.fromkeys(
            link for num_hosts in sizes if num_hosts > 1 for link in sizes[num_hosts]
        ):
            found = {num: at.get(link, {}) for num, at in sizes.items()}
            rows = {row for at in found.values() for row in at}
            if 1 in found:
                found[1] = {**alone, **found[1]}
            times = {
                row: {num: at[row].median for num, at in found.items() if row in at}
                for row in rows
            }
            yield largest, link, times, setups


def _peak(links: Mapping[str, Measured], row: str) -> int | None:
    peaks = [at[row].peak_memory for at in links.values() if row in at]
    return max(peaks, default=None)


def _link_text(num_links: Mapping[str, int], found: Measurement) -> str:
    number = num_links[found.setup.row]
    return found.setup.link + f"\nof {many(number, 'link')}" * (number > 1)


def _step_cell(rows: Measured, row: str) -> Cell | None:
    if row not in rows:
        return None
    found, dense = rows[row], rows.get(DENSE)
    lines = [shown_seconds(found.median)]
    if len(found.seconds) > 1:
        lines.append(shown_range(*found.quartiles))
    if dense is not None:
        lines.append(f"{figures(found.median / dense.median)} of dense")
    return Cell("\n".join(lines), found.median)


def _scaling_cell(num_hosts: int, times: Times, row: str) -> Cell | None:
    if num_hosts not in times.get(row, {}):
        return None
    seconds = times[row][num_hosts]
    lines = [shown_seconds(seconds)]
    if 1 in times[row]:
        speed_up = times[row][1] / seconds
        lines.append(f"{figures(speed_up)}x, {100 * speed_up / num_hosts:.0f} %")
    return Cell("\n".join(lines), seconds)


def _difference(found: Measurement) -> tuple[float, float] | None:
    """Bytes counted beyond those foreseen, and those foreseen."""
    counted, traced = found.interface_bytes, found.traced_bytes
    foreseen = found.formula_bytes if traced is None else traced
    if counted is None or foreseen is None:
        return None
    return counted - foreseen, foreseen


def _difference_cell(found: Measurement) -> Cell | None:
    difference = _difference(found)
    if difference is None:
        return None
    gap, foreseen = difference
    if not foreseen:
        return Cell(f"{gap:+,.0f} B", gap, _worst_excess(found) > 0)
    share = gap / foreseen
    return Cell(f"{100 * share:+.2f} %", share, _worst_excess(found) > 0)


def _per_message(found: Measurement) -> float | None:
    difference = _difference(found)
    messages = found.hops * found.setup.devices_per_host
    return difference[0] / messages if difference and messages else None


def _foreseen(found: Measurement) -> list[tuple[str, float, float]]:
    """Source, foreseen bytes, and how far those counted may be from them."""
    messages = max(1.0, found.hops) * found.setup.devices_per_host
    return [
        (source, foreseen, SHARE * foreseen + BYTES_PER_MESSAGE * messages)
        for source, foreseen in (
            ("trace", found.traced_bytes),
            ("model", found.formula_bytes),
        )
        if foreseen is not None and found.interface_bytes is not None
    ]


def _excess(found: Measurement, foreseen: float, allowed: float) -> float:
    """Bytes beyond what is allowed."""
    return abs((found.interface_bytes or 0.0) - foreseen) - allowed


def _worst_excess(found: Measurement) -> float:
    gaps = (_excess(found, *numbers) for _, *numbers in _foreseen(found))
    return max(gaps, default=0.0)
