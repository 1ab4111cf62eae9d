"""Tables and plots of whole runs: when a method reaches a target, at what cost.

A target is a value of the study's metric, such as accuracy, on the validation split.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.links.records import Curve, Record
from benchmarks.report.marks import draw_levels, median_cell, shown_seconds, span
from benchmarks.report.places import DENSE, Curves, curves, link_title, titles
from benchmarks.report.steps import plot_name
from prunex_jax.compare.report.plots import Looks, Plot
from prunex_jax.compare.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    figures,
    make_table,
    many,
    shown_bytes,
)
from prunex_jax.compare.sweep.figure import AXES, Figure, Point, curve_plots

Runs = Sequence[Curve]  # Of one row, one per seed.
# What it takes to reach a target.
_COSTS: Mapping[str, tuple[Callable[[Point], float], Callable[[float], str]]] = {
    "seconds": (lambda point: point.seconds, shown_seconds),
    "bytes": (lambda point: point.host_bytes, shown_bytes),
    "steps": (lambda point: float(point.step), digits),
}


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
            key: (plot_name(f"{name}-{key}", place, link), title) for key, _, _ in AXES
        }
        asked = [figure.factor * each for each in targets.get(place.study, ())]
        more = functools.partial(draw_levels, dict.fromkeys(asked, ""))
        plots += [
            dataclasses.replace(plot, draw_more=more)
            for plot in curve_plots(names, points, looks, figure)
        ]
    return plots


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
