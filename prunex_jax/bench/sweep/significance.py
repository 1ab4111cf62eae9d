"""Whether two rows differ by more than their seeds do.

It owns the arithmetic of a few numbers per row, which are all that seeds give: means,
standard deviations, and intervals that make no claim that a handful of runs cannot
carry.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two means, with its uncertainty.

    Attributes:
      mean: Mean of the one minus mean of the other.
      half_width: Half of the interval that contains the true difference with 95 %
        probability; infinite where a row has one run only.
    """

    mean: float
    half_width: float

    @property
    def is_beyond_spread(self) -> bool:
        """Whether zero lies outside the interval."""
        return abs(self.mean) > self.half_width


def difference(ones: Sequence[float], others: Sequence[float]) -> Difference:
    """Compares two rows by Welch's interval, which lets their spreads differ.

    Args:
      ones: One number per seed.
      others: The same for the row it is compared with.
    Raises:
      ValueError: One of them is empty.
    Example:
      >>> found = difference([0.70, 0.71, 0.72], [0.60, 0.61, 0.62])
      >>> round(found.mean, 3), round(found.half_width, 3), found.is_beyond_spread
      (0.1, 0.023, True)
      >>> difference([0.7], [0.6]).is_beyond_spread
      False

    References:
      Welch, The generalization of Student's problem when several different population
      variances are involved, 1947, https://doi.org/10.2307/2332510.
    """
    mean = statistics.fmean(ones) - statistics.fmean(others)
    if min(len(ones), len(others)) < 2:
        return Difference(mean, math.inf)
    squared = [statistics.variance(each) / len(each) for each in (ones, others)]
    total = sum(squared)
    if total == 0:
        return Difference(mean, 0.0)
    freedom = total**2 / sum(
        part**2 / (len(each) - 1)
        for part, each in zip(squared, (ones, others), strict=True)
    )
    return Difference(mean, _quantile(freedom) * math.sqrt(total))


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of the seeds; None for fewer than two.

    Example:
      >>> deviation([1.0, 3.0]) == 2**0.5, deviation([1.0])
      (True, None)
    """
    return statistics.stdev(values) if len(values) > 1 else None


def _quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's distribution."""
    # Imported here: it takes a while, and only reports need it.
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))
