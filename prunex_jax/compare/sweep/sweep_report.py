"""The report of a sweep: its metric with its spread, what it cost, and health.

Everything that is "of dense" is a share of `Findings.reference`: bytes of exchanging
its gradients in every step, its parameters, its multiply-accumulates, and those of its
training at full width.
"""

import functools
import json
import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prunex_jax.base.errors import UserError
from prunex_jax.compare.report.page import Section, facts_table, write_page
from prunex_jax.compare.report.plots import Looks, Plot, Series, make_looks
from prunex_jax.compare.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    figures,
    make_table,
    many,
    method_table,
)
from prunex_jax.compare.sweep.figure import curve_plots
from prunex_jax.compare.sweep.runs import Findings, Result

# Column -> key of a row's summary, see `Findings.shares`.
_SHARES = {
    "bytes over\nhosts, of dense": "host_wire_bytes",
    "last exchange,\nof dense": "host_payload_bytes_steady",
    "parameters": "params_kept",
    "multiply-\naccumulates": "macs_kept",
    "work of\ntraining": "training_macs",
}
# What is drawn of health: key of a logged row, what it is called.
_HEALTH = (
    ("host_drift", "drift of the copies, ||theta - z|| / ||z||"),
    ("primal_residual", "primal residual"),
    ("dual_residual", "dual residual"),
    ("device_dual_norm", "norm of the dual"),
)


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


def write_report(findings: Findings, folder: Path, png: Path | None = None) -> Path:
    """Writes the report of a sweep, of which something has ended."""
    name = findings.sweep.name
    if not findings.results:
        raise UserError(f"{folder} has no run of sweep {name!r} that ended")
    return write_page(folder, name, (), make_sections(findings), png)


def make_sections(findings: Findings) -> list[Section]:
    """All parts of the report, in order."""
    looks = _looks(findings)
    priced = _cost_plots(findings, looks)
    return [
        Section(
            f"{findings.sweep.figure.heading} and its price",
            [
                price_table(findings),
                *front_table(findings, priced),
                *divergence_table(findings),
            ],
            [*priced, *_way_plots(findings, looks)],
        ),
        Section("Health", (), _health_plots(findings, looks)),
        Section(
            "Where and how",
            [
                *_how(findings),
                _settings_table(findings),
                facts_table("Machine", _machine(findings)),
            ],
        ),
    ]


def price_table(findings: Findings) -> Table:
    """The metric, differences to the baselines, and costs, a line for every row."""
    sweep = findings.sweep
    baselines = [name for name in sweep.baselines if name in findings.results]
    titles = {row.name: row.title for row in sweep.rows}
    partial = functools.partial
    columns = [
        Column(sweep.figure.title(sweep.split), partial(_value_cell, findings)),
        *(
            Column(f"minus\n{titles[each]}", partial(_difference, findings, each))
            for each in baselines
        ),
        *(
            Column(name, partial(_share, findings, key))
            for name, key in _SHARES.items()
        ),
    ]
    notes = _notes(findings, bool(baselines))
    shown = {row: titles[row] for row in findings.results}
    return method_table(f"{sweep.figure.heading}: {sweep.name}", shown, columns, notes)


def divergence_table(findings: Findings) -> list[Table]:
    """Runs that diverged and why; nothing if none did."""
    diverged = [each for each in _every(findings) if each.reason]
    columns: tuple[Column[Result], ...] = (
        Column("method", lambda each: each.row.title),
        Column("seed", lambda each: str(each.seed)),
        Column("reason", lambda each: each.reason),
    )
    title = f"Diverged: {findings.sweep.name}"
    return [make_table(title, columns, diverged)] if diverged else []


