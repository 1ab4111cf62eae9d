"""Plots of what studies found.

It owns which plots there are, and that every method looks the same in all of them:
dense is black (white on dark), peers are dashed. Pictures need matplotlib, an optional
dependency that nothing else of the package uses. It leaves drawing to `drawings`, and
where pictures go to `report`.
"""

import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from prunex_jax.bench.drawings import (
    Look,
    Looks,
    draw_accuracy,
    draw_predictions,
    draw_scaling,
    draw_step_times,
)
from prunex_jax.bench.model_tables import Line, Modelled
from prunex_jax.bench.places import (
    DENSE,
    Place,
    by_place,
    curves,
    link_title,
    measured,
    peers,
    titles,
)
from prunex_jax.bench.records import Point, Record
from prunex_jax.bench.tables import links_beyond_one_host, scaling_beds, step_seconds

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
# Columns of a legend and size of its letters, to be tried until it is narrow enough.
_LEGENDS = ((3, 7.5), (2, 7.5), (2, 6.5), (1, 7.5))


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


def make_plots(
    records: Sequence[Record],
    targets: Mapping[str, Sequence[float]],
    modelled: Modelled,
) -> list[Plot]:
    """Lists all plots that there are numbers for.

    Args:
      records: Of one study or several.
      targets: Study -> validation accuracies that are asked for.
      modelled: What a model of cost says.
    """
    looks = make_looks(records, modelled)
    return [
        *_accuracy_plots(records, targets, looks),
        *_step_time_plots(records, modelled.lines, looks),
        *_scaling_plots(records, looks),
        *_model_plots(modelled, looks),
    ]


def make_looks(records: Sequence[Record], modelled: Modelled) -> dict[str, Look]:
    """Row -> how it is drawn, in all plots of these records."""
    called = titles(records)
    more = {p.row: p.title for p in modelled.predictions}
    more |= {e.row: e.title for e in modelled.extrapolations}
    called |= {row: title for row, title in more.items() if row not in called}
    dashed = peers(records)
    looks = {DENSE: Look(called.pop(DENSE, DENSE), None, "o", False)}
    pairs = zip(itertools.cycle(_COLOURS), itertools.cycle(_MARKS), strict=False)
    for (row, title), (colour, mark) in zip(called.items(), pairs, strict=False):
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
        figure.suptitle(plot.title, x=0.01, ha="left")
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


def _accuracy_plots(
    records: Sequence[Record], targets: Mapping[str, Sequence[float]], looks: Looks
) -> list[Plot]:
    sides: tuple[tuple[str, str, Callable[[Point], float]], ...] = (
        ("seconds", "seconds in steps", lambda point: point.seconds),
        ("bytes", "MB sent by a host", lambda point: point.host_bytes / 1e6),
    )
    plots = []
    for spot, rows in curves(records).items():
        runs = [run for row in looks for run in rows.get(row, ())]
        link = ", ".join(link_title([run.setup for run in runs]).split("\n"))
        for what, label, x_of in sides:
            if any(x_of(point) > 0 for run in runs for point in run.points):
                draw = functools.partial(
                    draw_accuracy,
                    looks=looks,
                    runs=runs,
                    targets=targets.get(spot.place.bed.study, ()),
                    x_of=x_of,
                    label=label,
                )
                name = _name(f"accuracy-{what}", spot.place, spot.link)
                plots.append(
                    Plot("accuracy", name, f"{spot.place.title}, {link}", draw)
                )
    return plots


def _step_time_plots(
    records: Sequence[Record], lines: Sequence[Line], looks: Looks
) -> list[Plot]:
    plots = []
    for place, links in by_place(measured(records)).items():
        found = [each for rows in links.values() for each in rows.values()]
        if len({each.setup.megabits or 0.0 for each in found} - {0.0}) < 2:
            continue
        here = (place.bed.study, place.num_hosts)
        mine = [line for line in lines if (line.study, line.num_hosts) == here]
        draw = functools.partial(draw_step_times, looks=looks, found=found, lines=mine)
        pause = ", pause for computation" * bool(found[0].setup.stand_in_seconds)
        title = f"Step time: {place.title}{pause}"
        plots.append(Plot("step-time", _name("step-time", place), title, draw))
    return plots


def _scaling_plots(records: Sequence[Record], looks: Looks) -> list[Plot]:
    plots = []
    for bed, places in scaling_beds(records).items():
        pauses = [
            each.setup.stand_in_seconds
            for links in places.values()
            for rows in links.values()
            for each in rows.values()
        ]
        for link in links_beyond_one_host(places):
            times = {row: step_seconds(places, link, row) for row in looks}
            if any(1 in found and len(found) > 1 for found in times.values()):
                draw = functools.partial(draw_scaling, looks=looks, times=times)
                pause = ", pause for computation" * any(pauses)
                title = f"Scaling: {bed.title}, {link}{pause}"
                name = _name("scaling", next(reversed(places)), link)
                plots.append(Plot("scaling", name, title, draw))
    return plots


def _model_plots(modelled: Modelled, looks: Looks) -> list[Plot]:
    plots = []
    if modelled.predictions:
        draw = functools.partial(
            draw_predictions, looks=looks, predictions=modelled.predictions
        )
        title = "Model of cost against measured steps"
        plots.append(Plot("model", "model", title, draw))
    for number, setting in enumerate(
        dict.fromkeys(each.setting for each in modelled.extrapolations), start=1
    ):
        times: dict[str, dict[int, float]] = {}
        for each in modelled.extrapolations:
            if each.setting == setting:
                times.setdefault(each.row, {})[each.num_hosts] = each.seconds
        if any(1 in found and len(found) > 1 for found in times.values()):
            draw = functools.partial(draw_scaling, looks=looks, times=times)
            title = f"Extrapolated: {setting}"
            plots.append(Plot("model", f"extrapolated-{number}", title, draw))
    return plots


def _name(what: str, place: Place, link: str = "") -> str:
    size = f"{place.num_hosts}x{place.bed.devices_per_host}"
    parts = [what, place.bed.study, size, place.bed.hosts_kind, link]
    text = "_".join(part for part in parts if part and part != "namespaces")
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)
