"""Kept channels for a target in the user's unit: work, size, bytes or time.

A `CountFamily` lists the kept counts that one rule can give, each inside the next; a
`Cost` says what a set of counts costs, and comes from outside, such as `shrink.cost`;
`solve_keep_counts` finds the largest that costs no more than the target. A run asks its
`Budget` once per stair.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity.choice import normalise_scores
from prunex_jax.sparsity.counts import (
    ROUNDING_SLACK,
    CountLimits,
    global_keep_counts,
    ranked_family,
    uniform_family,
    uniform_keep_counts,
)
from prunex_jax.sparsity.criteria import estimates_damage
from prunex_jax.sparsity.quanta import read_multiples
from prunex_jax.sparsity.settings import SparsityConfig

KeepCounts = Mapping[str, int]
# Kept counts -> what they cost; does not fall when counts grow.
Cost = Callable[[KeepCounts], float]
Unit = Literal["channels", "params", "macs", "bytes", "latency"]
_NOUNS = {
    "channels": "channels",
    "params": "parameters",
    "macs": "multiply-accumulates",
    "bytes": "bytes per exchange",
    "latency": "seconds per call",
}
# What rounding of counts may change of a share before it is said.
_ROUNDED = 0.02
# The least, the most, and the dense network.
_FIXED_EVALUATIONS = 3


@dataclasses.dataclass(frozen=True)
class Target:
    """How much may remain of a network, in one unit.

    Raises:
      UserError: An unknown unit, both or none of `keep` and `at_most`, or a value out
        of range.
    Example:
      >>> Target('macs', keep=0.5).limit(2_000)
      1000.0
      >>> Target('bytes', at_most=300).limit(2_000)
      300
    """

    unit: Unit  # channels | params | macs | bytes (of one exchange) | latency (seconds)
    keep: float | None = None  # Share of what the dense network has, in (0, 1]; or None
    # The amount itself; or None. Exactly one of the two is given.
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.unit not in _NOUNS:
            raise UserError(
                f"a target in {self.unit!r} is unknown; use {', '.join(_NOUNS)}"
            )
        if (self.keep is None) == (self.at_most is None):
            raise UserError(
                f"a target with keep={self.keep} and at_most={self.at_most}: give "
                "exactly one, a share of the dense network or an amount"
            )
        if self.keep is not None and not 0.0 < self.keep <= 1.0:
            raise UserError(
                f"a target that keeps {self.keep:g} is outside (0, 1]; keep is a share "
                "of the dense network"
            )
        if self.at_most is not None and not self.at_most > 0.0:
            raise UserError(f"a target of at most {self.at_most:g} must be positive")

    def limit(self, dense: float) -> float:
        """The most that may be reached, where the dense network has `dense`."""
        if self.at_most is not None:
            return self.at_most
        assert self.keep is not None
        return self.keep * dense


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """The largest kept counts within a target."""

    keep_counts: Mapping[str, int]  # Kept channels of every group.
    target: Target  # What was asked for.
    dense: float  # What the dense network has, in the unit of the target.
    asked: float  # The most that was allowed.
    achieved: float  # What these counts have; at most `asked`.
    density: float  # Share of the channels that they keep.
    evaluations: int  # Sets of counts whose cost was computed or measured.
    # Whether larger counts never cost less where costs were computed. A measured
    # latency may break this; the counts are within the target all the same, but there
    # may be larger ones that are too.
    is_monotone: bool

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.achieved:,.6g} of {self.dense:,.6g} {_NOUNS[self.target.unit]} "
            f"({self.achieved / max(self.dense, 1e-300):.3f}), asked for at most "
            f"{self.asked:,.6g}"
        )


class Memoised:
    """A cost that is computed once per set of counts."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.known: dict[tuple[tuple[str, int], ...], float] = {}

    def __call__(self, keep_counts: KeepCounts) -> float:
        """The cost of these counts."""
        key = tuple(sorted(keep_counts.items()))
        if key not in self.known:
            self.known[key] = self.cost(keep_counts)
        return self.known[key]


