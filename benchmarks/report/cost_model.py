"""The model of cost: how long a step of a method takes on links, fitted to steps.

    seconds = computation + hops * hop_seconds
              + the slower of: bytes / (efficiency * link speed), hidden

The computation belongs to a method on a number of hosts, and has the time that it takes
to compress; hops and bytes are those of the traffic, from the trace. What
is hidden is work of the exchange itself, such as copying, or computation that goes on
beside it: it costs nothing where the link is slower. Nothing runs here: studies measure
steps.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from prunex_jax.base.errors import UserError

# Relative errors above this count less: a step that the machine held up.
_USUAL_ERROR = 0.05
# What bytes on a link take over their time at its nominal speed: headers at least. It
# differs by about so much between methods.
_USUAL_SLOWNESS, _LEAST_SLOWNESS, _USUAL_SPREAD = 1.05, 0.2, 0.3
# How sharply the slower of two things that run beside each other decides.
_SHARPNESS = 4


@dataclasses.dataclass(frozen=True)
class Sample:
    """Measured steps of one method over one link."""

    row: str  # Name of the method and its settings.
    num_hosts: int  # Size of the host axis.
    megabits: float | None  # Speed of the link in Mbit/s; None if it is not limited.
    num_bytes: float  # What a host sends per step.
    hops: float  # As `Traffic.hops`.
    seconds: float  # Per step.
    # What a step takes on as many hosts that exchange nothing; None if nobody measured
    # it.
    compute_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class RowCost:
    """What one method costs on one number of hosts."""

    # Computing, compressing and copying that the exchange waits for.
    compute_seconds: float
    # Work of the exchange itself, or computation beside it, that a link hides that is
    # slower.
    hidden_seconds: float
    efficiency: float  # Share of a link's speed that arrives as counted bytes.
    hops: float  # Of a step, see `Traffic`.


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What a step costs, as fitted."""

    efficiency: float  # Share of a link's speed that methods usually make use of.
    # Time of a hop beside the bytes. Links do not change it, so it cannot be told from
    # computation unless that is known: 0 where no sample has `compute_seconds`.
    hop_seconds: float
    rows: Mapping[tuple[str, int], RowCost]  # (row, number of hosts) -> what it costs.

    def predict(
        self, row: str, num_hosts: int, megabits: float | None, num_bytes: float
    ) -> float:
        """Seconds per step of a row on as many hosts as it was measured on.

        Raises:
          UserError: The row was not measured on so many hosts.
        """
        if (row, num_hosts) not in self.rows:
            known = ", ".join(f"{name} on {n}" for name, n in self.rows)
            raise UserError(
                f"the computation of {row} on {num_hosts} hosts is not known (known: "
                f"{known}); measure it over at least one link"
            )
        cost = self.rows[row, num_hosts]
        wire = 0.0 if megabits is None else 8e-6 * num_bytes / megabits
        exchange = _slower(wire / cost.efficiency, cost.hidden_seconds)
        return cost.compute_seconds + cost.hops * self.hop_seconds + float(exchange)


def fit(samples: Sequence[Sample]) -> CostModel:
    """Fits the model of cost to measured steps.

    Least squares on relative errors, so that fast and slow steps count alike; errors
    far above the usual count less, and no part of a step takes less than no time.
    A row differs from the usual efficiency, and hides anything, only as far as its
    own samples say so.

    Args:
      samples: Of any rows, hosts and links. A row on one link only is given its
        computation; how links are used, it takes from the others.
    Returns:
      The model.
    Raises:
      UserError: Values that cannot be, or samples that cannot tell computation from
        exchange.
    """
    _check(samples)
    keys = sorted({(s.row, s.num_hosts) for s in samples})
    found = _solve(samples, keys)
    hops = {(s.row, s.num_hosts): s.hops for s in samples}
    fixed = {key: found.compute[i] + found.hidden[i] for i, key in enumerate(keys)}
    hop_seconds = _hop_seconds(samples, fixed, found.compute, keys)
    rows = {
        key: RowCost(
            compute_seconds=max(0.0, float(found.compute[i]) - hops[key] * hop_seconds),
            hidden_seconds=float(found.hidden[i]),
            efficiency=1 / float(found.slowness[i]),
            hops=hops[key],
        )
        for i, key in enumerate(keys)
    }
    return CostModel(1 / float(found.usual_slowness), hop_seconds, rows)


