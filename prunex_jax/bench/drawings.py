"""How each kind of plot is drawn, on axes of matplotlib that it is given.

It owns marks, lines and ticks. It imports no matplotlib before something is drawn, and
leaves what is drawn, colours of methods, and pictures to `plots`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prunex_jax.bench.cells import digits
from prunex_jax.bench.model_tables import Line, Prediction
from prunex_jax.bench.records import Curve, Measurement, Point

ALLOWED_ERROR = 0.15  # Of a model of cost: the band around what was measured.
_UNLIMITED_GAP = 2.5  # Factor from the fastest link to the mark of no limit.
_MOST_MARKS = 5  # On a curve.
_MOST_DOUBLED_HOSTS = 16  # For ticks at powers of two.
_MOST_DECADES = 2.2  # For ticks at 1, 2 and 5; beyond, at 1 only.


@dataclasses.dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Attributes:
      title: What the legend calls it.
      colour: None is the ink of the theme.
      mark: Of its points.
      is_dashed: Whether it is a peer.
    """

    title: str
    colour: str | None
    mark: str
    is_dashed: bool

    def style(self, ink: str) -> dict[str, Any]:
        """Arguments of `Axes.plot`."""
        return {
            "color": self.colour or ink,
            "marker": self.mark,
            "linestyle": (0, (4, 2)) if self.is_dashed else "-",
            "label": self.title,
            "zorder": 4 if self.is_dashed else 2 + (self.colour is None),
        }


Looks = Mapping[str, Look]


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
    _plain_ticks(axes.xaxis)
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
    no_limit = fastest * _UNLIMITED_GAP
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
    _plain_ticks(axes.yaxis)
    has_unlimited = any(each.setup.megabits is None for each in found)
    _plain_ticks(axes.xaxis, no_limit if has_unlimited else None)
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
        _plain_ticks(axis)
    _fixed_ticks(axes.xaxis, hosts)
    if hosts[-1] <= _MOST_DOUBLED_HOSTS:
        low, high = axes.get_ylim()
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        _fixed_ticks(axes.yaxis, [2.0**power for power in powers])
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
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("measured seconds per step (hollow: fitted, filled: held out)")
    axes.set_ylabel("predicted")


def _plain_ticks(axis: Any, no_limit: float | None = None) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, written as plain numbers.

    Args:
      axis: Its data are drawn already.
      no_limit: Where links without a limit are drawn; ticks stop before.
    """
    from matplotlib.ticker import AutoLocator, NullLocator

    low, high = axis.get_view_interval()
    top = high if no_limit is None else no_limit / _UNLIMITED_GAP * 1.01
    steps = (1, 2, 5) if math.log10(top / low) < _MOST_DECADES else (1,)
    ticks = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
        for step in steps
        if low <= step * 10.0**power <= top
    ]
    if len(ticks) < 2:  # Hardly any range.
        ticks = [t for t in AutoLocator().tick_values(low, top) if low <= t <= top]
    _fixed_ticks(axis, ticks)
    axis.set_minor_locator(NullLocator())
    if no_limit is not None:
        axis.set_ticks([*ticks, no_limit], [*map(digits, ticks), "no limit"])


def _fixed_ticks(axis: Any, ticks: Iterable[float]) -> None:
    ticks = list(ticks)
    axis.set_ticks(ticks, [digits(tick) for tick in ticks])