def solve_keep_counts(
    target: Target,
    costs: Mapping[str, Cost],
    limits: CountLimits,
    *,
    scores: Mapping[str, np.ndarray] | None = None,
    previous: Mapping[str, int] | None = None,
    max_evaluations: int = 32,
) -> Solution:
    """Finds the largest kept counts that cost no more than a target.

    Counts come from one family in which every set lies inside the next: one density in
    all groups, to within one step, or, with scores, a falling threshold on all scores.
    Costs that grow with the counts grow along it, so a binary search is exact. What it
    returns was itself evaluated and found within the target, whatever costs do between.

    Args:
      target: What may remain.
      costs: A function from kept counts to cost for the unit of the target; see
        `size_costs`, `macs_cost` and `latency_cost` in `shrink.cost`.
      limits: Sizes of the groups, and what their counts may be.
      scores: float[size] per group, comparable between groups (`normalise_scores`);
        None gives every group the same density.
      previous: With scores, counts that may not be exceeded, those of the stair before.
      max_evaluations: Bound on the sets of counts that are evaluated, and so on
        compilations where latency is measured. Where the family is too long for it,
        evenly spaced members are searched.
    Returns:
      The counts and what they reach.
    Raises:
      UserError: No cost for the unit, a target below what the least counts cost (of
        every group one multiple of channels, or what it may not lose, and everything
        that belongs to no group), or what the limits refuse.
    Example:
      >>> params = lambda counts: 10 * counts['a'] + 50
      >>> target = Target('params', keep=0.5)
      >>> limits = CountLimits({'a': 64})
      >>> solution = solve_keep_counts(target, {'params': params}, limits)
      >>> solution.keep_counts, solution.achieved, solution.dense
      ({'a': 24}, 290, 690)
    """
    if target.unit not in costs:
        raise UserError(
            f"there is no cost for a target in {target.unit}; pass one in costs, which "
            f"has {', '.join(costs) or 'none'}"
        )
    if max_evaluations <= _FIXED_EVALUATIONS:
        raise UserError(
            f"max_evaluations={max_evaluations} leaves nothing to search with; allow "
            f"at least {_FIXED_EVALUATIONS + 1}"
        )
    family = (
        uniform_family(limits)
        if scores is None
        else ranked_family(limits, scores, previous)
    )
    num_members = min(len(family), 1 + 2 ** (max_evaluations - _FIXED_EVALUATIONS))
    members = np.linspace(0, len(family) - 1, num_members).round().astype(int)
    cost = Memoised(costs[target.unit])
    seen: dict[int, float] = {}

    def reached(index: int) -> float:
        seen[index] = cost(family.counts(members[index]))
        return seen[index]

    dense = cost(limits.sizes)
    asked = target.limit(dense)
    # Absorbs what binary floats do to shares such as 1 - 0.7.
    best = _largest_within(asked * (1 + 1e-12), reached, num_members)
    if best is None:
        raise UserError(
            f"at most {asked:,.6g} of {dense:,.6g} {_NOUNS[target.unit]} are out of "
            f"reach: {seen[0]:,.6g} ({seen[0] / dense:.4g} of the dense network) "
            "remain with the least that every group keeps and all that belongs to "
            "none; ask for no less, lower round_to or multiples, exclude fewer groups, "
            "or let groups lose more"
        )
    in_order = [seen[index] for index in sorted(seen)]
    keep_counts = family.counts(members[best])
    return Solution(
        keep_counts=keep_counts,
        target=target,
        dense=dense,
        asked=asked,
        achieved=seen[best],
        density=sum(keep_counts.values()) / max(1, sum(limits.sizes.values())),
        evaluations=len(cost.known),
        is_monotone=in_order == sorted(in_order),
    )


def _largest_within(
    limit: float, reached: Callable[[int], float], length: int
) -> int | None:
    """Index of the largest member that reaches at most a limit; None if none does."""
    within, above = 0, length - 1
    if reached(within) > limit:
        return None
    if reached(above) <= limit:
        return above
    while above - within > 1:
        middle = (within + above) // 2
        if reached(middle) <= limit:
            within = middle
        else:
            above = middle
    return within


