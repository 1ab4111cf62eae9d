"""Draws curves as SVG that stands in a page itself: no package, no script."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from prunex_jax.compare.report.tables import digits

# Legible on light and dark pages; then they repeat.
COLORS = ("#3b82c4", "#d1760a", "#2f9e5b", "#c2418f", "#8a6fd1", "#8a8f2a", "#c4483b")
# More are thinned out, evenly.
MAX_POINTS = 1000

_WIDTH, _HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 28, 42
_SMALLEST = 1e-300  # Smaller numbers are zero, and larger than its inverse too many.
_LINE = 16  # Height of a line of the legend.


@dataclasses.dataclass(frozen=True)
class Curve:
    """One series of points, in the order of x."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 0  # Position in COLORS.
    is_dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes."""

    title: str
    x_label: str
    curves: Sequence[Curve]


def draw_chart(chart: Chart) -> str:
    """Draws a chart.

    Returns:
      An `<svg>` element; text of the chart is escaped, and points that are not finite,
      or as good as infinite, are left out.
    Example:
      >>> chart = Chart('a < b', 'step', [Curve('run', [(1, 0.5), (2, 0.25)])])
      >>> svg = draw_chart(chart)
      >>> svg.count('<polyline'), 'a &lt; b' in svg
      (1, True)
    """
    drawn = [dataclasses.replace(each, points=_thinned(each)) for each in chart.curves]
    drawn = [each for each in drawn if each.points]
    x = _Scale([x for each in drawn for x, _ in each.points], _LEFT, _WIDTH - _RIGHT)
    y = _Scale([y for each in drawn for _, y in each.points], _HEIGHT - _BOTTOM, _TOP)
    height = _HEIGHT + _LINE * len(drawn)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" fill="currentColor" font-size="11">',
        f"<title>{escape(chart.title)}</title>",
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(chart.title)}</text>',
        *_axes(x, y),
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 10}" text-anchor="end">'
        f"{escape(chart.x_label)}</text>",
        *itertools.chain.from_iterable(_line(each, x, y) for each in drawn),
        *itertools.chain.from_iterable(map(_legend, range(len(drawn)), drawn)),
        "</svg>",
    ]
    return "".join(parts)


class _Scale:
    """From values to places on the page."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = min(values, default=0.0), max(values, default=1.0)
        largest = max(abs(self.low), abs(self.high))
        # A level line lies in the middle; what differs by rounding is level.
        if self.high - self.low <= max(1e-12 * largest, _SMALLEST):
            room = largest / 2 if largest > _SMALLEST else 0.5
            self.low, self.high = self.low - room, self.high + room
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> Iterator[float]:
        """Four to ten round values between the ends."""
        rough = (self.high - self.low) / 4
        size = 10.0 ** math.floor(math.log10(rough))
        step = size * max(k for k in (1, 2, 5) if k * size <= rough)
        number = math.ceil(self.low / step)
        while number * step <= self.high:
            yield number * step
            number += 1


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    points = [point for point in curve.points if all(map(_can_be_drawn, point))]
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    last = points[-1:] if points[:1] and (len(points) - 1) % stride else []
    return points[::stride] + last


def _can_be_drawn(value: float) -> bool:
    return math.isfinite(value) and abs(value) < 1 / _SMALLEST


def _axes(x: _Scale, y: _Scale) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in y.ticks():
        at = y(tick)
        yield (
            f'<line x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
        )
        yield (
            f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">'
            f"{_short(tick)}</text>"
        )
    for tick in x.ticks():
        at = x(tick)
        yield (
            f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">'
            f"{_short(tick)}</text>"
        )
    yield (
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.5"/>'
    )


def _line(curve: Curve, x: _Scale, y: _Scale) -> Iterator[str]:
    color, dash = _style(curve)
    places = " ".join(f"{x(a)},{y(b)}" for a, b in curve.points)
    yield (
        f'<polyline points="{places}" fill="none" stroke="{color}" '
        f'stroke-width="1.6"{dash}/>'
    )
    if len(curve.points) == 1:  # A line of one point is not seen.
        a, b = curve.points[0]
        yield f'<circle cx="{x(a)}" cy="{y(b)}" r="2.5" fill="{color}"/>'


def _legend(number: int, curve: Curve) -> Iterator[str]:
    color, dash = _style(curve)
    at = _HEIGHT + _LINE * number
    yield (
        f'<line x1="{_LEFT}" x2="{_LEFT + 22}" y1="{at}" y2="{at}" stroke="{color}" '
        f'stroke-width="2"{dash}/>'
        f'<text x="{_LEFT + 28}" y="{at + 4}">{escape(curve.label)}</text>'
    )


def _style(curve: Curve) -> tuple[str, str]:
    dash = ' stroke-dasharray="5 3"' if curve.is_dashed else ""
    return COLORS[curve.color % len(COLORS)], dash


def _short(value: float) -> str:
    """A number of an axis: 1.5M, 20k, 0.25, 1e-05."""
    if abs(value) >= 1e15:
        return f"{value:.0e}"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{digits(value / size)}{unit}"
    return digits(value) if abs(value) >= 1e-4 or not value else f"{value:.0e}"
