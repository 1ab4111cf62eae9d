"""The figure that rows are compared by: a metric of the task, how it is shown, and its
curves on the validation split against bytes and seconds."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from prunex_jax.compare.report.plots import XY, Looks, Plot, Series

_ACCURACY = "accuracy"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A metric of the task.

    Example:
      >>> Figure().title('test'), Figure('bits_per_byte', True).title('validation')
      ('test accuracy, %', 'validation bits per byte')
    """

    metric: str = _ACCURACY  # As the task names it.
    less_is_better: bool = False  # Whether it is a loss, or the like.

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return self.metric.replace("_", " ")

    @property
    def heading(self) -> str:
        """What it is called where a line begins."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def factor(self) -> int:
        """By what values are multiplied to be shown."""
        return 100 if self.metric == _ACCURACY else 1

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 2 if self.metric == _ACCURACY else 4

    @property
    def differences(self) -> str:
        """What differences are in."""
        return f"points of {self.words}" if self.factor == 100 else self.words

    def title(self, split: str) -> str:
        """What tables and axes call it, measured on a split."""
        return f"{split} {self.words}{', %' if self.factor == 100 else ''}"


# Of plots: key, what the axis says, where a point is on it.
AXES: tuple[tuple[str, str, Callable[["Point"], float]], ...] = (
    ("bytes", "MB sent by a host", lambda point: point.host_bytes / 1e6),
    ("seconds", "seconds in steps", lambda point: point.seconds),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """The network after some steps."""

    step: int  # Steps done.
    value: float  # The metric on the validation split.
    # Sent by a host so far: as its interface counted (mean over hosts), or by the trace
    # where nothing could be counted.
    host_bytes: float
    seconds: float  # Spent in steps, without compilation and evaluation.


def curve_plots(
    names: Mapping[str, tuple[str, str]],
    points: Mapping[str, Sequence[Sequence[Point]]],
    looks: Looks,
    figure: Figure,
) -> list[Plot]:
    """A metric of validation on the way, mean over seeds, where there is any."""
    plots, factor = list[Plot](), figure.factor
    for key, across, x_of in AXES:
        lines = {row: _mean_curve(runs, x_of, factor) for row, runs in points.items()}
        series = [Series(row, line) for row, line in lines.items() if line]
        silent = sum(any(points[row]) and not line for row, line in lines.items())
        across += f" (not shown: {silent} that send nothing)" * bool(silent)
        if series:
            labels = *names[key], across, figure.title("validation")
            plots.append(Plot(*labels, series, looks))
    return plots


def _mean_curve(
    runs: Sequence[Sequence[Point]], x_of: Callable[[Point], float], factor: float
) -> list[XY]:
    """Mean over seeds of a metric times a factor, at the steps that all runs have."""
    by_step = [{point.step: point for point in run} for run in runs]
    points = [
        (
            statistics.fmean(x_of(run[step]) for run in by_step),
            factor * statistics.fmean(run[step].value for run in by_step),
        )
        for step in sorted(set.intersection(*(set(run) for run in by_step)))
    ]
    # A logarithmic axis has no place for what has cost nothing.
    return [point for point in points if point[0] > 0]
