"""A sweep's metric against what its rows cost, and which rows are Pareto-optimal.

A cost is a number of a run's summary, as a share of one of `Findings.reference`.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from prunex_jax.compare.report.plots import Looks, Plot, Series
from prunex_jax.compare.report.tables import Cell, Table
from prunex_jax.compare.sweep.runs import Findings


class Cost(NamedTuple):
    """What a metric is drawn against."""

    name: str  # Of its plot,
    title: str  # and what that shows, behind the name of the metric.
    across: str  # What its horizontal axis says.
    key: str  # Of a run's summary, see `Findings.shares`.
    log: str = ""  # Which axes are logarithmic.


COSTS = (
    Cost(
        "bytes",
        "against bytes",
        "bytes over hosts in the whole run, of dense",
        "host_wire_bytes",
        log="x",
    ),
    Cost(
        "macs",
        "against multiply-accumulates",
        "multiply-accumulates of the network that is left, of dense",
        "macs_kept",
    ),
    Cost(
        "work",
        "against the work of training",
        "multiply-accumulates of all of training, of dense",
        "training_macs",
    ),
)


def cost_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """The metric against each cost in which rows differ, with its Pareto front.

    Rows that cost nothing have no place on a logarithmic axis, and are left out.
    """
    sweep, plots = findings.sweep, []
    for cost in COSTS:
        marks = _marks_of(findings, looks, cost.key)
        series = [mark for mark in marks.values() if mark.points[0][0] > 0]
        if len({mark.points[0][0] for mark in series}) > 1:
            heading = f"{sweep.figure.heading} {cost.title}"
            title = plot_name(findings, cost.name, heading)
            plots.append(
                Plot(
                    *(*title, cost.across, sweep.figure.title(sweep.split)),
                    series,
                    looks,
                    log=cost.log,
                    has_front=True,
                    less_is_better=sweep.less_is_better,
                )
            )
    return plots


def front_table(findings: Findings, plots: Sequence[Plot]) -> list[Table]:
    """The rows on the fronts of `cost_plots`, by name; nothing without plots."""
    lines = tuple(
        (Cell(plot.across), Cell("\n".join(_on_front(findings, plot))))
        for plot in plots
    )
    note = (
        "The Pareto-optimal rows, from the left: no other row costs as little and is "
        "as good, unless both are equal. Means are compared: within their spread, "
        "rows may change places."
    )
    title = f"Pareto front: {findings.sweep.name}"
    header = f"{findings.sweep.figure.words} against", "rows"
    return [Table(title, header, lines, (note,))] if lines else []


def value_cell(findings: Findings, row: str) -> Cell:
    """Mean and standard deviation, and how many runs they are of."""
    values, figure = findings.values(row), findings.sweep.figure
    num_runs = len(findings.results[row])
    if not values:
        return Cell("diverged", 0.0)
    mean, form = figure.factor * statistics.fmean(values), f".{figure.digits}f"
    around = ""
    if len(values) > 1:
        around = f" ± {figure.factor * statistics.stdev(values):{form}}"
    text = f"{mean:{form}}{around} (n={len(values)})"
    if num_runs > len(values):
        text += f"\n{num_runs - len(values)} of {num_runs} diverged"
    return Cell(text, statistics.fmean(values))


def _marks_of(findings: Findings, looks: Looks, key: str) -> dict[str, Series]:
    """Row -> mean metric and its standard deviation, at a share of the reference."""
    marks, factor = {}, findings.sweep.figure.factor
    for row in looks:
        shares, values = findings.shares(row, key), findings.values(row)
        if shares:
            middle = factor * statistics.fmean(values)
            spread = factor * statistics.stdev(values) if len(values) > 1 else 0.0
            points = [(statistics.fmean(shares), middle)]
            marks[row] = Series(row, points, [(middle - spread, middle + spread)])
    return marks


def plot_name(findings: Findings, key: str, title: str) -> tuple[str, str]:
    """Name and title of a plot."""
    counts = [len(found) for found in findings.results.values()]
    n = " to ".join(map(str, sorted({min(counts), max(counts)})))
    name = findings.sweep.name
    return f"{key}_{name}", f"{title}: {name}, n={n}"


def _on_front(findings: Findings, plot: Plot) -> list[str]:
    """Titles and metrics of the rows on a plot's front, from the left."""
    found = ((row, value_cell(findings, row).text) for row in plot.front)
    return [
        f"{plot.looks[row].title}: {text}".replace("\n", ", ") for row, text in found
    ]
