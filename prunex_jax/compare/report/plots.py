"""Plots as plain data, and how they are drawn: alike for studies and sweeps.

One colour means one method in every picture. At most six series are emphasised, with
their names beside them; the others are thin and grey, and named in the table beside.
Matplotlib is optional, and imported when something is drawn.
"""

import dataclasses
import io
import itertools
import math
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from prunex_jax.compare.report.tables import digits

Theme = Literal["light", "dark"]
XY = tuple[float, float]
THEMES: tuple[Theme, ...] = ("light", "dark")

# Method -> colour and mark; None is the ink of the theme. Told apart on white and on
# black, most of them with any colour vision (after Okabe and Ito). Methods are
# emphasised in this order.
STYLES: Mapping[str, tuple[str | None, str]] = {
    "dense": (None, "o"),
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
_SHADES = (0.0, 0.45, 0.22)  # Of rows of one method: how much nearer to the ink.
_GREY = "#A8A8A8"
_INK = {"light": "#000000", "dark": "#ffffff"}
_PAPER = {"light": "#ffffff", "dark": "#151515"}

# Inches and points, such that letters can be read where the picture is 400 pixels wide.
_WIDTH, _HEIGHT, _LETTERS = 4.4, 3.3, 7.8
_TITLE_LENGTH = 62
_NAME_LENGTHS = (23, 16)  # Of a line of a name: as wide as wanted, and where it must.
_MOST_MARKS = 5  # On a line.
_MOST_TICKS = 6
_MOST_DECADES = 2.2  # For ticks at 1, 2 and 5; beyond, at 1 only.
_LEAST_RANGE = 4.0  # Of a logarithmic axis: right end over left end.
_UNLIMITED_GAP = 2.5  # Factor from the fastest link to the mark of no limit.
# Where a name may stand: sides of its mark, and distances in points.
_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_DISTANCES = (5, 12, 20, 30, 40)
_NEAR = 9  # Pixels from a name to any mark, at least.
# From a name to what it names.
_LEASH = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6, "shrinkA": 1, "shrinkB": 2}


@dataclasses.dataclass(frozen=True)
class Look:
    """How a row is drawn."""

    title: str  # What tables call it.
    hue: str | None  # Colour of its method; None is the ink of the theme.
    mark: str  # Of its points.
    # 0 for the first row of a method; further ones are nearer to the ink.
    shade: int = 0
    is_dashed: bool = False  # Whether it is a peer.
    rank: int = 0  # Of emphasis: the six lowest of a plot are emphasised.

    def colour(self, theme: Theme) -> str:
        """Of its lines, marks and name."""
        amount = _SHADES[self.shade % len(_SHADES)]
        if self.hue is None:
            return _blended(_INK[theme], _PAPER[theme], amount)
        return _blended(self.hue, _INK[theme], amount)


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
    # Heights of dotted lines -> what they are.
    levels: Mapping[float, str] = dataclasses.field(default_factory=dict)
    # Whether names stand beside marks, not right of the axes.
    names_at_marks: bool = False
    # Ticks of the horizontal axis; the vertical one counts in powers of two.
    hosts: Sequence[int] = ()
    # Where links without a limit are, right of all ticks; see `unlimited_at`.
    unlimited: float | None = None
    diagonal: str | None = None  # What a line of slope one is called; None draws none.
    band: float = 0.0  # Share around the diagonal that is shaded.
    # Whether a line shows the most that is reached for each cost across. Its rows are
    # emphasised before all others.
    has_front: bool = False
    less_is_better: bool = False  # Whether that line shows the least.

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
        others = {each.row for each in self.series}.difference(front)
        ranked = sorted(others, key=lambda row: self.looks[row].rank)
        return [*front, *ranked][:MOST_EMPHASISED]


