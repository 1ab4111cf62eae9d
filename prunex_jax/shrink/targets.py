"""Kept channels for a target in the user's unit: work, size, bytes or time.

A `CountFamily` lists the kept counts that one rule can give, each inside the next; a
cost from `cost` says what a set of counts costs; `solve_keep_counts` finds the
largest that costs no more than the target. A run asks its `Budget` once per stair.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.channels import ChannelTrace
from prunex_jax.shrink.cost import Cost, Memoised, macs_cost, size_costs
from prunex_jax.sparsity import (
    CountFamily,
    keep_counts_at,
    least_counts,
    normalise_scores,
    ranked_family,
    read_multiples,
    uniform_family,
)
from prunex_jax.sparsity.settings import SparsityConfig

if TYPE_CHECKING:
    from prunex_jax.models import Model

Unit = Literal["channels", "params", "macs", "bytes", "latency"]
_NOUNS = {
    "channels": "channels",
    "params": "parameters",
    "macs": "multiply-accumulates",
    "bytes": "bytes per exchange",
    "latency": "seconds per call",
}
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


def solve_keep_counts(
    target: Target,
    costs: Mapping[str, Cost],
    sizes: Mapping[str, int],
    *,
    scores: Mapping[str, np.ndarray] | None = None,
    previous: Mapping[str, int] | None = None,
    round_to: int = 8,
    exclude: Sequence[str] = (),
    multiples: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
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
        `size_costs`, `macs_cost` and `latency_cost`.
      sizes: Number of channels per group.
      scores: float[size] per group, comparable between groups (`normalise_scores`);
        None gives every group the same density.
      previous: With scores, counts that may not be exceeded, those of the stair before.
      round_to: Counts are multiples of this, or of less where a group is small.
      exclude: Groups whose name contains one of these stay dense.
      multiples: Other multiples for some groups, as wildcards of their names and least
        sizes: `{'blocks/*': 64, '*>=512': 128}`. A group of at least its multiple keeps
        a multiple of it, or all; see `sparsity.quanta_of`.
      least: Counts below which some groups do not go; see `sparsity.least_counts`.
      max_evaluations: Bound on the sets of counts that are evaluated, and so on
        compilations where latency is measured. Where the family is too long for it,
        evenly spaced members are searched.
    Returns:
      The counts and what they reach.
    Raises:
      UserError: No cost for the unit, a target below what the least counts cost (of
        every group one multiple of channels, or what it may not lose, and everything
        that belongs to no group), or a row of `multiples` that names no group.
    Example:
      >>> params = lambda counts: 10 * counts['a'] + 50
      >>> target = Target('params', keep=0.5)
      >>> solution = solve_keep_counts(target, {'params': params}, {'a': 64})
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
    limits: dict[str, Any] = {
        "round_to": round_to,
        "exclude": exclude,
        "multiples": multiples,
        "least": least,
    }
    family = (
        uniform_family(sizes, **limits)
        if scores is None
        else ranked_family(scores, previous=previous, **limits)
    )
    family = family.thinned(1 + 2 ** min(max_evaluations - _FIXED_EVALUATIONS, 40))
    cost = Memoised(costs[target.unit])
    seen: dict[int, float] = {}

    def reached(index: int) -> float:
        seen[index] = cost(family.counts(index))
        return seen[index]

    dense = cost(sizes)
    asked = target.limit(dense)
    best = _largest_within(asked, reached, family, target, dense)
    in_order = [seen[index] for index in sorted(seen)]
    keep_counts = family.counts(best)
    return Solution(
        keep_counts=keep_counts,
        target=target,
        dense=dense,
        asked=asked,
        achieved=seen[best],
        density=sum(keep_counts.values()) / max(1, sum(sizes.values())),
        evaluations=len(cost.known),
        is_monotone=in_order == sorted(in_order),
    )


def _largest_within(
    asked: float,
    reached: Callable[[int], float],
    family: CountFamily,
    target: Target,
    dense: float,
) -> int:
    """Index of the largest member that costs at most `asked`."""
    # Absorbs what binary floats do to shares such as 1 - 0.7.
    limit = asked * (1 + 1e-12)
    within, above = 0, len(family) - 1
    least = reached(within)
    if least > limit:
        noun = _NOUNS[target.unit]
        raise UserError(
            f"at most {asked:,.6g} of {dense:,.6g} {noun} are out of reach: "
            f"{least:,.6g} ({least / dense:.4g} of the dense network) remain with the "
            "least that every group keeps and all that belongs to none; ask for no "
            "less, lower round_to or multiples, exclude fewer groups, or let groups "
            "lose more"
        )
    if reached(above) <= limit:
        return above
    while above - within > 1:
        middle = (within + above) // 2
        if reached(middle) <= limit:
            within = middle
        else:
            above = middle
    return within


@dataclasses.dataclass(frozen=True, eq=False)
class Budget:
    """What a run keeps, stage by stage, in the unit of its settings."""

    config: SparsityConfig  # Settings; `unit` says what `sparsity` is a share of.
    sizes: Mapping[str, int]  # Channels of every group.
    costs: Mapping[str, Cost]  # By unit; that of `config.unit`, unless it is channels.
    # Channels that groups keep in any case.
    least: Mapping[str, int] = dataclasses.field(default_factory=dict)

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
            raw = {name: jnp.asarray(score) for name, score in scores.items()}
            ranked = {n: np.asarray(s) for n, s in normalise_scores(raw).items()}
        if config.unit == "channels" or density == 1.0:
            return keep_counts_at(
                config, self.sizes, density, ranked, previous, self.least
            )
        try:
            solution = solve_keep_counts(
                Target(config.unit, keep=density),
                self.costs,
                self.sizes,
                scores=ranked,
                previous=previous,
                round_to=config.round_to,
                exclude=config.exclude,
                multiples=read_multiples(config.multiples),
                least=self.least,
            )
        except UserError as error:
            raise UserError(f"{_asked_by(config)}: {error}") from error
        return dict(solution.keep_counts)


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


def model_budget(config: SparsityConfig, model: "Model", trace: ChannelTrace) -> Budget:
    """The budget of a run with one of our models."""
    costs = size_costs(trace)
    if config.unit == "macs":
        params, statistics = jax.eval_shape(model.init, jax.random.key(0))
        costs["macs"] = macs_cost(
            model.apply, trace, params, model.example(), statistics=statistics
        )
    sizes = {group.name: group.size for group in trace.groups}
    inner = {group.name for group in trace.groups if group.is_inner}
    return Budget(config, sizes, costs, least_counts(config, sizes, inner))
