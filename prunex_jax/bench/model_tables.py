"""Tables of a model of cost: against what was measured, and where nobody measured.

It owns the numbers that come from such a model, as plain values, so that tables and
plots know none in particular.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from prunex_jax.bench.places import DENSE
from prunex_jax.bench.report.cells import Cell, Table, figures, many, shown_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A measured step time beside that of a model of cost.

    Attributes:
      row: `Row.name`.
      title: `Row.title`.
      num_hosts: Size of the host axis.
      link: As in `Study.links`.
      measured: Seconds per step.
      predicted: The same, by the model.
      is_held_out: Whether the model had not seen the point.
    """

    row: str
    title: str
    num_hosts: int
    link: str
    measured: float
    predicted: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Of what was measured; positive where the model is too slow."""
        return self.predicted / self.measured - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """A step time by a model of cost that nobody measured.

    Attributes:
      setting: Which network and link, in words; each has a table of its own.
      row: `Row.name`.
      title: `Row.title`.
      num_hosts: Size of the host axis.
      seconds: Per step.
    """

    setting: str
    row: str
    title: str
    num_hosts: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Step times by a model of cost over links of any speed.

    Attributes:
      study: `Study.name`.
      row: `Row.name`.
      num_hosts: Size of the host axis.
      megabits: Speeds, in Mbit/s.
      seconds: Per step, for each of them.
    """

    study: str
    row: str
    num_hosts: int
    megabits: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Modelled:
    """What a model of cost says.

    Attributes:
      predictions: At what was measured.
      extrapolations: Where nobody measured.
      lines: Between measured points, for plots.
      notes: What the model is, in plain sentences.
    """

    predictions: tuple[Prediction, ...] = ()
    extrapolations: tuple[Extrapolation, ...] = ()
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def errors(predictions: Iterable[Prediction]) -> tuple[float, float] | None:
    """Median and worst error of held-out points, without sign; None if there are none.

    Example:
      >>> point = dict(row='a', title='a', num_hosts=2, link='r=4', measured=2.0)
      >>> errors([Prediction(**point, predicted=1.0, is_held_out=True),
      ...         Prediction(**point, predicted=9.0, is_held_out=False)])
      (0.5, 0.5)
    """
    found = [abs(point.error) for point in predictions if point.is_held_out]
    return (statistics.median(found), max(found)) if found else None


def predictions_table(modelled: Modelled) -> list[Table]:
    """Predicted beside measured seconds, held-out points first; [] without points."""
    points = sorted(modelled.predictions, key=lambda point: not point.is_held_out)
    if not points:
        return []
    found = errors(points)
    held_out = sum(point.is_held_out for point in points)
    note = f"{held_out} of {many(len(points), 'point')} held out, unseen by the fit"
    if found is not None:
        note += f": error {100 * found[0]:.1f} % in the median, {100 * found[1]:.1f} % "
        note += "at worst"
    rows = tuple(
        (
            Cell(point.title),
            Cell(str(point.num_hosts), point.num_hosts),
            Cell(point.link),
            Cell(shown_seconds(point.measured), point.measured),
            Cell(shown_seconds(point.predicted), point.predicted),
            Cell(f"{100 * point.error:+.1f} %", point.error),
            Cell("held out" if point.is_held_out else "fitted"),
        )
        for point in points
    )
    header = ("method", "hosts", "link", "measured", "model", "error", "point")
    title = "Model of cost against measured step times"
    return [Table(title, header, rows, (f"{note}.", *modelled.notes))]


def extrapolation_tables(extrapolations: Sequence[Extrapolation]) -> list[Table]:
    """Seconds per step: methods by numbers of hosts, a table for every setting."""
    tables = []
    for setting in dict.fromkeys(each.setting for each in extrapolations):
        here = [each for each in extrapolations if each.setting == setting]
        hosts = sorted({each.num_hosts for each in here})
        seconds = {(each.row, each.num_hosts): each.seconds for each in here}
        called = {each.row: each.title for each in here}
        rows = [
            (Cell(title), *(_extrapolated(seconds, row, number) for number in hosts))
            for row, title in called.items()
        ]
        notes = [
            "By the model of cost; nobody measured this. Seconds per step; share "
            f"of the time of row {DENSE!r} on as many hosts; speed-up over the same "
            "method on one host."
        ]
        header = ("method", *(many(number, "host") for number in hosts))
        title = f"Extrapolated: {setting}"
        tables.append(Table(title, header, tuple(rows), tuple(notes)))
    return tables


def _extrapolated(
    seconds: dict[tuple[str, int], float], row: str, num_hosts: int
) -> Cell:
    if (row, num_hosts) not in seconds:
        return Cell()
    value = seconds[row, num_hosts]
    lines = [shown_seconds(value)]
    if (DENSE, num_hosts) in seconds:
        lines.append(f"{figures(value / seconds[DENSE, num_hosts])} of dense")
    if (row, 1) in seconds:
        lines.append(f"{figures(seconds[row, 1] / value)}x")
    return Cell("\n".join(lines), value)
