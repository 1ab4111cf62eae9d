"""What tables and plots of studies have beside those of the package: times, ranges, and
lines that are no series."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prunex_jax.compare.report.plots import QUIET
from prunex_jax.compare.report.tables import Cell, digits, figures

# Behind words on a plot, so that no line goes through them.
_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


def draw_levels(
    levels: Mapping[float, str], axes: Any, unlimited: float | None = None
) -> None:
    """Draws dotted lines at heights with what they are, and at links of no limit."""
    for level, text in levels.items():
        axes.axhline(level, linestyle=":", **QUIET)
        place = {"transform": axes.get_yaxis_transform(), "va": "top"}
        axes.text(0.01, level, text, bbox=_ON_WHITE, zorder=4, **place)
    if unlimited is not None:
        axes.axvline(unlimited, linestyle=":", **QUIET)
        place = {"transform": axes.get_xaxis_transform(), "ha": "right", "va": "top"}
        axes.text(unlimited, 1, "no limit", **place)


def draw_diagonal(low: float, high: float, title: str, band: float, axes: Any) -> None:
    """Draws the line of slope one between two values, and shades a share around it."""
    axes.plot((low, high), (low, high), **QUIET)
    axes.annotate(title, (high, high), ha="right", va="bottom")
    sides = ([(1 + k * band) * x for x in (low, high)] for k in (-1, 1))
    axes.fill_between((low, high), *sides, color="black", alpha=0.1, linewidth=0)


def shown_seconds(seconds: float) -> str:
    """Writes a time with three digits.

    Example:
      >>> [shown_seconds(value) for value in (0.00412, 0.5, 12.0, 1234.5)]
      ['4.12 ms', '500 ms', '12.0 s', '1,234 s']
    """
    if 0 < seconds < 0.9995:
        return f"{figures(1e3 * seconds)} ms"
    return f"{figures(seconds)} s"


def shown_range(low: float, high: float) -> str:
    """Writes two times in the unit of the larger.

    Example:
      >>> shown_range(0.9, 1.2), shown_range(0.01, 0.02)
      ('0.900 to 1.20 s', '10.0 to 20.0 ms')
    """
    scale, unit = (1e3, "ms") if high < 0.9995 else (1.0, "s")
    return f"{figures(scale * low)} to {figures(scale * high)} {unit}"


def median_cell(values: Sequence[float], write: Callable[[float], str]) -> Cell:
    r"""Median of values, sorted by it; their range if they differ.

    Example:
      >>> median_cell([1.0, 3.0, 2.0], shown_seconds)
      Cell(text='2.00 s\n1.00 s to 3.00 s', value=2.0, is_flagged=False)
    """
    if not values:
        return Cell()
    median = statistics.median(values)
    text = write(median)
    if min(values) != max(values):
        text += f"\n{write(min(values))} to {write(max(values))}"
    return Cell(text, median)


def span(values: Sequence[float], share: float = 0.01) -> str:
    """The least and the largest value, or one if they hardly differ.

    Example:
      >>> span([5, 5]), span([5, 7])
      ('5', '5 to 7')
    """
    low, high = min(values), max(values)
    if high - low <= share * abs(high):
        return digits(high)
    return f"{digits(low)} to {digits(high)}"