def limits_of(
    config: SparsityConfig, sizes: Mapping[str, int], inner: Collection[str] = ()
) -> CountLimits:
    """What settings say of kept counts, whatever the density.

    Args:
      config: Rounding and exclusions; `max_group_sparsity`, the most that a group may
        lose; and `scope`, which leaves groups whole that are not inside of a block.
      sizes: Channels of every group.
      inner: Names of the groups that are; see `ChannelGroup.is_inner`.
    Raises:
      UserError: The scope is "inner", and no group is; or a row of `multiples` that
        cannot be read.
    Example:
      >>> config = SparsityConfig(max_group_sparsity=0.75, scope='inner')
      >>> limits_of(config, {'stem': 16, 'blocks/0': 32}, inner={'blocks/0'}).least
      {'stem': 16, 'blocks/0': 8}
    """
    if config.scope == "inner" and not inner:
        raise UserError(
            "sparsity.scope = 'inner' leaves nothing to prune: shortcuts add up the "
            f"channels of all {len(sizes)} groups of this network; set it to 'all'"
        )
    share = 1.0 - config.max_group_sparsity
    least = {n: max(0, math.ceil(share * s - ROUNDING_SLACK)) for n, s in sizes.items()}
    if config.scope == "inner":
        least = {n: least[n] if n in inner else size for n, size in sizes.items()}
    multiples = read_multiples(config.multiples)
    return CountLimits(sizes, config.round_to, config.exclude, multiples, least)


