"""Which kept counts the groups of a network may have, and which a density names.

Counts are plain Python integers, computed on the host: each distinct set of counts is a
compiled shape. Which channels fill the counts is decided by `choice`.

A density names one set of counts. A `CountFamily` lists all the sets that one rule can
give, each inside the next, so that whatever grows with the counts (parameters, work,
bytes) grows along the family and a binary search finds what fits; see `targets`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.sparsity.quanta import quanta_of

# Absorbs what binary floats do to densities such as 1 - 0.7.
ROUNDING_SLACK = 1e-9
# A ranking leaves every group this share of its channels, rounded like every count, so
# that no layer vanishes because its scores happen to be small.
_FLOOR_SHARE = 1 / 8
_MAX_NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True, eq=False)
class CountLimits:
    """What kept counts may be, whatever the density: multiples, and not too few.

    Attributes:
      sizes: Number of channels per group.
      round_to: Counts are multiples of this, or of less where a group is small; see
        `quanta_of`. Always at least one multiple, at most the group.
      exclude: Groups whose name contains one of these stay dense.
      multiples: Other multiples for some groups, as wildcards of their names and least
        sizes: `{'blocks/*': 64, '*>=512': 128}`; see `quanta_of`.
      least: Counts below which some groups do not go, rounded up to their multiples;
        see `limits_of`.
    Raises:
      UserError: What `quanta_of` refuses, when counts are asked for.
    Example:
      >>> CountLimits({'stem': 16, 'body': 64}, least={'body': 20}).floors
      {'stem': 2, 'body': 24}
    """

    sizes: Mapping[str, int]
    round_to: int = 8
    exclude: Sequence[str] = ()
    multiples: Mapping[str, int] | None = None
    least: Mapping[str, int] | None = None

    @functools.cached_property
    def quanta(self) -> Mapping[str, int]:
        """The step in which the count of every group moves."""
        return quanta_of(self.sizes, self.round_to, self.multiples)

    def in_order_of(self, names: Iterable[str]) -> "CountLimits":
        """The same in another order of groups, which decides among equals."""
        return dataclasses.replace(self, sizes={n: self.sizes[n] for n in names})

    @functools.cached_property
    def open_groups(self) -> Sequence[str]:
        """Groups that may lose channels, in order."""
        least = self.least or {}
        return [
            name
            for name, size in self.sizes.items()
            if least.get(name, 0) < size and not any(x in name for x in self.exclude)
        ]

    @functools.cached_property
    def floors(self) -> Mapping[str, int]:
        """The fewest channels of every group: a multiple of its quantum, or all."""
        floors, least = dict(self.sizes), self.least or {}
        for name in self.open_groups:
            quantum = self.quanta[name]
            multiple = max(1, math.ceil(least.get(name, 1) / quantum))
            floors[name] = min(floors[name], quantum * multiple)
        return floors


def check_excludes(exclude: Sequence[str], names: Iterable[str]) -> None:
    """Refuses exclude patterns that match no channel group.

    A misspelt pattern would otherwise prune exactly what was to be protected.

    Args:
      exclude: Patterns; each has to be part of at least one name.
      names: Names of all channel groups.
    Raises:
      UserError: A pattern matches nothing; the closest name is suggested.
    """
    names = sorted(names)
    words = dict.fromkeys([*names, *(w for name in names for w in name.split("/"))])
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = ", ..." if len(names) > _MAX_NAMES_SHOWN else ""
    for pattern in exclude:
        if not any(pattern in name for name in names):
            hint = suggest(pattern, words) or f"; channel groups: {shown}{more}"
            raise UserError(
                f"sparsity.exclude = {pattern!r} matches no channel group{hint}"
            )


def uniform_keep_counts(limits: CountLimits, density: float) -> dict[str, int]:
    """Gives every group the same density, to the nearest count, ties upwards.

    Counts never grow when the density falls.

    Args:
      limits: Sizes of the groups, and what their counts may be.
      density: Share of the channels that is kept, in (0, 1]; 1 keeps all exactly.
    Returns:
      Kept count per group, in [1, size].
    Raises:
      UserError: Density outside (0, 1], or what `quanta_of` refuses.
    Example:
      >>> limits = CountLimits({'stem': 16, 'body': 64, 'tiny': 3})
      >>> uniform_keep_counts(limits, 0.3)
      {'stem': 4, 'body': 16, 'tiny': 1}
    """
    _check_density(density)
    return {
        name: max(floor, _round_count(limits.sizes[name], density, limits.quanta[name]))
        for name, floor in limits.floors.items()
    }


def _round_count(size: int, density: float, quantum: int) -> int:
    """The nearest multiple of a quantum, ties upwards; 0 where that is nearest."""
    if density == 1.0:
        return size
    multiple = math.floor(density * size / quantum + 0.5 + ROUNDING_SLACK)
    return min(size, quantum * multiple)


def _check_density(density: float) -> None:
    if not 0.0 < density <= 1.0:  # Written so that NaN fails too.
        raise UserError(
            f"density {density:g} is outside (0, 1]; it is the share of the channels "
            "that is kept, 1 keeps all"
        )


def global_keep_counts(
    limits: CountLimits,
    density: float,
    scores: Mapping[str, np.ndarray],
    previous: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Gives channels to the groups that need them, at the same total density.

    The problem:

        maximise    sum over groups of their K_g largest scores
        subject to  sum of K_g as near as possible to density * number of channels,
                    K_g a multiple of the quantum of its group (or the whole group),
                    floor_g <= K_g <= previous_g

    Solved exactly, by dynamic programming over the total. Without the rounding it is
    what a threshold on all scores gives. Among equal scores, equal shares win. The
    floor is 1/8 of the group, or the density where that is lower, and what the limits
    say.

    Runs in numpy on the host. Every host must pass the same numbers.

    Args:
      limits: Sizes of the groups, and what their counts may be.
      density: Share of the channels of all groups together that is kept, those aside
        that are excluded or keep all, in (0, 1]; 1 keeps all exactly.
      scores: float[size] per group, comparable between groups; see `normalise_scores`.
        NaN counts as 0, infinity as the largest finite score. Among equals, their order
        decides.
      previous: Counts that may not be exceeded, those of the stair before, so that no
        group needs a channel that is dead already. None means the sizes.
    Returns:
      Kept count per group, in [1, size].
    Raises:
      UserError: Density outside (0, 1], what `quanta_of` refuses, or a group missing
        from `previous`.
    Example:
      >>> scores = {'a': np.linspace(3, 2, 16), 'b': np.linspace(1, 0.1, 16)}
      >>> global_keep_counts(CountLimits({'a': 16, 'b': 16}), 0.5, scores)
      {'a': 14, 'b': 2}
    """
    _check_density(density)
    limits = limits.in_order_of(scores)
    sizes, names = limits.sizes, limits.open_groups
    ceilings = _ceilings_of(sizes, previous)
    floors = uniform_keep_counts(limits, min(_FLOOR_SHARE, density))
    if density == 1.0 or not names:
        return {**sizes, **{name: ceilings[name] for name in names}}
    options = [
        _admissible(sizes[n], ceilings[n], floors[n], limits.quanta[n]) for n in names
    ]
    finite = _finite_scores(scores)
    values = [_kept_values(finite[n], o) for n, o in zip(names, options, strict=True)]
    target = density * sum(sizes[name] for name in names)
    chosen = _best_counts(options, values, target)
    return {**sizes, **dict(zip(names, chosen, strict=True))}


