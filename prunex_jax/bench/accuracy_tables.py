"""Tables of whole runs: when a method reaches an accuracy, and what that costs.

It owns how seeds are put together and what speed-up means here. It leaves how tables
look to `cells` and `report`.
"""

import statistics
from collections.abc import Mapping, Sequence

from prunex_jax.bench.links.records import Curve, Point, Record
from prunex_jax.bench.places import DENSE, Curves, curves, link_title, titles
from prunex_jax.bench.report.cells import Cell, Table, figures, many, median_cell, span

_FINALS = ("final\nvalidation", "test", "parameters\nkept")


def time_to_accuracy(
    records: Sequence[Record], targets: Mapping[str, Sequence[float]]
) -> list[Table]:
    """Seconds, bytes and steps to accuracies: a table for every place and link.

    Args:
      records: Whole runs; steady steps are passed over.
      targets: Study -> validation accuracies whose time is asked for.
    """
    tables, called = [], titles(records)
    for spot, rows in curves(records).items():
        asked = targets.get(spot.place.bed.study, ())
        header = ["method"]
        for target in asked:
            words = ("seconds", "bytes", "steps", "speed-up")
            header += [f"to {target:g}:\n{word}" for word in words]
        lines = []
        for row in (row for row in called if row in rows):
            cells = [
                cell
                for target in asked
                for cell in _reached_cells(rows[row], rows.get(DENSE, ()), target)
            ]
            lines.append((Cell(called[row]), *cells, *_final_cells(rows[row])))
        setups = [run.setup for runs in rows.values() for run in runs]
        link = ", ".join(link_title(setups).split("\n"))
        title = f"Time to accuracy: {spot.place.title}, {link}"
        notes = (_note(rows),)
        tables.append(Table(title, (*header, *_FINALS), tuple(lines), notes))
    return tables


def reached_seconds(runs: Sequence[Curve], target: float) -> float | None:
    """Median seconds to an accuracy; None if any seed does not get there."""
    points = [run.reached(target) for run in runs]
    found = [point.seconds for point in points if point is not None]
    return statistics.median(found) if found and len(found) == len(points) else None


def _note(rows: Curves) -> str:
    seeds = span([len(runs) for runs in rows.values()], share=0.0)
    first = next(iter(rows.values()))[0]
    counts = first.setup.hosts_kind != "loopback"
    sent = (
        "counted at its interface" if counts else "by the trace, since nothing counts"
    )
    return (
        f"n = {seeds} seed{'s' * (seeds != '1')}. Seconds are those of steps, without "
        "compilation and evaluation, until validation accuracy is first seen at the "
        f"target; bytes are what a host has sent by then, {sent}. Speed-up: time of "
        f"row {DENSE!r} over that of the row."
    )


def _reached_cells(
    runs: Sequence[Curve], dense: Sequence[Curve], target: float
) -> list[Cell]:
    """Seconds, bytes, steps and speed-up to one accuracy."""
    points = [point for run in runs if (point := run.reached(target))]
    if len(points) < len(runs):
        text = "not reached"
        if points:
            text += f"\nby {len(runs) - len(points)} of {many(len(runs), 'seed')}"
        return [Cell(text), Cell(), Cell(), Cell()]
    seconds, base = reached_seconds(runs, target), reached_seconds(dense, target)
    speed_up = Cell()
    if base is not None and seconds:
        speed_up = Cell(f"{figures(base / seconds)}x", base / seconds)
    return [*_point_cells(points), speed_up]


def _point_cells(points: Sequence[Point]) -> list[Cell]:
    return [
        median_cell([point.seconds for point in points], "s"),
        median_cell([point.host_bytes for point in points], "B"),
        median_cell([float(point.step) for point in points]),
    ]


def _final_cells(runs: Sequence[Curve]) -> list[Cell]:
    """Last validation accuracy, test accuracy, share of parameters kept."""
    last = [run.points[-1].accuracy for run in runs if run.points]
    tested = _summarised(runs, "test_accuracy")
    kept, dense = _summarised(runs, "params_kept"), _summarised(runs, "params_dense")
    is_known = len(kept) == len(dense) and all(dense)
    shares = [k / d for k, d in zip(kept, dense, strict=True)] if is_known else []
    return [
        _accuracy_cell(last),
        _accuracy_cell(tested),
        median_cell(shares) if shares else Cell(),
    ]


def _summarised(runs: Sequence[Curve], key: str) -> list[float]:
    found = [run.summary.get(key) for run in runs]
    return [float(value) for value in found if value is not None]


def _accuracy_cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell()
    text = f"{statistics.median(values):.4f}"
    if min(values) != max(values):
        text += f"\n{min(values):.4f} to {max(values):.4f}"
    return Cell(text, statistics.median(values))
