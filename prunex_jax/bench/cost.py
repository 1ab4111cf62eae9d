"""The model of cost of what was measured: fitted, checked, drawn and extrapolated.

It owns the way from records to `model_tables.Modelled`: which steady steps the model is
fitted to, which it has to predict unseen, and what it says of other links. It leaves
the model itself to `step_time`, and clusters that nobody measured to `published`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.bench.cost_model.step_time import CostModel, Sample, fit
from prunex_jax.bench.links.records import Measurement, Record
from prunex_jax.bench.model_tables import Line, Modelled, Prediction
from prunex_jax.bench.places import Bed, Place, measured
from prunex_jax.bench.report.cells import digits, many, span

_POINTS_OF_A_LINE = 40


@dataclasses.dataclass(frozen=True)
class Split:
    """Steady steps of one bed.

    Attributes:
      fitted: What the model of cost is fitted to.
      held_out: What it has to predict.
    """

    fitted: tuple[Measurement, ...]
    held_out: tuple[Measurement, ...]


def modelled(
    records: Iterable[Record], held_out: Mapping[str, Collection[str]]
) -> Modelled:
    """Fits a model of cost to every bed and checks it.

    Args:
      records: Of any studies; whole runs are passed over.
      held_out: Study -> links that the model is not fitted to.
    Returns:
      Predictions of fitted and of held-out points, and lines between them. What cannot
      be fitted is said in a note.
    """
    predictions: list[Prediction] = []
    lines: list[Line] = []
    notes: list[str] = []
    for bed, split in splits(records, held_out).items():
        try:
            model = fit([sample_of(each) for each in split.fitted])
        except UserError as error:
            notes.append(f"{bed.title}: no model of cost, because {error}.")
            continue
        for points, is_held_out in ((split.held_out, True), (split.fitted, False)):
            predictions += predict_all(model, points, is_held_out)
        lines += _lines(model, bed, [*split.fitted, *split.held_out])
        notes.append(_note(model, bed, split))
    return Modelled(tuple(predictions), (), tuple(lines), tuple(notes))


def splits(
    records: Iterable[Record], held_out: Mapping[str, Collection[str]]
) -> dict[Bed, Split]:
    """Steady steps by bed, those over held-out links apart."""
    fitted: dict[Bed, list[Measurement]] = {}
    unseen: dict[Bed, list[Measurement]] = {}
    for spot, rows in measured(records).items():
        bed = spot.place.bed
        is_held_out = spot.link in held_out.get(bed.study, ())
        (unseen if is_held_out else fitted).setdefault(bed, []).extend(rows.values())
    return {
        bed: Split(tuple(points), tuple(unseen.get(bed, ())))
        for bed, points in fitted.items()
    }


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


def predict_all(
    model: CostModel, records: Iterable[Measurement], is_held_out: bool
) -> list[Prediction]:
    """What the model says beside what was measured, where it knows the row."""
    found = []
    for record in records:
        sample = sample_of(record)
        if (sample.row, sample.num_hosts) not in model.rows:
            continue
        predicted = model.predict(
            sample.row, sample.num_hosts, sample.megabits, sample.num_bytes
        )
        found.append(
            Prediction(
                row=sample.row,
                title=record.setup.title,
                num_hosts=sample.num_hosts,
                link=record.setup.link,
                measured=sample.seconds,
                predicted=predicted,
                is_held_out=is_held_out,
            )
        )
    return found


def _lines(model: CostModel, bed: Bed, records: Sequence[Measurement]) -> list[Line]:
    """Step times over all link speeds between the slowest and the fastest."""
    limited: dict[tuple[str, int], list[Sample]] = {}
    for record in records:
        sample = sample_of(record)
        if sample.megabits is not None:
            limited.setdefault((sample.row, sample.num_hosts), []).append(sample)
    lines = []
    for (row, num_hosts), samples in limited.items():
        if (row, num_hosts) not in model.rows:
            continue
        speeds = [sample.megabits for sample in samples if sample.megabits]
        grid = np.geomspace(min(speeds), max(speeds), _POINTS_OF_A_LINE)
        num_bytes = samples[0].num_bytes
        lines.append(
            Line(
                study=bed.study,
                row=row,
                num_hosts=num_hosts,
                megabits=tuple(map(float, grid)),
                seconds=tuple(
                    model.predict(row, num_hosts, float(speed), num_bytes)
                    for speed in grid
                ),
            )
        )
    return lines


def _note(model: CostModel, bed: Bed, split: Split) -> str:
    links = dict.fromkeys(each.setup.link for each in split.fitted)
    own = span([cost.efficiency for cost in model.rows.values()])
    hosts = sorted({Place.of(each.setup).num_hosts for each in split.fitted})
    return (
        f"{bed.title}: fitted to {many(len(split.fitted), 'point')} over "
        f"{', '.join(links)}, on {', '.join(map(str, hosts))} hosts. Links carry "
        f"{digits(model.efficiency)} of their speed in payload (by method: {own}); a "
        f"hop takes {digits(1e3 * model.hop_seconds)} ms."
    )
