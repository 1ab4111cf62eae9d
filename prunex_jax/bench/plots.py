"""Plots of what studies found.

It owns which plots there are, and that every method looks the same in all of them:
dense is black (white on dark), peers are dashed. It leaves drawing to `drawings`, and
files to `prunex_jax.bench.report.pictures`.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from prunex_jax.bench.drawings import (
    draw_accuracy,
    draw_predictions,
    draw_scaling,
    draw_step_times,
)
from prunex_jax.bench.links.records import Point, Record
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
from prunex_jax.bench.report.pictures import Look, Looks, Plot, make_looks
from prunex_jax.bench.tables import links_beyond_one_host, scaling_beds, step_seconds


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
    looks = _looks(records, modelled)
    return [
        *_accuracy_plots(records, targets, looks),
        *_step_time_plots(records, modelled.lines, looks),
        *_scaling_plots(records, looks),
        *_model_plots(modelled, looks),
    ]


def _looks(records: Sequence[Record], modelled: Modelled) -> dict[str, Look]:
    """Row -> how it is drawn, in all plots of these records."""
    called = titles(records)
    more = {p.row: p.title for p in modelled.predictions}
    more |= {e.row: e.title for e in modelled.extrapolations}
    called |= {row: title for row, title in more.items() if row not in called}
    return make_looks(called, DENSE, peers(records))


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