class _Unknowns(NamedTuple):
    """What is fitted: a number for each row on a number of hosts, and one for all."""

    compute: np.ndarray
    hidden: np.ndarray
    slowness: np.ndarray  # inverse of the efficiency
    usual_slowness: float

    @classmethod
    def of(cls, flat: np.ndarray, scale: np.ndarray) -> "_Unknowns":
        compute, hidden, slowness = flat[:-1].reshape(3, -1)
        return cls(compute * scale, hidden * scale, slowness, flat[-1])


def _solve(samples: Sequence[Sample], keys: Sequence[tuple[str, int]]) -> _Unknowns:
    """Robust least squares, with weak pulls where samples say nothing."""
    which = np.array([keys.index((s.row, s.num_hosts)) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    wire = np.array([_wire_seconds(s) for s in samples])
    # Of every key, so that all unknowns are near one.
    scale = np.array([seconds[which == i].min() for i in range(len(keys))])

    def residuals(flat: np.ndarray) -> np.ndarray:
        x = _Unknowns.of(flat, scale)
        exchange = _slower(wire * x.slowness[which], x.hidden[which])
        errors = (x.compute[which] + exchange) / seconds - 1
        pulls = (x.slowness - x.usual_slowness) / _USUAL_SPREAD, x.hidden / scale
        return np.concatenate([errors, *(_USUAL_ERROR * pull for pull in pulls)])

    count = len(keys)
    start = np.repeat([0.5, 0.01, _USUAL_SLOWNESS], count)
    lower = np.repeat([0.0, 0.0, _LEAST_SLOWNESS], count)
    result = optimize.least_squares(
        residuals,
        np.append(start, _USUAL_SLOWNESS),
        bounds=(np.append(lower, _LEAST_SLOWNESS), np.inf),
        loss="soft_l1",
        f_scale=_USUAL_ERROR,
        xtol=1e-10,
        ftol=1e-10,
        gtol=1e-10,
    )
    return _Unknowns.of(result.x, scale)


def _slower(wire: Any, hidden: Any) -> Any:
    """About the larger of two times that run beside each other."""
    return (wire**_SHARPNESS + hidden**_SHARPNESS) ** (1 / _SHARPNESS)


def _wire_seconds(sample: Sample) -> float:
    """Time of the bytes at the full speed of the link."""
    if sample.megabits is None:
        return 0.0
    return 8e-6 * sample.num_bytes / sample.megabits


def _hop_seconds(
    samples: Sequence[Sample],
    fixed: Mapping[tuple[str, int], float],
    compute: np.ndarray,
    keys: Sequence[tuple[str, int]],
) -> float:
    """The weighted median, over rows, of what a hop adds to plain computation.

    It has the least sum of relative errors. What rows compute beyond that stays theirs,
    and no row is left with less than no computation.
    """
    rows: dict[tuple[str, int], tuple[float, float]] = {}
    for sample in samples:
        key = (sample.row, sample.num_hosts)
        if sample.compute_seconds is not None and sample.hops > 0:
            extra = fixed[key] - sample.compute_seconds
            rows[key] = extra / sample.hops, sample.hops
    if not rows:
        return 0.0
    ordered = sorted((each, hops / fixed[key]) for key, (each, hops) in rows.items())
    weights = np.cumsum([weight for _, weight in ordered])
    middle = int(np.searchsorted(weights, weights[-1] / 2))
    alone = dict(zip(keys, compute, strict=True))
    largest = min(alone[key] / hops for key, (_, hops) in rows.items())
    return float(np.clip(ordered[middle][0], 0.0, largest))


def _check(samples: Sequence[Sample]) -> None:
    """Refuses samples to which the model cannot be fitted."""
    for sample in samples:
        if not 0 < sample.seconds < math.inf:
            raise UserError(
                f"{sample.row} on {sample.num_hosts} hosts took {sample.seconds} "
                "seconds per step; leave out what was not measured"
            )
        if sample.megabits is not None and not 0 < sample.megabits < math.inf:
            raise UserError(
                f"the link of {sample.row} has {sample.megabits} Mbit/s; give a "
                "positive speed, or None if it is not limited"
            )
    speeds = collections.defaultdict(set)
    for sample in samples:
        if sample.num_bytes > 0:
            speeds[sample.row, sample.num_hosts].add(sample.megabits)
    if not any(len(each) > 1 for each in speeds.values()):
        seen = sorted({str(sample.megabits) for sample in samples})
        raise UserError(
            "the efficiency of the links cannot be told from computation: no row that "
            f"sends was measured on two links (Mbit/s: {', '.join(seen) or 'none'}); "
            "measure one on a second speed"
        )
