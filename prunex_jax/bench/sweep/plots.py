"""Plots of a sweep: accuracy against bytes, seconds and size, and health against steps.

It owns which plots there are and draws them; `report.pictures` makes files.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from prunex_jax.bench.report.pictures import Look, Looks, Plot, make_looks, plain_ticks
from prunex_jax.bench.sweep.results import Findings, Point, Result
from prunex_jax.bench.sweep.significance import deviation

_MOST_MARKS = 6  # On a curve.
_LEAST_RANGE = 4.0  # Of an axis of costs: right end over left end.
# What is drawn of health: key of a logged row, what it is called.
_HEALTH = (
    ("host_drift", "drift of the copies, ||theta - z|| / ||z||"),
    ("primal_residual", "primal residual"),
    ("dual_residual", "dual residual"),
    ("device_dual_norm", "norm of the dual"),
)


def make_plots(findings: Findings) -> list[Plot]:
    """Lists all plots that there are numbers for."""
    sweep = findings.sweep
    titles = {row.name: row.title for row in sweep.rows}
    first = (*sweep.baselines, sweep.rows[0].name)[0]
    looks = {
        name: look
        for name, look in make_looks(titles, first).items()
        if name in findings.results
    }
    return [
        *_cost_plots(findings, looks),
        *_curve_plots(findings, looks),
        *_size_plots(findings, looks),
        *_health_plots(findings, looks),
    ]


def _cost_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """Final accuracy against bytes of the whole run, a mark for every row."""
    marks = {}
    for name in looks:
        shares = findings.shares(name, "host_wire_bytes", "host_wire_bytes_dense")
        accuracies = findings.accuracies(name)
        if shares and statistics.fmean(shares) > 0:
            marks[name] = (statistics.fmean(shares), accuracies)
    if len(marks) < 2:
        return []
    draw = functools.partial(
        draw_marks,
        looks=looks,
        marks=marks,
        across="bytes over hosts in the whole run, of dense",
        up=f"{findings.sweep.split} accuracy, %",
    )
    return [_plot(findings, "accuracy", "bytes", "Accuracy against bytes", draw)]


def _curve_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """Validation accuracy on the way, mean over seeds."""
    sides: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
        ("curves-bytes", "MB sent by a host", lambda point: point.host_bytes / 1e6),
        ("curves-seconds", "seconds in steps", lambda point: point.seconds),
    )
    plots = []
    for key, label, x_of in sides:
        curves = {
            name: mean_curve([each.points for each in findings.results[name]], x_of)
            for name in looks
        }
        # A logarithmic axis has no place for what has cost nothing.
        shown = {
            name: [(x, 100 * y) for x, y in curve if x > 0]
            for name, curve in curves.items()
        }
        shown = {name: curve for name, curve in shown.items() if len(curve) > 1}
        if shown:
            draw = functools.partial(
                draw_lines,
                looks=looks,
                lines=shown,
                log_axis="x",
                across=label,
                up="validation accuracy, %",
            )
            title = f"Accuracy against {label}"
            plots.append(_plot(findings, "accuracy", key, title, draw))
    return plots


def _size_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """Final accuracy against the share of parameters that is left, curve by curve."""
    curves: dict[str, list[tuple[float, list[float]]]] = {}
    styles: dict[str, Look] = {}
    for row in findings.sweep.rows:
        if row.curve and row.name in looks:
            shares = findings.shares(row.name, "params_kept", "params_dense")
            if shares:
                point = (statistics.fmean(shares), findings.accuracies(row.name))
                curves.setdefault(row.curve, []).append(point)
                look = looks[row.name]
                mine = Look(row.curve, look.colour, look.mark, look.is_dashed)
                styles.setdefault(row.curve, mine)
    lines = {name: points for name, points in curves.items() if len(points) > 1}
    if not lines:
        return []
    draw = functools.partial(
        draw_sizes,
        looks=styles,
        lines=lines,
        up=f"{findings.sweep.split} accuracy, %",
    )
    return [_plot(findings, "accuracy", "sizes", "Accuracy against size", draw)]


def _health_plots(findings: Findings, looks: Looks) -> list[Plot]:
    plots = []
    for key, label in _HEALTH:
        lines = {
            name: line
            for name in findings.sweep.health_rows
            if name in looks and (line := _health_line(findings.results[name], key))
        }
        if lines:
            draw = functools.partial(
                draw_lines,
                looks=looks,
                lines=lines,
                log_axis="y",
                across="step",
                up=label,
            )
            name = f"health-{key.replace('_', '-')}"
            title = f"Health: {label}"
            plots.append(_plot(findings, "health", name, title, draw))
    return plots


def _health_line(results: Sequence[Result], key: str) -> list[tuple[float, float]]:
    """A logged number of the first seed, by step, where it is positive."""
    rows = results[0].health
    return [(row["step"], row[key]) for row in rows if (row.get(key) or 0.0) > 0]


def mean_curve(
    runs: Sequence[Sequence[Point]], x_of: Callable[[Point], float]
) -> list[tuple[float, float]]:
    """Mean over seeds of what and where, at the steps that all runs have.

    Example:
      >>> runs = [[Point(1, 0.5, 10, 1), Point(2, 0.7, 20, 2)], [Point(1, 0.0, 30, 3)]]
      >>> mean_curve(runs, lambda point: point.host_bytes)
      [(20.0, 0.25)]
    """
    by_step = [{point.step: point for point in run} for run in runs]
    if not by_step:
        return []
    common = sorted(set.intersection(*(set(run) for run in by_step)))
    return [
        (
            statistics.fmean(x_of(run[step]) for run in by_step),
            statistics.fmean(run[step].accuracy for run in by_step),
        )
        for step in common
    ]


def draw_marks(
    axes: Any,
    ink: str,
    *,
    looks: Looks,
    marks: Mapping[str, tuple[float, Sequence[float]]],
    across: str,
    up: str,
) -> None:
    """One mark with its standard deviation for every row, on a logarithmic axis."""
    for name, (x, accuracies) in marks.items():
        style = looks[name].style(ink) | {"linestyle": "none"}
        middle, spread = _percent(accuracies)
        axes.errorbar([x], [middle], yerr=[spread], elinewidth=0.8, **style)
    axes.set_xscale("log")
    # Rows that cost the same stand above each other, not apart by their last digit.
    low, high = axes.get_xlim()
    wider = max(1.0, math.sqrt(_LEAST_RANGE * low / high))
    axes.set_xlim(low / wider, high * wider)
    plain_ticks(axes.xaxis)
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def draw_lines(
    axes: Any,
    ink: str,
    *,
    looks: Looks,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    log_axis: Literal["x", "y"],
    across: str,
    up: str,
) -> None:
    """A line for every row, its numbers positive along the logarithmic axis."""
    for name, line in lines.items():
        xs, ys = zip(*line, strict=True)
        every = max(1, len(xs) // _MOST_MARKS)
        axes.plot(xs, ys, markevery=every, **looks[name].style(ink))
    axes.set(**{f"{log_axis}scale": "log"})
    plain_ticks(axes.xaxis if log_axis == "x" else axes.yaxis)
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def draw_sizes(
    axes: Any,
    ink: str,
    *,
    looks: Looks,
    lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]],
    up: str,
) -> None:
    """Accuracy against parameters that are left, a line for every curve."""
    for name, points in lines.items():
        ordered = sorted(points)
        found = [_percent(accuracies) for _, accuracies in ordered]
        axes.errorbar(
            [x for x, _ in ordered],
            [middle for middle, _ in found],
            yerr=[spread for _, spread in found],
            elinewidth=0.8,
            **looks[name].style(ink),
        )
    axes.set_xlabel("share of the parameters that is left")
    axes.set_ylabel(up)


def _percent(accuracies: Sequence[float]) -> tuple[float, float]:
    spread = deviation(accuracies) or 0.0
    return 100 * statistics.fmean(accuracies), 100 * spread


def _plot(
    findings: Findings,
    section: str,
    key: str,
    title: str,
    draw: Callable[..., None],
) -> Plot:
    name = f"{key}_{findings.sweep.name}"
    counts = [len(found) for found in findings.results.values()]
    n = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return Plot(section, name, f"{title}: {findings.sweep.name}, n={n}", draw)