def is_available() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


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

    Example:
      >>> points = {'a': (1.0, 5.0), 'b': (2.0, 5.0), 'c': (3.0, 9.0), 'd': (3.0, 8.0)}
      >>> pareto_front(points)
      ['a', 'c']
    """

    def is_dominated(point: XY) -> bool:
        return any(
            x <= point[0] and y >= point[1] and (x, y) != point
            for x, y in points.values()
        )

    left = [name for name, point in points.items() if not is_dominated(point)]
    return sorted(left, key=points.__getitem__)


def unlimited_at(fastest: float) -> float:
    """Where a link without a limit is drawn, right of the fastest one in Mbit/s."""
    return fastest * _UNLIMITED_GAP


def render(
    plot: Plot, kind: Literal["png", "svg"] = "png", theme: Theme = "light"
) -> bytes:
    """Draws a plot as a file; its background is white in the light theme, else none."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color")
    settings: Any = {
        **dict.fromkeys((*lines, "xtick.color", "ytick.color"), _INK[theme]),
        "font.family": "DejaVu Sans",  # Comes with matplotlib.
        "font.size": _LETTERS,
        "figure.titlesize": 1.1 * _LETTERS,
        "figure.titleweight": "bold",
        "figure.dpi": 200,  # That of files too: letters must be as wide as measured.
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.facecolor": "none",
        "grid.alpha": 0.15,
        "savefig.facecolor": "white" if theme == "light" else "none",
        "svg.hashsalt": "prunex_jax",
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        title = textwrap.fill(plot.title, _TITLE_LENGTH)
        figure.suptitle(title, x=0.01, ha="left")
        draw(plot, figure.add_subplot(), theme)
        file = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


def draw(plot: Plot, axes: Any, theme: Theme = "light") -> None:
    """Draws a plot on axes of matplotlib."""
    ink = _INK[theme]
    ends: dict[str, XY] = {}
    if plot.names_at_marks:
        axes.margins(0.08, 0.2)
    for each in plot.series:
        _draw_series(axes, plot, each, theme)
        points = [*each.points, *(each.line or ())]
        if points and each.row in plot.emphasised:
            ends.setdefault(each.row, max(points))
    if plot.diagonal is not None:
        xs = [x for each in plot.series for x, _ in each.points]
        low, high = min(xs), max(xs)
        axes.plot((low, high), (low, high), color=ink, linewidth=0.8, alpha=0.5)
        axes.annotate(plot.diagonal, (high, high), ha="right", va="bottom")
        sides = ([(1 + k * plot.band) * x for x in (low, high)] for k in (-1, 1))
        axes.fill_between((low, high), *sides, color=ink, alpha=0.1, linewidth=0)
    if plot.has_front:
        line = zip(*_stairs(plot), strict=True)
        axes.plot(*line, color=ink, linewidth=0.8, alpha=0.5, zorder=1)
    for level, text in plot.levels.items():
        axes.axhline(level, color=ink, linewidth=0.8, linestyle=":", zorder=1)
        axes.text(0.01, level, text, transform=axes.get_yaxis_transform(), va="top")
    for name in plot.log:
        axis = getattr(axes, f"{name}axis")
        getattr(axes, f"set_{name}scale")("log", base=2 if plot.hosts else 10)
        low, high = axis.get_view_interval()
        # What costs the same stands above each other, not apart by its last digit.
        wider = max(1.0, math.sqrt(_LEAST_RANGE * low / high)) if name == "x" else 1.0
        getattr(axes, f"set_{name}lim")(low / wider, high * wider)
        _set_ticks(axis, plot, is_across=name == "x")
    axes.set_xlabel(plot.across)
    axes.set_ylabel(plot.up)
    (_names_at_marks if plot.names_at_marks else _names_at_ends)(
        axes, plot, ends, theme
    )


def _draw_series(axes: Any, plot: Plot, series: Series, theme: Theme) -> None:
    look = plot.looks[series.row]
    is_emphasised = series.row in plot.emphasised
    style = {
        "color": look.colour(theme) if is_emphasised else _GREY,
        "zorder": 3 if is_emphasised else 2,
        "linewidth": 1.5 if is_emphasised else 0.6,
        "label": look.title,
    }
    line, points = series.line, series.points
    if line is None:
        line = points
        if not series.spread:
            points = points[:: max(1, len(points) // _MOST_MARKS)]
    if len(line) > 1:
        dashes = (0, (4, 2)) if look.is_dashed else "-"
        axes.plot(*zip(*line, strict=True), linestyle=dashes, **style)
    if points and (is_emphasised or len(line) < 2):
        ys = [y for _, y in points]
        spread = [
            [abs(y - end[side]) for y, end in zip(ys, series.spread, strict=True)]
            for side in range(2 if series.spread else 0)
        ]
        axes.errorbar(
            [x for x, _ in points],
            ys,
            spread or None,
            marker=look.mark,
            markersize=4.5 if is_emphasised else 3,
            markerfacecolor="none" if series.is_hollow else style["color"],
            elinewidth=0.8,
            linestyle="none",
            **style,
        )


def _stairs(plot: Plot) -> list[XY]:
    """The line over the rows on the front, and on to the right end of all marks."""
    marks = {each.row: each.points[0] for each in plot.series}
    corners: list[XY] = []
    for x, y in (marks[row] for row in plot.front):
        corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    return [*corners, (max(x for x, _ in marks.values()), corners[-1][1])]


def _set_ticks(axis: Any, plot: Plot, is_across: bool) -> None:
    """Ticks of a logarithmic axis, written as plain numbers: hosts, or 1, 2 and 5."""
    from matplotlib.ticker import AutoLocator, NullLocator

    low, high = axis.get_view_interval()
    if is_across and plot.unlimited:
        high = 1.01 * plot.unlimited / _UNLIMITED_GAP
    if is_across and plot.hosts:
        every = -(-len(plot.hosts) // _MOST_TICKS)
        ticks = [float(number) for number in plot.hosts[::every]]
    elif plot.hosts and high / low < 2**_MOST_TICKS:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        ticks = [2.0**power for power in powers]
    else:
        steps = (1, 2, 5) if math.log10(high / low) < _MOST_DECADES else (1,)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 2:  # Hardly any range.
        ticks = [t for t in AutoLocator().tick_values(low, high) if low <= t <= high]
    texts = [digits(tick) for tick in ticks]
    if is_across and plot.unlimited:
        ticks, texts = [*ticks, plot.unlimited], [*texts, "no limit"]
    axis.set_ticks(ticks, texts)
    axis.set_minor_locator(NullLocator())


def _names_at_ends(axes: Any, plot: Plot, ends: Mapping[str, XY], theme: Theme) -> None:
    """Names right of the axes, from top to bottom as lines end, and joined to them."""
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = {row: float(to_axes.transform(end)[1]) for row, end in ends.items()}
    rows = sorted(ends, key=lambda row: -wanted[row])
    names = [_wrapped(plot.looks[row].title) for row in rows]
    line_height = 1.25 * _LETTERS / 72 / _HEIGHT
    heights = [line_height * (name.count("\n") + 1.4) for name in names]
    middles = _spread_out([wanted[row] for row in rows], heights)
    for row, name, middle in zip(rows, names, middles, strict=True):
        colour = plot.looks[row].colour(theme)
        axes.annotate(
            name,
            ends[row],
            (1.04, middle),
            textcoords="axes fraction",
            color=colour,
            va="center",
            arrowprops={**_LEASH, "color": colour, "relpos": (0, 0.5)},
        )


def _spread_out(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Middles of boxes that do not overlap, near where they are wanted.

    Example:
      >>> [round(y, 2) for y in _spread_out([0.5, 0.5, 0.0], [0.2, 0.2, 0.2])]
      [0.5, 0.3, 0.1]
    """
    middles: list[float] = []
    ceiling, floor = 1.1, 0.0
    for middle, height in zip(wanted, heights, strict=True):
        middles.append(min(middle, ceiling - height / 2))
        ceiling = middles[-1] - height / 2
    for number in reversed(range(len(middles))):
        middles[number] = max(middles[number], floor + heights[number] / 2)
        floor = middles[number] + heights[number] / 2
    return middles


def _names_at_marks(
    axes: Any, plot: Plot, ends: Mapping[str, XY], theme: Theme
) -> None:
    """Names beside marks where there is room; those in colour choose first."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure = axes.get_figure()
    figure.draw_without_rendering()
    renderer, frame = figure.canvas.get_renderer(), axes.get_window_extent()
    points = {each.row: each.points[0] for each in plot.series}
    marks = axes.transData.transform(list(points.values()))
    taken: list[Any] = []
    if plot.has_front:
        turns = axes.transData.transform(_stairs(plot))
        taken += [Bbox(pair).padded(1) for pair in itertools.pairwise(turns)]
    others = points.keys() - ends.keys()
    ranked = sorted(others, key=lambda row: plot.looks[row].rank)
    for row in [*plot.emphasised, *ranked]:
        title = plot.looks[row].title
        colour = plot.looks[row].colour(theme) if row in ends else _GREY
        # Only names in colour go further away, on a leash, or are written narrower.
        lengths = _NAME_LENGTHS if row in ends else _NAME_LENGTHS[:1]
        distances = _DISTANCES if row in ends else _DISTANCES[:1]
        for length, distance, (x, y) in itertools.product(lengths, distances, _SIDES):
            text = axes.annotate(
                _wrapped(title, length),
                points[row],
                (x * distance, y * distance),
                textcoords="offset points",
                ha=("center", "left", "right")[x],
                va=("center", "bottom", "top")[y],
                color=colour,
                size=_LETTERS if row in ends else 0.85 * _LETTERS,
                arrowprops={**_LEASH, "color": colour},
            )
            text.set_in_layout(False)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # Without the leash.
            is_inside = all(frame.contains(*corner) for corner in box.corners())
            is_free = not box.count_overlaps(taken)
            near = box.padded(_NEAR)
            if is_inside and is_free and not any(near.contains(*at) for at in marks):
                taken.append(box)
                break
            text.remove()


def _wrapped(name: str, longest: int = _NAME_LENGTHS[0]) -> str:
    r"""A name in as few lines as there are, and those as short as can be.

    Example:
      >>> _wrapped('local SGD, every 8 steps, int8')
      'local SGD, every\n8 steps, int8'
    """
    lines = textwrap.wrap(name, longest)
    for length in range(1, longest):
        shorter = textwrap.wrap(name, length)
        if len(shorter) == len(lines):
            return "\n".join(shorter)
    return "\n".join(lines)


def _blended(colour: str, other: str, amount: float) -> str:
    pairs = ((int(each[i : i + 2], 16) for each in (colour, other)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + amount * (b - a)):02x}" for a, b in pairs)
