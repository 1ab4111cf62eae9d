"""Tables of a sweep: accuracy with its spread, and what it cost.

It owns what is compared with what. Everything that is "of dense" is a share of
`Findings.reference`: bytes of exchanging its gradients in every step, its parameters,
its multiply-accumulates.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from prunex_jax.bench.report.cells import Cell, Table, digits, figures, many
from prunex_jax.bench.sweep.results import Findings
from prunex_jax.bench.sweep.significance import Difference, deviation, difference

# Column -> keys of a row's summary and of the reference's.
_SHARES = (
    ("bytes over\nhosts, of dense", "host_wire_bytes", "host_wire_bytes_dense"),
    (
        "last exchange,\nof dense",
        "host_payload_bytes_steady",
        "host_payload_bytes_dense",
    ),
    ("parameters", "params_kept", "params_dense"),
    ("multiply-\naccumulates", "macs_kept", "macs_dense"),
)


def accuracy_table(findings: Findings) -> Table:
    """Accuracy, differences to the baselines, and costs, a line for every row."""
    sweep = findings.sweep
    baselines = [name for name in sweep.baselines if name in findings.results]
    titles = {row.name: row.title for row in sweep.rows}
    header = (
        "method",
        f"{sweep.split} accuracy, %",
        *(f"minus\n{titles[name]}" for name in baselines),
        *(title for title, _, _ in _SHARES),
    )
    rows = []
    for name in findings.results:
        differences = [_difference_cell(findings, name, other) for other in baselines]
        shares = [_share_cell(findings.shares(name, key, of)) for _, key, of in _SHARES]
        cells = (_accuracy_cell(findings, name), *differences, *shares)
        rows.append((Cell(titles[name]), *cells))
    notes = _notes(findings, bool(baselines))
    return Table(f"Accuracy: {sweep.name}", header, tuple(rows), notes)


def divergence_table(findings: Findings) -> list[Table]:
    """Runs that diverged and why; nothing if none did."""
    lines = [
        (Cell(each.row.title), Cell(str(each.seed)), Cell(each.reason))
        for results in findings.results.values()
        for each in results
        if each.reason
    ]
    if not lines:
        return []
    header = ("method", "seed", "reason")
    return [Table(f"Diverged: {findings.sweep.name}", header, tuple(lines))]


def settings_table(findings: Findings) -> Table:
    """What each row sets, over the config and the settings of the sweep."""
    sweep = findings.sweep
    lines = [(Cell("all rows"), Cell(_settings_text(sweep.settings)))]
    lines += [
        (Cell(row.title), Cell(_settings_text(row.settings))) for row in sweep.rows
    ]
    return Table(f"Settings: {sweep.name}", ("row", "value"), tuple(lines))


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "-"


def _accuracy_cell(findings: Findings, name: str) -> Cell:
    """Mean and standard deviation in percent, and how many runs they are of."""
    values = findings.accuracies(name)
    num_diverged = len(findings.results[name]) - len(values)
    if not values:
        return Cell("diverged", 0.0)
    text = shown_mean(values)
    if num_diverged:
        text += f"\n{num_diverged} of {num_diverged + len(values)} diverged"
    return Cell(text, statistics.fmean(values))


def shown_mean(values: Sequence[float]) -> str:
    """Mean and standard deviation of accuracies, in percent.

    Example:
      >>> shown_mean([0.91, 0.93]), shown_mean([0.915])
      ('92.00 ± 1.41 (n=2)', '91.50 (n=1)')
    """
    spread = deviation(values)
    around = "" if spread is None else f" ± {100 * spread:.2f}"
    return f"{100 * statistics.fmean(values):.2f}{around} (n={len(values)})"


def _difference_cell(findings: Findings, name: str, other: str) -> Cell:
    ones, others = findings.accuracies(name), findings.accuracies(other)
    if name == other or not ones or not others:
        return Cell()
    found = difference(ones, others)
    return Cell(shown_difference(found), found.mean)


def shown_difference(found: Difference) -> str:
    r"""A difference of accuracies in points, and what the seeds say of it.

    Example:
      >>> shown_difference(Difference(0.012, 0.004))
      '+1.20 ± 0.40'
      >>> shown_difference(Difference(-0.002, 0.004))
      '-0.20 ± 0.40\nwithin spread'
    """
    text = f"{100 * found.mean:+.2f}"
    if math.isinf(found.half_width):
        return text
    text += f" ± {100 * found.half_width:.2f}"
    return text if found.is_beyond_spread else f"{text}\nwithin spread"


def _share_cell(values: Sequence[float]) -> Cell:
    if not values:
        return Cell()
    mean = statistics.fmean(values)
    text = figures(mean) if mean else "0"
    if max(values) - min(values) > 0.005 * abs(mean):
        text += f"\n{digits(min(values))} to {digits(max(values))}"
    return Cell(text, mean)


def _notes(findings: Findings, has_baselines: bool) -> tuple[str, ...]:
    runs = sum(len(results) for results in findings.results.values())
    notes = [
        f"{many(runs, 'run')}. Accuracy: mean ± standard deviation over n seeds, on "
        f"the {findings.sweep.split} split. Bytes are those of a host over the host "
        "axis in the whole run, with everything it sends, of what dense averaging "
        "sends."
    ]
    if has_baselines:
        notes.append(
            "Differences are in points of accuracy, ± half of Welch's 95 % interval; "
            "'within spread' where it contains zero. Without ± there is one run only, "
            "and a difference says nothing."
        )
    if findings.num_missing:
        notes.append(f"{many(findings.num_missing, 'run')} have not ended yet.")
    return tuple(notes)
