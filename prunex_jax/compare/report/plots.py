"""Plots as plain data, and how matplotlib draws them: alike for runs, sweeps, studies.

One colour means one method in every picture. At most six series are emphasised, and
named below the axes from top to bottom; the others are thin and grey, and named in the
table beside. Matplotlib is imported when something is drawn.
"""

import dataclasses
import io
import math
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from prunex_jax.compare.report.tables import digits

XY = tuple[float, float]

# Method -> colour and mark. Told apart on white, most of them with any colour vision
# (after Okabe and Ito). Methods are emphasised in this order.
STYLES: Mapping[str, tuple[str, str]] = {
    "dense": ("#000000", "o"),
    "hsadmm": ("#D55E00", "s"),
    "local_sgd": ("#3D7FC1", "^"),
    "dgc": ("#009E73", "D"),
    "powersgd": ("#CC79A7", "P"),
    "topk": ("#8A9A00", "v"),
    "diloco": ("#56B4E9", "<"),
    "pactrain": ("#E69F00", "X"),
    "torch": ("#B0308F", "h"),
    "importance": ("#7D6BD0", ">"),
    "none": ("#1FA3A3", "d"),
}
MOST_EMPHASISED = 6
_MOST_OF_HSADMM = 3  # Emphasised before any other method's second row.
_OTHER_METHODS = (("#B8860B", "*"), ("#5B8C5A", "p"), ("#B5546A", "H"))
_SHADES = (0.0, 0.45, 0.22)  # Of rows of one method: how much darker; black is lighter.
_FILLS = ("full", "none", "left")  # Of their marks.
_GREY = "#A8A8A8"

# Inches and points, such that letters can be read where the picture is 400 pixels wide.
_WIDTH, _HEIGHT, _LETTERS = 4.4, 3.1, 7.8
_LINE_HEIGHT = 1.5 * _LETTERS / 72  # Of the legend.
_TITLE_LENGTH, _NAME_LENGTH = 62, 44  # Of a line.
_MOST_MARKS = 5  # On a line.
_MOST_RANGE = 160.0  # For ticks at 1, 2 and 5; beyond, at 1 only.
_LEAST_RANGE = 5.0  # Of a logarithmic axis, so that it has two ticks at least.
# Of lines that show no series.
QUIET: dict[str, Any] = {"color": "black", "linewidth": 0.8, "alpha": 0.5, "zorder": 1}
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # Comes with matplotlib.
    "font.size": _LETTERS,
    "figure.titlesize": 1.1 * _LETTERS,
    "figure.titleweight": "bold",
    "text.parse_math": False,  # Names may have dollar signs.
    "savefig.dpi": 200,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # Other fonts are narrower, so that names fit.
    "svg.hashsalt": "prunex_jax",  # The same ids each time.
}


@dataclasses.dataclass(frozen=True)
class Look:
    """How a row is drawn."""

    title: str  # What tables call it.
    hue: str  # Colour of its method.
    mark: str  # Of its points.
    shade: int = 0  # 0 for the first row of a method.
    is_dashed: bool = False  # Whether it is a peer.
    rank: int = 0  # Of emphasis: the six lowest of a plot are emphasised.

    @property
    def colour(self) -> str:
        """Of its lines and marks."""
        amount = _SHADES[self.shade % len(_SHADES)]
        other = 255 if self.hue == "#000000" else 0
        parts = (int(self.hue[i : i + 2], 16) for i in (1, 3, 5))
        mixed = (round(part + amount * (other - part)) for part in parts)
        return "#" + "".join(f"{part:02x}" for part in mixed)


Looks = Mapping[str, Look]


@dataclasses.dataclass(frozen=True)
class Series:
    """What one row did."""

    row: str  # Its key in `Plot.looks`.
    points: Sequence[XY]  # Where marks are.
    # Of each point, its lower and upper end; empty draws none.
    spread: Sequence[XY] = ()
    # None joins the points; else the points of a line of its own, without marks.
    line: Sequence[XY] | None = None
    is_hollow: bool = False  # Whether marks are not filled.


@dataclasses.dataclass(frozen=True)
class Plot:
    """One picture, not drawn yet."""

    name: str  # Of its file, without the ending.
    title: str  # What it shows, and where.
    across: str  # What the horizontal axis says.
    up: str  # What the vertical axis says.
    series: Sequence[Series]  # What is drawn.
    looks: Looks  # Row -> how.
    log: str = "x"  # Which axes are logarithmic: some of "xy".
    log_base: int = 10  # Whose powers are ticks of logarithmic axes.
    # Whether a line shows the most that is reached for each cost across. Its rows are
    # emphasised before all others.
    has_front: bool = False
    less_is_better: bool = False  # Whether that line shows the least.
    most_emphasised: int = MOST_EMPHASISED
    # Draws more on axes of matplotlib, where series are drawn and scales are not set.
    draw_more: Callable[[Any], None] = lambda axes: None

    @property
    def front(self) -> list[str]:
        """Rows on that line, from the left; [] without one."""
        up = -1 if self.less_is_better else 1
        first = {each.row: each.points[0] for each in self.series}
        marks = {row: (x, up * y) for row, (x, y) in first.items()}
        return pareto_front(marks) if self.has_front else []

    @property
    def emphasised(self) -> list[str]:
        """Rows that are drawn in colour, with their names."""
        front = self.front
        ranked = sorted(self.series, key=lambda each: self.looks[each.row].rank)
        rows = dict.fromkeys([*front, *(each.row for each in ranked)])
        return [*rows][: self.most_emphasised]


