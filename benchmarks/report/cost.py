"""The model of cost beside what was measured, between it, and where nobody measured.

`cost_model` is the model itself, `published` a cluster that nobody here has measured.
"""

import dataclasses
import functools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from benchmarks.links.records import Measurement, Record
from benchmarks.report.cost_model import CostModel, Sample, fit
from benchmarks.report.marks import draw_diagonal, shown_seconds, span
from benchmarks.report.places import DENSE, Place, measured
from benchmarks.report.steps import Lines, Times, speed_up_plot
from prunex_jax.base.errors import UserError
from prunex_jax.compare.report.plots import XY, Looks, Plot, Series
from prunex_jax.compare.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    figures,
    make_table,
    many,
    method_table,
)

ALLOWED_ERROR = 0.15  # The band around what was measured.
_POINTS_OF_A_LINE = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A measured step time beside that of a model of cost."""

    record: Measurement  # What was measured.
    seconds: float  # Per step, by the model.
    is_held_out: bool  # Whether the model had not seen the point.

    @property
    def error(self) -> float:
        """Of what was measured; positive where the model is too slow."""
        return self.seconds / self.record.median - 1


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """Step times by a model of cost that nobody measured."""

    setting: str  # Which network and link, in words.
    titles: Mapping[str, str]  # Row -> `Row.title`.
    times: Times  # Row -> number of hosts -> seconds per step.


@dataclasses.dataclass(frozen=True)
class Modelled:
    """What a model of cost says."""

    predictions: tuple[Prediction, ...] = ()  # At what was measured.
    extrapolations: tuple[Extrapolation, ...] = ()  # Where nobody measured.
    # Between measured points, for plots.
    lines: Lines = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()  # What the model is, in plain sentences.


def modelled(
    records: Iterable[Record], held_out: Mapping[str, Collection[str]]
) -> Modelled:
    """Fits a model of cost to every bed and checks it.

    Returns:
      Predictions of fitted and of held-out points, and lines between them. What cannot
      be fitted is said in a note.
    """
    predictions: list[Prediction] = []
    lines: dict[tuple[str, str, int], Sequence[XY]] = {}
    notes: list[str] = []
    for bed, (fitted, unseen) in splits(records, held_out).items():
        try:
            model = fit([sample_of(each) for each in fitted])
        except UserError as error:
            notes.append(f"{bed.title}: no model of cost, because {error}.")
            continue
        predictions += [
            Prediction(record=record, seconds=seconds, is_held_out=is_held_out)
            for points, is_held_out in ((unseen, True), (fitted, False))
            for record in points
            if (seconds := _predict(model, record, record.setup.megabits)) is not None
        ]
        lines |= _lines(model, bed, [*fitted, *unseen])
        notes.append(_note(model, bed, fitted))
    return Modelled(tuple(predictions), (), lines, tuple(notes))


def splits(
    records: Iterable[Record], held_out: Mapping[str, Collection[str]]
) -> dict[Place, tuple[list[Measurement], list[Measurement]]]:
    """Bed -> steady steps that the model is fitted to, and those over held-out links.

    A bed of held-out links alone is left out.
    """
    found: dict[Place, tuple[list[Measurement], list[Measurement]]] = {}
    for place, links in measured(records).items():
        parts = found.setdefault(place.of_any_size, ([], []))
        for link, rows in links.items():
            is_held_out = link in held_out.get(place.study, ())
            parts[is_held_out].extend(rows.values())
    return {bed: parts for bed, parts in found.items() if parts[0]}


def sample_of(record: Measurement) -> Sample:
    """What the model of cost needs of a record.

    Bytes are those of the formula; of peers, which have none, those that their
    interface counted.
    """
    setup = record.setup
    num_bytes = record.formula_bytes
    if num_bytes is None:
        num_bytes = record.traced_bytes or record.interface_bytes or 0.0
    return Sample(
        row=setup.row,
        num_hosts=setup.num_hosts,
        megabits=setup.megabits,
        num_bytes=num_bytes,
        hops=record.hops,
        seconds=record.median,
        compute_seconds=setup.compute_seconds,
    )


def predictions_table(modelled: Modelled) -> list[Table]:
    """Predicted beside measured seconds, held-out points first; [] without points."""
    points = sorted(modelled.predictions, key=lambda point: not point.is_held_out)
    if not points:
        return []
    errors = [abs(point.error) for point in points if point.is_held_out]
    note = f"{len(errors)} of {many(len(points), 'point')} held out, unseen by the fit"
    if errors:
        note += f": error {100 * statistics.median(errors):.1f} % in the median, "
        note += f"{100 * max(errors):.1f} % at worst"
    columns: tuple[Column[Prediction], ...] = (
        Column("method", lambda point: point.record.setup.title),
        Column("hosts", lambda point: point.record.setup.num_hosts, str),
        Column("link", lambda point: point.record.setup.link),
        Column("measured", lambda point: point.record.median, shown_seconds),
        Column("model", lambda point: point.seconds, shown_seconds),
        Column("error", lambda point: point.error, lambda e: f"{100 * e:+.1f} %"),
        Column("point", lambda point: "held out" if point.is_held_out else "fitted"),
    )
    title = "Model of cost against measured step times"
    return [make_table(title, columns, points, (f"{note}.", *modelled.notes))]


def extrapolation_tables(extrapolations: Sequence[Extrapolation]) -> list[Table]:
    """Seconds per step: methods by numbers of hosts, a table for every setting."""
    note = (
        "By the model of cost; nobody measured this. Seconds per step; share "
        f"of the time of row {DENSE!r} on as many hosts; speed-up over the same "
        "method on one host."
    )
    tables = []
    for each in extrapolations:
        columns = [
            Column(many(num, "host"), functools.partial(_extrapolated, num, each.times))
            for num in sorted({num for row in each.times.values() for num in row})
        ]
        title = f"Extrapolated: {each.setting}"
        tables.append(method_table(title, each.titles, columns, (note,)))
    return tables


def model_plots(modelled: Modelled, looks: Looks) -> list[Plot]:
    """Predicted against measured step times, and extrapolated speed-ups."""
    plots = []
    if modelled.predictions:
        series = []
        for row in looks:
            mine = [p for p in modelled.predictions if p.record.setup.row == row]
            for is_held_out in (True, False):
                points = [
                    (point.record.median, point.seconds)
                    for point in mine
                    if point.is_held_out == is_held_out
                ]
                if points:
                    series.append(
                        Series(row, points, line=(), is_hollow=not is_held_out)
                    )
        measured = [p.record.median for p in modelled.predictions]
        plots.append(
            Plot(
                "model",
                "Model of cost against measured steps",
                "measured seconds per step (hollow: fitted, filled: held out)",
                f"predicted (shaded: within {100 * ALLOWED_ERROR:.0f} %)",
                series,
                looks,
                log="xy",
                draw_more=functools.partial(
                    draw_diagonal, min(measured), max(measured), "", ALLOWED_ERROR
                ),
            )
        )
    for number, each in enumerate(modelled.extrapolations, start=1):
        name, title = f"extrapolated-{number}", f"Extrapolated: {each.setting}"
        plots += speed_up_plot(name, title, each.times, looks)
    return plots


def _extrapolated(num_hosts: int, times: Times, row: str) -> Cell | None:
    value = times.get(row, {}).get(num_hosts)
    if value is None:
        return None
    lines = [shown_seconds(value)]
    dense = times.get(DENSE, {})
    if num_hosts in dense:
        lines.append(f"{figures(value / dense[num_hosts])} of dense")
    if 1 in times[row]:
        lines.append(f"{figures(times[row][1] / value)}x")
    return Cell("\n".join(lines), value)


def _predict(
    model: CostModel, record: Measurement, megabits: float | None
) -> float | None:
    """Seconds of a step over a link of that speed; None for a row it does not know."""
    sample = sample_of(record)
    if (sample.row, sample.num_hosts) not in model.rows:
        return None
    return model.predict(sample.row, sample.num_hosts, megabits, sample.num_bytes)


def _lines(
    model: CostModel, bed: Place, records: Sequence[Measurement]
) -> dict[tuple[str, str, int], Sequence[XY]]:
    """Step times over all link speeds between the slowest and the fastest."""
    limited: dict[tuple[str, int], list[Measurement]] = {}
    for record in records:
        key = record.setup.row, record.setup.num_hosts
        if record.setup.megabits is not None and key in model.rows:
            limited.setdefault(key, []).append(record)
    lines: dict[tuple[str, str, int], Sequence[XY]] = {}
    for (row, num_hosts), mine in limited.items():
        speeds = [record.setup.megabits or 0.0 for record in mine]
        grid = np.geomspace(min(speeds), max(speeds), _POINTS_OF_A_LINE).tolist()
        seconds = [_predict(model, mine[0], speed) or 0.0 for speed in grid]
        lines[bed.study, row, num_hosts] = list(zip(grid, seconds, strict=True))
    return lines


def _note(model: CostModel, bed: Place, fitted: Sequence[Measurement]) -> str:
    links = dict.fromkeys(each.setup.link for each in fitted)
    own = span([cost.efficiency for cost in model.rows.values()])
    hosts = sorted({each.setup.num_hosts for each in fitted})
    return (
        f"{bed.title}: fitted to {many(len(fitted), 'point')} over "
        f"{', '.join(links)}, on {', '.join(map(str, hosts))} hosts. Links carry "
        f"{digits(model.efficiency)} of their speed in payload (by method: {own}); a "
        f"hop takes {digits(1e3 * model.hop_seconds)} ms."
    )
