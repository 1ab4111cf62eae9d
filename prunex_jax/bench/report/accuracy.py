"""Tables and plots of whole runs: when a method reaches an accuracy, at what cost."""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

from prunex_jax.bench.links.records import Curve, Point, Record
from prunex_jax.bench.report.places import (
    DENSE,
    Curves,
    curves,
    link_title,
    titles,
)
from prunex_jax.bench.report.plots import Looks, Plot, Series
from prunex_jax.bench.report.steps import plot_name
from prunex_jax.bench.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    figures,
    many,
    median_cell,
    method_table,
    shown_bytes,
    shown_seconds,
    span,
)

Runs = Sequence[Curve]  # Of one row, one per seed.
# What it takes to reach an accuracy.
_COSTS: Mapping[str, tuple[Callable[[Point], float], Callable[[float], str]]] = {
    "seconds": (lambda point: point.seconds, shown_seconds),
    "bytes": (lambda point: point.host_bytes, shown_bytes),
    "steps": (lambda point: float(point.step), digits),
}
# Of plots: key, what the axis says, where a point is on it.
_AXES: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
    ("bytes", "MB sent by a host", lambda point: point.host_bytes / 1e6),
    ("seconds", "seconds in steps", lambda point: point.seconds),
)


def time_to_accuracy(
    records: Sequence[Record], targets: Mapping[str, Sequence[float]]
) -> list[Table]:
    """Seconds, bytes and steps to accuracies: a table for every place and link.

    Args:
      records: Whole runs; steady steps are passed over.
      targets: Study -> validation accuracies whose time is asked for.
    """
    tables, called = [], titles(records)
    for place, links in curves(records).items():
        for rows in links.values():
            columns = [
                column
                for target in targets.get(place.study, ())
                for column in _target_columns(rows, target)
            ]
            for name, of in _FINALS:
                columns.append(Column(name, functools.partial(_of_runs, of, rows)))
            setups = [run.setup for runs in rows.values() for run in runs]
            link = ", ".join(link_title(setups).split("\n"))
            title = f"Time to accuracy: {place.title}, {link}"
            shown = {row: title for row, title in called.items() if row in rows}
            tables.append(method_table(title, shown, columns, (_note(rows),)))
    return tables


def accuracy_plots(
    records: Sequence[Record], targets: Mapping[str, Sequence[float]], looks: Looks
) -> list[Plot]:
    """Validation accuracy against bytes and against seconds, a line for each seed.

    Args:
      records: Whole runs; steady steps are passed over.
      targets: Study -> validation accuracies that are asked for.
      looks: Row -> how it is drawn.
    """
    plots = []
    for place, links in curves(records).items():
        for name, rows in links.items():
            runs = [run for row in looks for run in rows.get(row, ())]
            link = ", ".join(link_title([run.setup for run in runs]).split("\n"))
            for key, label, x_of in _AXES:
                # A logarithmic axis has no place for what has cost nothing.
                lines = [
                    (
                        run.setup.row,
                        [(x_of(p), p.accuracy) for p in run.points if x_of(p)],
                    )
                    for run in runs
                ]
                series = [Series(row, line) for row, line in lines if line]
                if not series:
                    continue
                silent = len({run.setup.row for run in runs} - {s.row for s in series})
                plot = Plot(
                    plot_name(f"accuracy-{key}", place, name),
                    f"{place.title}, {link}",
                    label + f" (not shown: {silent} that send nothing)" * bool(silent),
                    "validation accuracy",
                    series,
                    looks,
                    levels=dict.fromkeys(targets.get(place.study, ()), ""),
                )
                plots.append(plot)
    return plots


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


def _target_columns(rows: Curves, target: float) -> list[Column[str]]:
    """Seconds, bytes, steps and speed-up to one accuracy."""
    seconds = functools.partial(_seconds_to, target, rows)
    header = f"to {target:g}:\n"

    def speed_up(row: str) -> float | None:
        mine, base = seconds(row), seconds(DENSE)
        return base / mine if mine and base is not None else None

    return [
        *(
            Column(header + name, functools.partial(_cost_cell, target, rows, name))
            for name in _COSTS
        ),
        Column(header + "speed-up", speed_up, lambda value: f"{figures(value)}x"),
    ]


def _cost_cell(target: float, rows: Curves, name: str, row: str) -> Cell | None:
    """What it took to reach an accuracy; who did not is said beside the seconds."""
    reached = _points_at(target, rows[row])
    failed, num_runs = len(rows[row]) - len(reached), len(rows[row])
    if not failed:
        of, write = _COSTS[name]
        return median_cell([of(point) for point in reached], write)
    by = f"\nby {failed} of {many(num_runs, 'seed')}" if reached else ""
    return Cell(f"not reached{by}") if name == "seconds" else None


def _seconds_to(target: float, rows: Curves, row: str) -> float | None:
    """Median seconds to an accuracy; None if any seed does not get there."""
    runs = rows.get(row, ())
    reached = _points_at(target, runs)
    if not reached or len(reached) < len(runs):
        return None
    return statistics.median(point.seconds for point in reached)


def _points_at(target: float, runs: Runs) -> list[Point]:
    return [point for run in runs if (point := run.reached(target)) is not None]


def _of_runs(of: Callable[[Runs], Cell], rows: Curves, row: str) -> Cell:
    return of(rows[row])


def _last(runs: Runs) -> Cell:
    return median_cell(
        [run.points[-1].accuracy for run in runs if run.points], "{:.4f}".format
    )


def _tested(runs: Runs) -> Cell:
    return median_cell(_summarised(runs, "test_accuracy"), "{:.4f}".format)


def _kept(runs: Runs) -> Cell:
    """Share of the parameters that are kept."""
    kept, dense = _summarised(runs, "params_kept"), _summarised(runs, "params_dense")
    is_known = len(kept) == len(dense) and all(dense)
    shares = [k / d for k, d in zip(kept, dense, strict=True)] if is_known else []
    return median_cell(shares, digits)


def _summarised(runs: Runs, key: str) -> list[float]:
    found = [run.summary.get(key) for run in runs]
    return [float(value) for value in found if value is not None]


_FINALS = (("final\nvalidation", _last), ("test", _tested), ("parameters\nkept", _kept))
