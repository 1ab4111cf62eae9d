"""How each kind of plot is drawn, on axes of matplotlib that it is given.

It owns marks and lines. It leaves what is drawn to `plots`, colours, ticks and files to
`prunex_jax.bench.report.pictures`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prunex_jax.bench.links.records import Curve, Measurement, Point
from prunex_jax.bench.model_tables import Line, Prediction
from prunex_jax.bench.report.pictures import (
    UNLIMITED_GAP,
    Looks,
    fixed_ticks,
    plain_ticks,
)

ALLOWED_ERROR = 0.15  # Of a model of cost: the band around what was measured.
_MOST_MARKS = 5  # On a curve.
_MOST_DOUBLED_HOSTS = 16  # For ticks at powers of two.


def draw_accuracy(
    axes: Any,
    ink: str,
    looks: Looks,
    *,
    runs: Sequence[Curve],
    targets: Sequence[float],
    x_of: Callable[[Point], float],
    label: str,
) -> None:
    """Accuracy against what it took, on a logarithmic axis; one line for each seed."""
    drawn: set[str] = set()
    for run in runs:
        points = [point for point in run.points if x_of(point) > 0]
        if points:
            style = looks[run.setup.row].style(ink)
            if run.setup.row in drawn:
                style["label"] = None
            drawn.add(run.setup.row)
            axes.plot(
                [x_of(point) for point in points],
                [point.accuracy for point in points],
                markevery=max(1, len(points) // _MOST_MARKS),
                **style,
            )
    for target in targets:
        axes.axhline(target, color=ink, linewidth=0.8, linestyle=":", zorder=1)
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    silent = len({run.setup.row for run in runs} - drawn)
    axes.set_xlabel(
        label + (f" (not shown: {silent} that send nothing)" * bool(silent))
    )
    axes.set_ylabel("validation accuracy")


def draw_step_times(
    axes: Any,
    ink: str,
    looks: Looks,
    *,
    found: Sequence[Measurement],
    lines: Sequence[Line],
) -> None:
    """Median step time against speed of the links, quartiles, and lines of a model."""
    modelled = {line.row for line in lines}
    fastest = max(each.setup.megabits or 0.0 for each in found)
    no_limit = fastest * UNLIMITED_GAP
    for row, look in looks.items():
        mine = [each for each in found if each.setup.row == row]
        if not mine:
            continue
        style = look.style(ink)
        if row in modelled:
            style["linestyle"] = "none"
        limited = [each for each in mine if each.setup.megabits]
        _draw_medians(axes, limited, no_limit, style)
        if limited:
            style["label"] = None
        style["linestyle"] = "none"
        unlimited = [each for each in mine if not each.setup.megabits]
        _draw_medians(axes, unlimited, no_limit, style)
    for line in lines:
        if line.row in looks:
            style = looks[line.row].style(ink) | {"label": None, "marker": ""}
            axes.plot(line.megabits, line.seconds, **style)
    seconds = found[0].setup.compute_seconds
    axes.axhline(
        seconds, color=ink, linewidth=0.9, linestyle=":", label="computation alone"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    has_unlimited = any(each.setup.megabits is None for each in found)
    plain_ticks(axes.xaxis, no_limit if has_unlimited else None)
    axes.set_xlabel("Mbit/s of every host's link, each way")
    axes.set_ylabel("seconds per step")


def _draw_medians(
    axes: Any, found: Sequence[Measurement], no_limit: float, style: Mapping[str, Any]
) -> None:
    """Medians with their quartiles, by speed of the link."""
    if not found:
        return
    middles = [each.median for each in found]
    low, high = zip(*(each.quartiles for each in found), strict=True)
    below = [m - q for m, q in zip(middles, low, strict=True)]
    above = [q - m for m, q in zip(middles, high, strict=True)]
    speeds = [each.setup.megabits or no_limit for each in found]
    axes.errorbar(speeds, middles, yerr=(below, above), elinewidth=0.8, **style)


def draw_scaling(
    axes: Any, ink: str, looks: Looks, *, times: Mapping[str, Mapping[int, float]]
) -> None:
    """Speed-up over one host against hosts; `times` are seconds per step by hosts."""
    hosts = sorted({number for row in times.values() for number in row})
    axes.plot(hosts, hosts, color=ink, alpha=0.4, linewidth=0.9, label="ideal")
    for row, look in looks.items():
        if 1 in times.get(row, {}):
            numbers = sorted(times[row])
            speed_ups = [times[row][1] / times[row][number] for number in numbers]
            axes.plot(numbers, speed_ups, **look.style(ink))
    for axis, set_scale in (
        (axes.xaxis, axes.set_xscale),
        (axes.yaxis, axes.set_yscale),
    ):
        set_scale("log", base=2)
        plain_ticks(axis)
    fixed_ticks(axes.xaxis, hosts)
    if hosts[-1] <= _MOST_DOUBLED_HOSTS:
        low, high = axes.get_ylim()
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        fixed_ticks(axes.yaxis, [2.0**power for power in powers])
    axes.set_xlabel("hosts")
    axes.set_ylabel("speed-up over one host")


def draw_predictions(
    axes: Any, ink: str, looks: Looks, *, predictions: Sequence[Prediction]
) -> None:
    """Predicted against measured step times; held-out points are filled."""
    seconds = [s for point in predictions for s in (point.measured, point.predicted)]
    ends = [0.8 * min(seconds), 1.25 * max(seconds)]
    axes.plot(ends, ends, color=ink, linewidth=0.8, alpha=0.6)
    axes.fill_between(
        ends,
        [(1 - ALLOWED_ERROR) * end for end in ends],
        [(1 + ALLOWED_ERROR) * end for end in ends],
        color=ink,
        alpha=0.1,
        linewidth=0,
        label=f"within {100 * ALLOWED_ERROR:.0f} %",
    )
    for row, look in looks.items():
        mine = [point for point in predictions if point.row == row]
        for is_held_out in (True, False):
            points = [point for point in mine if point.is_held_out == is_held_out]
            style = look.style(ink) | {"linestyle": "none"}
            if not is_held_out:
                style["markerfacecolor"] = "none"
                style["label"] = (
                    None if any(p.is_held_out for p in mine) else look.title
                )
            if points:
                measured = [point.measured for point in points]
                axes.plot(measured, [point.predicted for point in points], **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.set_xlabel("measured seconds per step (hollow: fitted, filled: held out)")
    axes.set_ylabel("predicted")