def _admissible(size: int, ceiling: int, floor: int, quantum: int) -> np.ndarray:
    """All counts that one group may have, rising."""
    counts = np.arange(min(ceiling, floor), ceiling + 1, quantum)
    # Whole groups need not be a multiple of their quantum.
    return np.union1d(counts, [size]) if ceiling == size else counts


def _ceilings_of(
    sizes: Mapping[str, int], previous: Mapping[str, int] | None
) -> Mapping[str, int]:
    """The most that each group may keep: what it kept before, or all."""
    if previous is None:
        return sizes
    missing = sorted(set(sizes) - set(previous))
    if missing:
        raise UserError(
            f"previous has no count for channel group {missing[0]!r}; pass the counts "
            "of the stair before, or None"
        )
    return {name: min(size, previous[name]) for name, size in sizes.items()}


def _kept_values(score: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sum of the largest scores for each count."""
    sums = np.cumsum(np.sort(score)[::-1])[counts - 1]
    # Far below any difference that matters; makes equal scores share equally.
    return sums - 1e-9 * max(1.0, float(score.mean())) * counts**2 / len(score)


def _finite_scores(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Puts NaN last and infinity beside the best, without spoiling sums."""
    wide = {name: np.asarray(score, np.float64) for name, score in scores.items()}
    best = max(
        float(np.max(s, initial=1.0, where=np.isfinite(s))) for s in wide.values()
    )
    return {
        name: np.nan_to_num(score, nan=0.0, posinf=best) for name, score in wide.items()
    }


def _best_counts(
    options: Sequence[np.ndarray], values: Sequence[np.ndarray], target: float
) -> list[int]:
    """Picks one option per group: total nearest to the target, then highest value."""
    unit = int(np.gcd.reduce(np.concatenate(options)))
    best = np.zeros(1)
    picks = []
    for counts, value in zip(options, values, strict=True):
        shifts = counts // unit
        size = len(best) + int(shifts[-1])
        reached, pick = np.full(size, -np.inf), np.zeros(size, np.int32)
        for i, shift in enumerate(shifts):
            part = slice(int(shift), int(shift) + len(best))
            candidate = best + value[i]
            is_better = candidate > reached[part]
            reached[part] = np.where(is_better, candidate, reached[part])
            pick[part] = np.where(is_better, i, pick[part])
        best = reached
        picks.append(pick)
    # From above, so that ties round upwards as they do in `uniform_keep_counts`.
    totals = np.flatnonzero(best > -np.inf)[::-1]
    total = int(totals[np.argmin(np.abs(totals * unit - target))])
    chosen = []
    for counts, pick in zip(reversed(options), reversed(picks), strict=True):
        count = int(counts[pick[total]])
        chosen.append(count)
        total -= count // unit
    return chosen[::-1]


@dataclasses.dataclass(frozen=True, eq=False)
class CountFamily:
    """Sets of kept counts, from least to most; every group grows or stays.

    Attributes:
      start: The least counts, by group.
      steps: (group, its count from here on), in the order in which groups grow.
    """

    start: Mapping[str, int]
    steps: Sequence[tuple[str, int]]

    def __len__(self) -> int:
        """Number of members."""
        return len(self.steps) + 1

    def counts(self, index: int) -> dict[str, int]:
        """Kept count per group after so many steps."""
        return {**self.start, **dict(self.steps[:index])}


def uniform_family(limits: CountLimits) -> CountFamily:
    """Lists counts of one density in every group, to rounding, over all densities.

    Groups that grow at the same density do so one by one, in the given order, so that
    members lie close together.

    Example:
      >>> family = uniform_family(CountLimits({'a': 16, 'b': 4}))
      >>> [family.counts(i) for i in (0, 1, 2, len(family) - 1)]
      [{'a': 2, 'b': 1}, {'a': 4, 'b': 1}, {'a': 6, 'b': 1}, {'a': 16, 'b': 4}]
    """
    return CountFamily(limits.floors, _uniform_steps(limits))


def ranked_family(
    limits: CountLimits,
    scores: Mapping[str, np.ndarray],
    previous: Mapping[str, int] | None = None,
) -> CountFamily:
    """Lists the counts that a falling threshold on all scores gives.

    Each group's channels are ranked and taken in blocks of its quantum; the blocks of
    all groups are ranked by their mean score. Up to 1/8 of a group its density is
    uniform, so that no layer vanishes because its scores are small. Arguments are those
    of `global_keep_counts`, which fits a number of channels better where groups have
    several quanta, but whose counts are not always inside each other.

    Example:
      >>> scores = {'a': np.linspace(3, 2, 16), 'b': np.linspace(1, 0.1, 16)}
      >>> family = ranked_family(CountLimits({'a': 16, 'b': 16}), scores)
      >>> [family.counts(i) for i in (0, 1, 7, 8)]
      [{'a': 2, 'b': 2}, {'a': 4, 'b': 2}, {'a': 16, 'b': 2}, {'a': 16, 'b': 4}]
    """
    limits = limits.in_order_of(scores)
    floors = uniform_keep_counts(limits, _FLOOR_SHARE)
    steps = [(n, count) for n, count in _uniform_steps(limits) if count <= floors[n]]
    steps += _ranked_steps(limits, floors, scores)
    ceilings = _ceilings_of(limits.sizes, previous)
    start = {name: min(n, ceilings[name]) for name, n in limits.floors.items()}
    return CountFamily(start, [(name, n) for name, n in steps if n <= ceilings[name]])


def _uniform_steps(limits: CountLimits) -> list[tuple[str, int]]:
    """How groups grow from their floors while the density rises."""
    events = []
    for name, size in limits.sizes.items():
        floor, quantum = limits.floors[name], limits.quanta[name]
        counts = _counts_above(floor, size, quantum)
        for number, count in enumerate(counts, floor // quantum + 1):
            # Counts are rounded to the nearest multiple; see `uniform_keep_counts`.
            events.append((min(1.0, (number - 0.5) * quantum / size), name, count))
    events.sort(key=lambda event: event[0])
    return [(name, count) for _, name, count in events]


def _counts_above(floor: int, size: int, quantum: int) -> list[int]:
    """Counts between a floor and the whole group, rising; the last is the group."""
    return [*range(floor + quantum, size, quantum), size] if floor < size else []


def _ranked_steps(
    limits: CountLimits,
    floors: Mapping[str, int],
    scores: Mapping[str, np.ndarray],
) -> list[tuple[str, int]]:
    """How groups grow from their floors to their sizes, best block first."""
    finite = _finite_scores(scores)
    best = max((float(score.max(initial=0.0)) for score in finite.values()), default=0)
    blocks = []
    for name, size in limits.sizes.items():
        ranked = np.sort(finite[name])[::-1]
        counts = _counts_above(floors[name], size, limits.quanta[name])
        below = [floors[name], *counts][:-1]
        means = [ranked[a:b].mean() for a, b in zip(below, counts, strict=True)]
        # Coarser than the rounding of means, so that equal scores share equally.
        ranks = np.round(np.array(means) / (best or 1.0), 12)
        for rank, count in zip(ranks, counts, strict=True):
            blocks.append((-rank, count / size, name, count))
    blocks.sort(key=lambda block: block[:2])
    return [(name, count) for _, _, name, count in blocks]
