"""Tables and plots of whole runs: when a method reaches a target, at what cost.

A target is a value of the study's metric, such as accuracy, on the validation split.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from prunex_jax.bench.figure import Figure
from prunex_jax.bench.links.records import Curve, Point, Record
from prunex_jax.bench.report.places import DENSE, Curves, curves, link_title, titles
from prunex_jax.bench.report.plots import XY, Looks, Plot, Series
from prunex_jax.bench.report.steps import plot_name
from prunex_jax.bench.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    figures,
    make_table,
    many,
    median_cell,
    shown_bytes,
    shown_seconds,
    span,
)

Runs = Sequence[Curve]  # Of one row, one per seed.
# What it takes to reach a target.
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


def figures_of(records: Iterable[Record]) -> list[str]:
    """What the whole runs are scored by, in words."""
    found = [record.figure for record in records if isinstance(record, Curve)]
    return list(dict.fromkeys(figure.words for figure in found))


def time_to_targets(
    records: Sequence[Record], targets: Mapping[str, Sequence[float]]
) -> list[Table]:
    """Seconds, bytes and steps to targets: a table for every place and link."""
    tables, called = [], titles(records)
    for (place, _, figure), rows in curves(records).items():
        columns = [
            Column[Runs]("method", lambda runs: called[runs[0].setup.row]),
            *(
                column
                for target in targets.get(place.study, ())
                for column in _target_columns(target, rows.get(DENSE, ()))
            ),
            Column("final\nvalidation", _last),
            Column("test", functools.partial(_tested, figure)),
            Column("parameters\nkept", _kept),
        ]
        title = f"Time to {figure.words}: {place.title}, {_link(rows)}"
        shown = [rows[row] for row in called if row in rows]
        tables.append(make_table(title, columns, shown, (_note(figure, rows),)))
    return tables


def target_plots(
    records: Sequence[Record], targets: Mapping[str, Sequence[float]], looks: Looks
) -> list[Plot]:
    """The metric on validation against bytes and seconds, by place and link."""
    plots = []
    for (place, link, figure), rows in curves(records).items():
        points = {
            row: [run.points for run in rows[row]] for row in looks if row in rows
        }
        title, name = f"{place.title}, {_link(rows)}", figure.words.replace(" ", "-")
        names = {
            key: (plot_name(f"{name}-{key}", place, link), title) for key, _, _ in _AXES
        }
        levels = targets.get(place.study, ())
        plots += curve_plots(names, points, looks, figure, levels)
    return plots


def curve_plots(
    names: Mapping[str, tuple[str, str]],
    points: Mapping[str, Sequence[Sequence[Point]]],
    looks: Looks,
    figure: Figure,
    targets: Sequence[float] = (),
) -> list[Plot]:
    """A metric of validation on the way, mean over seeds, where there is any."""
    plots, factor = list[Plot](), figure.factor
    for key, across, x_of in _AXES:
        lines = {row: mean_curve(runs, x_of, factor) for row, runs in points.items()}
        series = [Series(row, line) for row, line in lines.items() if line]
        silent = sum(any(points[row]) and not line for row, line in lines.items())
        across += f" (not shown: {silent} that send nothing)" * bool(silent)
        levels = {factor * target: "" for target in targets}
        if series:
            labels = *names[key], across, figure.title("validation")
            plots.append(Plot(*labels, series, looks, levels=levels))
    return plots


def mean_curve(
    runs: Sequence[Sequence[Point]], x_of: Callable[[Point], float], factor: float
) -> list[XY]:
    """Mean over seeds of a metric times a factor, at the steps that all runs have.

    Example:
      >>> runs = [[Point(1, 0.5, 10, 1), Point(2, 0.7, 20, 2)], [Point(1, 0.0, 30, 3)]]
      >>> mean_curve(runs, lambda point: point.host_bytes, 100)
      [(20.0, 25.0)]
    """
    by_step = [{point.step: point for point in run} for run in runs]
    points = [
        (
            statistics.fmean(x_of(run[step]) for run in by_step),
            factor * statistics.fmean(run[step].value for run in by_step),
        )
        for step in sorted(set.intersection(*(set(run) for run in by_step)))
    ]
    # A logarithmic axis has no place for what has cost nothing.
    return [point for point in points if point[0] > 0]


def _link(rows: Curves) -> str:
    setups = [run.setup for runs in rows.values() for run in runs]
    return link_title(setups).replace("\n", ", ")


def _note(figure: Figure, rows: Curves) -> str:
    seeds = span([len(runs) for runs in rows.values()], share=0.0)
    first = next(iter(rows.values()))[0]
    counts = first.setup.hosts_kind != "loopback"
    sent = (
        "counted at its interface" if counts else "by the trace, since nothing counts"
    )
    below = " or below" * figure.less_is_better
    return (
        f"n = {seeds} seed{'s' * (seeds != '1')}. Seconds are those of steps, without "
        f"compilation and evaluation, until validation {figure.words} is first seen at "
        f"the target{below}; bytes are what a host has sent by then, {sent}. Speed-up: "
        f"time of row {DENSE!r} over that of the row."
    )


def _target_columns(target: float, dense: Runs) -> list[Column[Runs]]:
    """Seconds, bytes, steps and speed-up to one target."""
    partial, header = functools.partial, f"to {target:g}:\n"
    speed_up = partial(_speed_up, target, dense)
    return [
        *(Column(header + name, partial(_cost, target, name)) for name in _COSTS),
        Column(header + "speed-up", speed_up, lambda value: f"{figures(value)}x"),
    ]


def _cost(target: float, name: str, runs: Runs) -> Cell | None:
    """What it took to reach a target; who did not is said beside the seconds."""
    reached = _reached(target, runs)
    if len(reached) == len(runs):
        of, write = _COSTS[name]
        return median_cell([of(point) for point in reached], write)
    seeds = f"{len(runs) - len(reached)} of {many(len(runs), 'seed')}"
    by = f"\nby {seeds}" if reached else ""
    return Cell(f"not reached{by}") if name == "seconds" else None


def _speed_up(target: float, dense: Runs, runs: Runs) -> float | None:
    """Time of dense over that of the runs; None if any seed does not get there."""
    found = [_reached(target, each) for each in (dense, runs)]
    if not dense or [len(each) for each in found] != [len(dense), len(runs)]:
        return None
    base, mine = (statistics.median(p.seconds for p in each) for each in found)
    return base / mine if mine else None


def _reached(target: float, runs: Runs) -> list[Point]:
    return [point for run in runs if (point := run.reached(target)) is not None]


def _last(runs: Runs) -> Cell:
    return median_cell(
        [run.points[-1].value for run in runs if run.points], "{:.4f}".format
    )


def _tested(figure: Figure, runs: Runs) -> Cell:
    return median_cell(_summarised(runs, f"test_{figure.metric}"), "{:.4f}".format)


def _kept(runs: Runs) -> Cell:
    """Share of the parameters that are kept."""
    kept, dense = _summarised(runs, "params_kept"), _summarised(runs, "params_dense")
    is_known = len(kept) == len(dense) and all(dense)
    shares = [k / d for k, d in zip(kept, dense, strict=True)] if is_known else []
    return median_cell(shares, digits)


def _summarised(runs: Runs, key: str) -> list[float]:
    found = [run.summary.get(key) for run in runs]
    return [float(value) for value in found if value is not None]