@dataclasses.dataclass(frozen=True, eq=False)
class Budget:
    """What a run keeps, stage by stage, in the unit of its settings.

    Example:
      >>> config = SparsityConfig()
      >>> limits = limits_of(config, {'a': 64, 'b': 16})
      >>> Budget(config, limits).keep_counts_at(0.5)
      {'a': 32, 'b': 8}
    """

    config: SparsityConfig  # Settings; `unit` says what `sparsity` is a share of.
    limits: CountLimits  # From the settings, by `limits_of`.
    # By unit; that of `config.unit`, unless it is channels.
    costs: Mapping[str, Cost] = dataclasses.field(default_factory=dict)

    def keep_counts_at(
        self,
        density: float,
        scores: Mapping[str, np.ndarray] | None = None,
        previous: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Kept channels of every group at one stage.

        In channels, counts are rounded to the nearest; in other units they are the
        largest within the share.

        Args:
          density: Share that is kept, of what `config.unit` counts.
          scores: Of the criterion, float[size] per group, the same on every host;
            needed for a global budget.
          previous: Counts of the stage before, which a global budget never exceeds.
        Raises:
          UserError: The share is out of reach.
        """
        config, ranked = self.config, None
        if config.budget == "global" and scores is not None:
            ranked = self._comparable(scores)
        if density == 1.0 or (config.unit == "channels" and ranked is None):
            return uniform_keep_counts(self.limits, density)
        if config.unit == "channels" and ranked is not None:
            return global_keep_counts(self.limits, density, ranked, previous)
        target = Target(config.unit, keep=density)
        try:
            solution = solve_keep_counts(
                target, self.costs, self.limits, scores=ranked, previous=previous
            )
        except UserError as error:
            raise UserError(f"{_asked_by(config)}: {error}") from error
        return dict(solution.keep_counts)

    def rounding(self, keep_counts: KeepCounts) -> str:
        """What is to be said of counts that are far from the share that was asked for.

        Args:
          keep_counts: Kept channels of every group at the end.
        Returns:
          A line for people; "" where the share is met within two points, and is not
          rounded to nothing.
        Example:
          >>> config = SparsityConfig(sparsity=0.3)
          >>> budget = Budget(config, limits_of(config, {'a': 64}))
          >>> budget.rounding(budget.keep_counts_at(0.7))
          '25.0% of the channels will be removed and sparsity.sparsity=0.3 asks for \
30.0%: kept counts are multiples of sparsity.round_to=8'
        """
        config, limits = self.config, self.limits
        if config.budget == "global":  # Scores decide, over all groups together.
            return ""
        if config.unit == "channels":
            open_groups = limits.open_groups
            kept = float(sum(keep_counts[name] for name in open_groups))
            dense = float(sum(limits.sizes[name] for name in open_groups))
        else:
            cost = self.costs[config.unit]
            kept, dense = cost(keep_counts), cost(limits.sizes)
        removed = 1 - kept / dense if dense else 0.0
        is_nothing = removed == 0 and config.sparsity > 0
        if abs(removed - config.sparsity) <= _ROUNDED and not is_nothing:
            return ""
        return (
            f"{removed:.1%} of the {_NOUNS[config.unit]} will be removed and "
            f"sparsity.sparsity={config.sparsity:g} asks for {config.sparsity:.1%}: "
            f"kept counts are multiples of sparsity.round_to={config.round_to}"
            f"{' and of sparsity.multiples' if config.multiples else ''}"
        )

    def _comparable(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        damage = estimates_damage(self.config.criterion)
        return comparable_scores(scores, self._channel_costs if damage else None)

    @functools.cached_property
    def _channel_costs(self) -> Mapping[str, float]:
        return channel_costs(self.limits, self.costs.get(self.config.unit))


def comparable_scores(
    scores: Mapping[str, np.ndarray], costs: Mapping[str, float] | None
) -> dict[str, np.ndarray]:
    """Scores that rank the channels of all groups.

    Args:
      scores: float[size] per group.
      costs: What one channel of every group costs, where scores say what the loss
        loses without it; None divides them by their mean in the group.
    Returns:
      float[size] per group, whose mean is about 1.
    Example:
      >>> scores = {'a': np.array([1.0, 3.0]), 'b': np.array([2.0, 2.0])}
      >>> comparable_scores(scores, {'a': 1.0, 'b': 2.0})['b'].tolist()
      [0.6666666666666666, 0.6666666666666666]
    """
    if costs is None:
        raw = {name: jnp.asarray(score) for name, score in scores.items()}
        return {name: np.asarray(s) for name, s in normalise_scores(raw).items()}
    per_cost = {
        name: np.asarray(score, np.float64) / costs[name]
        for name, score in scores.items()
    }
    every = np.concatenate(list(per_cost.values()))
    mean = np.mean(every, where=np.isfinite(every)) or 1.0
    return {name: score / mean for name, score in per_cost.items()}


def channel_costs(limits: CountLimits, cost: Cost | None) -> dict[str, float]:
    """What one channel of every group costs, where nothing else was removed.

    Args:
      limits: Sizes of the groups, and by how much their counts move.
      cost: Of kept counts; None counts channels.
    Example:
      >>> limits = CountLimits({'a': 16, 'b': 8})
      >>> channel_costs(limits, lambda counts: 5 * counts['a'] + counts['b'])
      {'a': 5.0, 'b': 1.0}
    """
    if cost is None:
        return dict.fromkeys(limits.sizes, 1.0)
    dense, found = cost(limits.sizes), dict[str, float]()
    for name, size in limits.sizes.items():
        fewer = min(limits.quanta[name], size - 1)
        saved = dense - cost({**limits.sizes, name: size - fewer}) if fewer else 0.0
        # What saves nothing is removed last.
        found[name] = max(saved, dense * 1e-12) / max(fewer, 1)
    return found


def _asked_by(config: SparsityConfig) -> str:
    """The settings that ask for a share, and those of them that limit it."""
    text = (
        f"config.sparsity.sparsity={config.sparsity:g} of "
        f"config.sparsity.unit={config.unit!r}"
    )
    limits = []
    if config.max_group_sparsity < 1.0:
        limits.append(f"max_group_sparsity={config.max_group_sparsity:g}")
    if config.scope != "all":
        limits.append(f"scope={config.scope!r}")
    with_limits = " and ".join(f"config.sparsity.{limit}" for limit in limits)
    return f"{text} with {with_limits}" if limits else text
