"""When hosts meet: the steps after which a round is due."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError


@dataclasses.dataclass(frozen=True)
class SyncSchedule:
    """The steps after which rounds end: at equal distances, or as they are listed.

    Attributes:
      period: Steps of the shortest round.
      ends: Steps done at the end of every round, rising; behind the last one, rounds
        stay as long as that. Empty for rounds of `period` steps.

    Example:
      >>> sync = SyncSchedule(4, (4, 8, 14))
      >>> [step for step in range(22) if sync.is_due(step)]
      [4, 8, 14, 20]
    """

    period: int
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuses rounds without steps."""
        rounds = itertools.pairwise((0, *self.ends))
        if self.period < 1 or any(end <= start for start, end in rounds):
            raise UserError(
                f"sync_period = {self.period} must be at least 1, and rounds end one "
                f"after the other: {self.ends[:10]}"
            )

    def start_of(self, step: int) -> int:
        """Where the round starts that a step, counted from 0, belongs to.

        Example:
          >>> sync = SyncSchedule(4, (4, 8, 14))
          >>> [sync.start_of(step) for step in (3, 4, 13, 19, -1)]
          [0, 4, 8, 14, -4]
        """
        if self.ends and 0 <= step < self.ends[-1]:
            after = bisect.bisect_right(self.ends, step)
            return self.ends[after - 1] if after else 0
        first, length = self._equal_rounds(step)
        return first + (step - first) // length * length

    def end_of(self, step: int) -> int:
        """Where that round ends.

        Example:
          >>> [SyncSchedule(4).end_of(step) for step in (0, 3, 4)]
          [4, 4, 8]
        """
        if self.ends and 0 <= step < self.ends[-1]:
            return self.ends[bisect.bisect_right(self.ends, step)]
        return self.start_of(step) + self._equal_rounds(step)[1]

    def is_due(self, num_steps: int) -> bool:
        """Whether a round ends when so many steps are done."""
        return num_steps > 0 and self.start_of(num_steps) == num_steps

    def is_due_after(self, num_steps: jax.Array) -> jax.Array:
        """The same in a program: bool[] of int32[]."""
        first, length = self._equal_rounds(self.ends[-1] if self.ends else 0)
        is_equal = (num_steps > first) & ((num_steps - first) % length == 0)
        return is_equal | jnp.isin(num_steps, jnp.array(self.ends, jnp.int32))

    def at_or_after(self, num_steps: int) -> int:
        """The first step between two rounds that is not before so many steps.

        Example:
          >>> [SyncSchedule(4).at_or_after(step) for step in (0, 1, 4)]
          [0, 4, 4]
        """
        is_between = self.start_of(num_steps) == num_steps
        return num_steps if is_between else self.end_of(num_steps)

    @property
    def rounds_per_step(self) -> float:
        """How many rounds a step has, as a mean over those that are listed."""
        return len(self.ends) / self.ends[-1] if self.ends else 1 / self.period

    def __str__(self) -> str:
        """How often that is, for people."""
        if not self.ends:
            return f"every {self.period} steps"
        return f"every {self.period} steps or more, {len(self.ends)} times"

    def _equal_rounds(self, step: int) -> tuple[int, int]:
        """Before and behind those that are listed: where they start, their length."""
        if not self.ends or step < 0:
            return 0, self.ends[0] if self.ends else self.period
        before, last = (0, *self.ends)[-2:]
        return last, last - before


def quadratic_schedule(
    rates: Sequence[float], period: int, alpha: float | None = None
) -> SyncSchedule:
    """Makes rounds rarer as the learning rate falls.

    A round that starts at step t lasts

        H_t = max(period, floor((alpha / eta_t)^2)),

    with eta_t the largest rate from t on, so that rounds are frequent in a warm-up.

    Args:
      rates: Learning rate of every step of the run, at least one above 0.
      period: Steps of the shortest round, H_base.
      alpha: Growth coefficient, in the unit of the rate; None takes the largest rate
        times sqrt(period), with which rounds are as short as `period` at that rate, and
        longer at all others.
    Returns:
      Rounds to the end of the run.
    Raises:
      UserError: The rate is never above 0, or alpha is not.
    Example:
      >>> rates = [0.1] * 8 + [0.05] * 8 + [0.01] * 4
      >>> quadratic_schedule(rates, period=4).ends
      (4, 8, 24)
      >>> quadratic_schedule(rates, period=2, alpha=0.1).ends
      (2, 4, 6, 8, 12, 16, 36)

    References:
      Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning, 2023,
      arXiv:2310.14423, equation 2.
    """
    largest = max(rates, default=0.0)
    if not largest > 0:
        raise UserError(
            "the quadratic rule needs a learning rate above 0; set "
            "method.rounds.sync_rule='constant'"
        )
    if alpha is None:
        alpha = largest * math.sqrt(period)
    if not alpha > 0:
        raise UserError(f"alpha={alpha:g} of the quadratic rule must be above 0")
    ends, step = list[int](), 0
    from_here = _largest_from_here(rates)
    while step < len(rates):
        step += max(period, _round_length(alpha, from_here[step], len(rates)))
        ends.append(step)
    return SyncSchedule(period, tuple(ends))


def _largest_from_here(rates: Sequence[float]) -> list[float]:
    found, largest = list[float](), 0.0
    for rate in reversed(rates):
        largest = max(largest, rate)
        found.append(largest)
    return found[::-1]


def _round_length(alpha: float, rate: float, longest: int) -> int:
    """Floor of (alpha / rate)^2; rounding of rates in float32 does not lower it."""
    ratio = alpha / rate if rate > 0 else math.inf
    return longest if ratio**2 > longest else math.floor(ratio**2 * (1 + 1e-6))