def make_looks(
    titles: Mapping[str, str],
    methods: Mapping[str, str] | None = None,
    first: Sequence[str] = (),
) -> dict[str, Look]:
    """Row -> how it is drawn in all plots of a report.

    Args:
      titles: Row -> what tables call it, in their order.
      methods: Row -> its method; without, `method_of` tells it by the row's name.
      first: Rows that others are compared with; emphasised before all others.
    """
    looks: dict[str, Look] = {}
    order, counts = {}, dict.fromkeys(STYLES, 0)
    for row, title in titles.items():
        method = (methods or {}).get(row) or method_of(row)
        digest = zlib.crc32(method.encode()) % len(_OTHER_METHODS)
        hue, mark = STYLES.get(method, _OTHER_METHODS[digest])
        shade = counts.get(method, 0)
        counts[method] = shade + 1
        looks[row] = Look(title, hue, mark, shade, method == "torch")
        spared = _MOST_OF_HSADMM - 1 if method == "hsadmm" else 0
        place = list(counts).index(method)
        order[row] = (row not in first, max(0, shade - spared), place)
    ranked = sorted(titles, key=order.__getitem__)
    return {
        row: dataclasses.replace(look, rank=ranked.index(row))
        for row, look in looks.items()
    }


def method_of(row: str) -> str:
    """The method that a row is named after.

    Example:
      >>> method_of('local-sgd-32'), method_of('hsadmm-8-int8'), method_of('mine')
      ('local_sgd', 'hsadmm', 'mine')
    """
    key = row.replace("-", "_")
    return next((name for name in STYLES if key.startswith(name)), key)


def pareto_front(points: Mapping[str, XY]) -> list[str]:
    """Names of the Pareto-optimal points, from the left.

    Another point that is no further right and no lower dominates a point, unless both
    are at the same place.
    """

    def is_dominated(point: XY) -> bool:
        return any(
            x <= point[0] and y >= point[1] and (x, y) != point
            for x, y in points.values()
        )

    left = [name for name, point in points.items() if not is_dominated(point)]
    return sorted(left, key=points.__getitem__)


def render(plot: Plot, kind: Literal["png", "svg"] = "png") -> bytes:
    """Draws a plot as a file, on white; the same bytes each time."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        title = textwrap.fill(plot.title, _TITLE_LENGTH)
        figure.suptitle(title, x=0.01, ha="left")
        named = draw(plot, figure.add_subplot())
        names = [textwrap.fill(name, _NAME_LENGTH) for name, _ in named]
        num_lines = sum(name.count("\n") + 1 for name in names)
        figure.set_figheight(_HEIGHT + _LINE_HEIGHT * num_lines)
        figure.legend([each for _, each in named], names, loc="outside lower left")
        file = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


def draw(plot: Plot, axes: Any) -> list[tuple[str, Any]]:
    """Draws a plot on axes of matplotlib.

    Returns:
      Title of each emphasised row and what is drawn of it, from top to bottom.
    """
    drawn: dict[str, Any] = {}  # Of several series of a row the first.
    for each in plot.series:
        drawn.setdefault(each.row, _draw_series(axes, plot, each))
    ends = {each.row: max([*each.points, *(each.line or ())]) for each in plot.series}
    if plot.has_front:
        front = [ends[row] for row in plot.front]
        right = max(x for x, _ in ends.values()), front[-1][1]
        axes.plot(*zip(*front, right, strict=True), drawstyle="steps-post", **QUIET)
    plot.draw_more(axes)
    for name in plot.log:
        _set_log(axes, name, plot)
    axes.set_xlabel(plot.across)
    axes.set_ylabel(plot.up)
    rows = sorted(plot.emphasised, key=lambda row: -ends[row][1])
    return [(plot.looks[row].title, drawn[row]) for row in rows]


def _draw_series(axes: Any, plot: Plot, series: Series) -> Any:
    look, is_emphasised = plot.looks[series.row], series.row in plot.emphasised
    colour = look.colour if is_emphasised else _GREY
    has_marks = is_emphasised or max(len(series.points), len(series.line or ())) < 2
    fill = "none" if series.is_hollow else _FILLS[look.shade % len(_FILLS)]
    dashes = (0, (4, 2)) if look.is_dashed else "-"
    style = {
        "color": colour,
        "zorder": 3 if is_emphasised else 2,
        "linewidth": 1.5 if is_emphasised else 0.6,
    }
    if series.line:
        axes.plot(*zip(*series.line, strict=True), linestyle=dashes, **style)
    xs, ys = zip(*series.points, strict=True)
    spread = [
        [abs(y - end[side]) for y, end in zip(ys, series.spread, strict=True)]
        for side in range(2 if series.spread else 0)
    ]
    stride = 1 if spread or series.line is not None else len(xs) // _MOST_MARKS
    return axes.errorbar(
        xs,
        ys,
        spread or None,
        elinewidth=0.8,
        label=look.title,
        linestyle=dashes if series.line is None else "none",
        marker=look.mark if has_marks else "none",
        markersize=4.5 if is_emphasised else 3,
        markevery=max(1, stride),
        fillstyle=fill,
        **style,
    )


def _set_log(axes: Any, name: str, plot: Plot) -> None:
    """Makes an axis logarithmic, with plain numbers at powers, or at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = getattr(axes, f"{name}axis")
    getattr(axes, f"set_{name}scale")("log", base=plot.log_base)
    low, high = axis.get_view_interval()
    # What costs the same stands above each other, not apart by its last digit.
    wider = max(1.0, math.sqrt(_LEAST_RANGE * low / high))
    getattr(axes, f"set_{name}lim")(low / wider, high * wider)
    subs = (1, 2, 5) if plot.log_base == 10 and high / low < _MOST_RANGE else (1,)
    axis.set_major_locator(LogLocator(plot.log_base, subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: digits(value)))
    axis.set_minor_locator(NullLocator())