def _settings_table(findings: Findings) -> Table:
    """What each row sets, over the config and the settings of the sweep."""

    def text(settings: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={value}" for key, value in settings.items()) or "-"

    sweep = findings.sweep
    lines = [(Cell("all rows"), Cell(text(sweep.settings)))]
    if sweep.overrides:
        given = ", ".join(each.removeprefix("--config.") for each in sweep.overrides)
        lines.append((Cell("command line"), Cell(given)))
    lines += [(Cell(row.title), Cell(text(row.settings))) for row in sweep.rows]
    return Table(f"Settings: {sweep.name}", ("row", "value"), tuple(lines))


def _cost_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """The metric against each cost in which rows differ, with its Pareto front.

    Rows that cost nothing have no place on a logarithmic axis, and are left out.
    """
    sweep, plots = findings.sweep, []
    for cost in COSTS:
        marks = _marks_of(findings, looks, cost.key)
        series = [mark for mark in marks.values() if mark.points[0][0] > 0]
        if len({mark.points[0][0] for mark in series}) > 1:
            heading = f"{sweep.figure.heading} {cost.title}"
            title = _plot_name(findings, cost.name, heading)
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
    """The rows on the fronts of `_cost_plots`, by name; nothing without plots."""
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


def _value_cell(findings: Findings, row: str) -> Cell:
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


def _plot_name(findings: Findings, key: str, title: str) -> tuple[str, str]:
    """Name and title of a plot."""
    counts = [len(found) for found in findings.results.values()]
    n = " to ".join(map(str, sorted({min(counts), max(counts)})))
    name = findings.sweep.name
    return f"{key}_{name}", f"{title}: {name}, n={n}"


def _way_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """The metric on the way, against bytes and seconds until then."""
    points = {row: [each.points for each in findings.results[row]] for row in looks}
    figure = findings.sweep.figure
    titles = {
        "bytes": f"{figure.heading} against MB sent by a host",
        "seconds": f"{figure.heading} against seconds",
    }
    names = {
        key: _plot_name(findings, f"curves-{key}", title)
        for key, title in titles.items()
    }
    return curve_plots(names, points, looks, figure)


def _health_plots(findings: Findings, looks: Looks) -> list[Plot]:
    """Logged numbers of the first seed by step, where they are positive."""
    plots = []
    for key, up in _HEALTH:
        lines = {
            name: [
                (line["step"], line[key])
                for line in findings.results[name][0].health
                if (line.get(key) or 0.0) > 0
            ]
            for name in findings.sweep.health_rows
            if name in looks
        }
        name = f"health-{key.replace('_', '-')}"
        series = [Series(row, line) for row, line in lines.items() if len(line) > 1]
        if series:
            labels = *_plot_name(findings, name, f"Health: {up}"), "step", up
            plots.append(Plot(*labels, series, looks, log="y"))
    return plots


def difference(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Compares two rows by Welch's interval, which lets their spreads differ.

    Returns:
      Difference of the means, and half of the interval that contains the true one with
      95 % probability: infinite where a row has one run only.
    Raises:
      ValueError: One of them is empty.
    Example:
      >>> found = difference([0.70, 0.71, 0.72], [0.60, 0.61, 0.62])
      >>> [round(value, 3) for value in found]
      [0.1, 0.023]

    References:
      Welch, The generalization of Student's problem when several different population
      variances are involved, 1947, https://doi.org/10.2307/2332510.
    """
    mean = statistics.fmean(ones) - statistics.fmean(others)
    if min(len(ones), len(others)) < 2:
        return mean, math.inf
    if not statistics.variance(ones) + statistics.variance(others):
        return mean, 0.0
    # Imported here: it takes a while, and only reports need it.
    from scipy import stats

    with warnings.catch_warnings():
        # Seeds that agree to the last digit, of one row only, are no problem.
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = stats.ttest_ind(ones, others, equal_var=False).confidence_interval()
    return mean, float(interval.high - interval.low) / 2


def _on_front(findings: Findings, plot: Plot) -> list[str]:
    """Titles and metrics of the rows on a plot's front, from the left."""
    found = ((row, _value_cell(findings, row).text) for row in plot.front)
    return [
        f"{plot.looks[row].title}: {text}".replace("\n", ", ") for row, text in found
    ]


def _every(findings: Findings) -> Iterable[Result]:
    return (each for results in findings.results.values() for each in results)


def _difference(findings: Findings, other: str, row: str) -> Cell | None:
    ones, others = findings.values(row), findings.values(other)
    figure = findings.sweep.figure
    factor, form = figure.factor, f".{figure.digits}f"
    if row == other or not ones or not others:
        return None
    mean, half_width = difference(ones, others)
    text = f"{factor * mean:+{form}}"
    if math.isfinite(half_width):
        text += f" ± {factor * half_width:{form}}"
        # Beyond spread where zero lies outside of the interval.
        text += "\nwithin spread" * (abs(mean) <= half_width)
    return Cell(text, mean)


def _share(findings: Findings, key: str, row: str) -> Cell | None:
    values = findings.shares(row, key)
    if not values:
        return None
    mean = statistics.fmean(values)
    text = figures(mean)
    if max(values) - min(values) > 0.005 * abs(mean):
        text += f"\n{digits(min(values))} to {digits(max(values))}"
    return Cell(text, mean)


def _notes(findings: Findings, has_baselines: bool) -> list[str]:
    sweep = findings.sweep
    notes = [
        f"{many(len(list(_every(findings))), 'run')}. {sweep.figure.heading}: mean ± "
        f"standard deviation over n seeds, on the {sweep.split} split. Bytes are those "
        "of a host over the host axis in the whole run, with everything it sends, of "
        "what dense averaging sends. Work of training: multiply-accumulates of all its "
        "forward passes, those of a teacher included."
    ]
    if has_baselines:
        notes.append(
            f"Differences are in {sweep.figure.differences}, ± half of Welch's 95 % "
            "interval; "
            "'within spread' where it contains zero. Without ± there is one run only, "
            "and a difference says nothing."
        )
    if findings.num_missing:
        notes.append(f"{many(findings.num_missing, 'run')} have not ended yet.")
    return notes


def _how(findings: Findings) -> list[Table]:
    if not findings.command:
        return []
    return [facts_table("Made by", {"command": findings.command})]


def _machine(findings: Findings) -> Mapping[str, Any]:
    """Environment of the runs; each that differs, but for the command."""
    found: dict[str, Mapping[str, Any]] = {}
    for each in _every(findings):
        facts = {k: v for k, v in each.environment.items() if k != "command"}
        found.setdefault(json.dumps(facts, sort_keys=True), facts)
    if len(found) == 1:
        return next(iter(found.values()))
    return {str(number): facts for number, facts in enumerate(found.values(), 1)}


def _looks(findings: Findings) -> Looks:
    sweep = findings.sweep
    settings = {row.name: {**sweep.settings, **row.settings} for row in sweep.rows}
    methods = {
        name: str(of["method.name"])
        for name, of in settings.items()
        if "method.name" in of
    }
    titles = {row.name: row.title for row in sweep.rows}
    looks = make_looks(titles, methods, sweep.baselines)
    return {name: look for name, look in looks.items() if name in findings.results}
