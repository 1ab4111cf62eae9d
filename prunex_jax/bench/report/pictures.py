"""Pictures: what a row looks like in all of them, and how a plot becomes a file.

It owns matplotlib, an optional dependency that is imported when something is drawn.
It leaves what is drawn to those who make plots.
"""

import dataclasses
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from prunex_jax.bench.report.cells import digits
from prunex_jax.bench.report.pages import Picture

Theme = Literal["light", "dark"]
# Told apart with any colour vision, on white and on black (after Okabe and Ito). There
# is one mark less than colours, so that pairs of both repeat late.
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#3D7FC1", "#8C8C8C")
_MARKS = ("s", "^", "D", "v", "P", "X")
_INK = {"light": "#000000", "dark": "#ffffff"}
# Inches: a picture as wide as a phone, with letters that can be read there.
_WIDTH = 4.8
_HEIGHT = 3.1
_LEGEND_LINE_HEIGHT = 0.18
_TITLE_LETTERS = 60  # In a line of that width.
# Columns of a legend and size of its letters, to be tried until it is narrow enough.
_LEGENDS = ((3, 7.5), (2, 7.5), (2, 6.5), (1, 7.5))
UNLIMITED_GAP = 2.5  # Factor from the fastest link to the mark of no limit.
_MOST_DECADES = 2.2  # For ticks at 1, 2 and 5; beyond, at 1 only.


@dataclasses.dataclass(frozen=True)
class Plot:
    """One picture, not drawn yet.

    Attributes:
      section: Part of the report: accuracy | step-time | scaling | model.
      name: Of its file, without the ending.
      title: What it shows, and where.
      draw: Draws on axes, with an ink.
    """

    section: str
    name: str
    title: str
    draw: Callable[[Any, str], None]


def is_available() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


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


def make_looks(
    titles: Mapping[str, str], first: str, dashed: Collection[str] = ()
) -> dict[str, Look]:
    """Row -> how it is drawn.

    Args:
      titles: Row -> what the legend calls it, in order.
      first: The row that others are compared with, drawn in ink.
      dashed: Rows of peers.
    """
    rest = {row: title for row, title in titles.items() if row != first}
    looks = {first: Look(titles.get(first, first), None, "o", False)}
    pairs = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKS), strict=False)
    for (row, title), (colour, mark) in zip(rest.items(), pairs, strict=False):
        looks[row] = Look(title, colour, mark, row in dashed)
    return looks


def render(
    plot: Plot, kind: Literal["png", "svg"] = "png", theme: Theme = "light"
) -> bytes:
    """Draws a plot.

    Args:
      plot: One of `make_plots`.
      kind: Format of the picture.
      theme: Its background is white, or none.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_settings(theme)):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        title = textwrap.fill(plot.title, _TITLE_LETTERS)
        figure.suptitle(title, x=0.01, ha="left")
        plot.draw(axes, _INK[theme])
        _add_legend(figure, axes)
        file = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, metadata=metadata)
    return file.getvalue()


def _settings(theme: Theme) -> Any:
    """Of matplotlib, by its names."""
    lines = ("text.color", "axes.labelcolor", "axes.edgecolor", "grid.color")
    return {
        **dict.fromkeys((*lines, "xtick.color", "ytick.color"), _INK[theme]),
        "font.family": "DejaVu Sans",  # Comes with matplotlib.
        "font.size": 8.5,
        "figure.titlesize": 9,
        "figure.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.2,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
        "figure.dpi": 200,  # That of files too: letters must be as wide as measured.
        "savefig.facecolor": "white" if theme == "light" else "none",
        "axes.facecolor": "none",
        "svg.hashsalt": "prunex_jax",
    }


def _add_legend(figure: Any, axes: Any) -> None:
    """Puts the legend below the axes, in as many columns as fit, and makes room."""
    handles, labels = axes.get_legend_handles_labels()
    for columns, size in _LEGENDS:
        legend = figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=columns,
            fontsize=size,
            frameon=False,
            columnspacing=1.0,
            handlelength=2.4,
        )
        lines = -(-len(handles) // columns)
        figure.set_figheight(_HEIGHT + _LEGEND_LINE_HEIGHT * lines)
        if legend.get_window_extent().width <= figure.bbox.width:
            return
        if (columns, size) != _LEGENDS[-1]:
            legend.remove()


def picture_of(plot: Plot) -> Picture:
    """Draws a plot for a page, in both themes."""
    return Picture(plot.title, render(plot, "svg"), render(plot, "svg", "dark"))


def plain_ticks(axis: Any, no_limit: float | None = None) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, written as plain numbers.

    Args:
      axis: Its data are drawn already.
      no_limit: Where links without a limit are drawn; ticks stop before.
    """
    from matplotlib.ticker import AutoLocator, NullLocator

    low, high = axis.get_view_interval()
    top = high if no_limit is None else no_limit / UNLIMITED_GAP * 1.01
    steps = (1, 2, 5) if math.log10(top / low) < _MOST_DECADES else (1,)
    ticks = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
        for step in steps
        if low <= step * 10.0**power <= top
    ]
    if len(ticks) < 2:  # Hardly any range.
        ticks = [t for t in AutoLocator().tick_values(low, top) if low <= t <= top]
    fixed_ticks(axis, ticks)
    axis.set_minor_locator(NullLocator())
    if no_limit is not None:
        axis.set_ticks([*ticks, no_limit], [*map(digits, ticks), "no limit"])


def fixed_ticks(axis: Any, ticks: Iterable[float]) -> None:
    """Ticks at these values only, written as plain numbers."""
    ticks = list(ticks)
    axis.set_ticks(ticks, [digits(tick) for tick in ticks])
