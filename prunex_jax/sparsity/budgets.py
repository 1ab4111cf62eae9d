"""Turns a density, or any cost, into a number of kept channels per group.

Counts are plain Python integers, computed on the host: each distinct set of counts is a
compiled shape. Which channels fill the counts is decided by `choice`.

A density names one set of counts. A `CountFamily` lists all the sets that one rule can
give, each inside the next, so that whatever grows with the counts (parameters, work,
bytes) grows along the family and a binary search finds what fits.
"""

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity.quanta import quanta_of, read_multiples
from prunex_jax.sparsity.settings import SparsityConfig

# Absorbs what binary floats do to densities such as 1 - 0.7.
_ROUNDING_SLACK = 1e-9
_MAX_NAMES_SHOWN = 5


def _round_count(size: int, density: float, quantum: int) -> int:
    """Kept count of one group: the nearest multiple of its quantum, ties upwards."""
    if density == 1.0:
        return size
    multiple = math.floor(density * size / quantum + 0.5 + _ROUNDING_SLACK)
    return min(size, quantum * max(1, multiple))


def uniform_keep_counts(
    sizes: Mapping[str, int],
    density: float,
    round_to: int = 8,
    exclude: Sequence[str] = (),
    multiples: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Gives every group the same density, to rounding.

    Counts never grow when the density falls.

    Args:
      sizes: Number of channels per group.
      density: Share of the channels that is kept, in (0, 1]; 1 keeps all exactly.
      round_to: Counts are multiples of this, or of less where a group is small; see
        `quanta_of`. Always at least one multiple, at most the group.
      exclude: Groups whose name contains one of these stay dense.
      multiples: Other multiples for some groups, such as `{'*>=512': 128}`; see
        `quanta_of`.
      least: Counts below which some groups do not go, rounded up to their multiples;
        see `least_counts`.
    Returns:
      Kept count per group, in [1, size].
    Raises:
      UserError: Density outside (0, 1], or what `quanta_of` refuses.
    Example:
      >>> uniform_keep_counts({'stem': 16, 'body': 64, 'tiny': 3}, 0.3)
      {'stem': 4, 'body': 16, 'tiny': 1}
    """
    _check_density(density)
    quanta = quanta_of(sizes, round_to, multiples)
    floors = _floors(sizes, quanta, exclude, least)
    return {
        name: max(floors[name], _round_count(size, density, quanta[name]))
        for name, size in sizes.items()
    }


def _floors(
    sizes: Mapping[str, int],
    quanta: Mapping[str, int],
    exclude: Sequence[str],
    least: Mapping[str, int] | None,
) -> dict[str, int]:
    """The fewest channels of every group: a multiple of its quantum, or all."""
    floors = {}
    for name, size in sizes.items():
        count = (least or {}).get(name, 1)
        multiple = max(1, math.ceil(count / quanta[name]))
        is_whole = _is_excluded(name, exclude)
        floors[name] = size if is_whole else min(size, quanta[name] * multiple)
    return floors


def global_keep_counts(
    scores: Mapping[str, np.ndarray],
    density: float,
    round_to: int = 8,
    exclude: Sequence[str] = (),
    floor_share: float = 1 / 8,
    previous: Mapping[str, int] | None = None,
    multiples: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Gives channels to the groups that need them, at the same total density.

    The problem:

        maximise    sum over groups of their K_g largest scores
        subject to  sum of K_g as near as possible to density * number of channels,
                    K_g a multiple of the quantum of its group (or the whole group),
                    floor_g <= K_g <= previous_g

    Solved exactly, by dynamic programming over the total. Without the rounding it is
    what a threshold on all scores gives. Among equal scores, equal shares win. The
    floor keeps a layer from vanishing because its scores happen to be small: it is
    `floor_share` of the group, rounded like every count, or the density where that is
    lower; and what `least` says.

    Runs in numpy on the host. Every host must pass the same numbers.

    Args:
      scores: float[size] per group, comparable between groups; see `normalise_scores`.
        NaN counts as 0, infinity as the largest finite score.
      density: Share of the channels of all groups together that is kept, those aside
        that are excluded or keep all, in (0, 1]; 1 keeps all exactly.
      round_to: See `uniform_keep_counts`.
      exclude: Groups whose name contains one of these stay dense.
      floor_share: Least share of a group that stays, in (0, 1].
      previous: Counts that may not be exceeded, those of the stair before, so that no
        group needs a channel that is dead already. None means the sizes.
      multiples: See `uniform_keep_counts`.
      least: See `uniform_keep_counts`.
    Returns:
      Kept count per group, in [1, size], in the order of `scores`.
    Raises:
      UserError: Density or `floor_share` outside (0, 1], what `quanta_of` refuses, or a
        group missing from `previous`.
    Example:
      >>> strong, weak = np.linspace(3, 2, 16), np.linspace(1, 0.1, 16)
      >>> global_keep_counts({'a': strong, 'b': weak}, 0.5)
      {'a': 14, 'b': 2}
    """
    _check_density(density)
    if not 0.0 < floor_share <= 1.0:
        raise UserError(f"floor_share {floor_share:g} is outside (0, 1]")
    sizes = {name: len(score) for name, score in scores.items()}
    quanta = quanta_of(sizes, round_to, multiples)
    ceilings = _ceilings_of(sizes, previous)
    ranked = [
        name
        for name, size in sizes.items()
        if not _is_excluded(name, exclude) and (least or {}).get(name, 0) < size
    ]
    if density == 1.0 or not ranked:
        return {n: ceilings[n] if n in ranked else sizes[n] for n in sizes}
    floors = uniform_keep_counts(
        sizes, min(floor_share, density), round_to, exclude, multiples, least
    )
    options = [_admissible(sizes[n], ceilings[n], floors[n], quanta[n]) for n in ranked]
    finite = _finite_scores(scores)
    values = [
        _kept_values(finite[n], counts)
        for n, counts in zip(ranked, options, strict=True)
    ]
    target = density * sum(sizes[n] for n in ranked)
    chosen = dict(zip(ranked, _best_counts(options, values, target), strict=True))
    return {name: chosen.get(name, size) for name, size in sizes.items()}


def _ceilings_of(
    sizes: Mapping[str, int], previous: Mapping[str, int] | None
) -> dict[str, int]:
    """The most that each group may keep: what it kept before, or all.

    Raises:
      UserError: A group is missing from `previous`.
    """
    if previous is None:
        return dict(sizes)
    missing = sorted(set(sizes) - set(previous))
    if missing:
        raise UserError(
            f"previous has no count for channel group {missing[0]!r}; pass the counts "
            "of the stair before, or None"
        )
    return {name: min(size, previous[name]) for name, size in sizes.items()}


def _admissible(size: int, ceiling: int, floor: int, quantum: int) -> np.ndarray:
    """All counts that one group may have, rising."""
    counts = np.arange(min(ceiling, floor), ceiling + 1, quantum)
    # Whole groups need not be a multiple of their quantum.
    return np.union1d(counts, [size]) if ceiling == size else counts


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


def keep_counts_at(
    config: SparsityConfig,
    sizes: Mapping[str, int],
    density: float,
    scores: Mapping[str, np.ndarray] | None = None,
    previous: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Kept channels of every group at one density.

    Args:
      config: Budget, rounding and exclusions.
      sizes: Channels of every group.
      density: Share that is kept.
      scores: Comparable between groups; needed for a global budget below density 1.
      previous: Counts of the stage before, which a global budget never exceeds.
      least: Channels that groups keep in any case, from `least_counts`.
    Returns:
      Group name -> static count.
    """
    rounding, exclude = config.round_to, config.exclude
    multiples = read_multiples(config.multiples)
    if config.budget == "global" and scores is not None and density < 1.0:
        return global_keep_counts(
            scores,
            density,
            rounding,
            exclude,
            previous=previous,
            multiples=multiples,
            least=least,
        )
    return uniform_keep_counts(sizes, density, rounding, exclude, multiples, least)


def least_counts(
    config: SparsityConfig, sizes: Mapping[str, int], inner: Collection[str]
) -> dict[str, int]:
    """Channels that every group keeps whatever the budget.

    Args:
      config: `max_group_sparsity`, the most that a group may lose, and `scope`, which
        leaves groups whole that are not inside of a block.
      sizes: Channels of every group.
      inner: Names of the groups that are; see `ChannelGroup.is_inner`.
    Returns:
      Group name -> count; 0 where only the budget says.
    Raises:
      UserError: The scope is "inner", and no group is.
    Example:
      >>> config = SparsityConfig(max_group_sparsity=0.75, scope='inner')
      >>> least_counts(config, {'stem': 16, 'blocks/0': 32}, inner={'blocks/0'})
      {'stem': 16, 'blocks/0': 8}
    """
    share = 1.0 - config.max_group_sparsity
    least = {
        name: max(0, math.ceil(share * size - _ROUNDING_SLACK))
        for name, size in sizes.items()
    }
    if config.scope == "all":
        return least
    if not inner:
        raise UserError(
            "sparsity.scope = 'inner' leaves nothing to prune: shortcuts add up the "
            f"channels of all {len(sizes)} groups of this network; set it to 'all'"
        )
    return {
        name: least[name] if name in inner else size for name, size in sizes.items()
    }


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
    for pattern in exclude:
        if any(pattern in name for name in names):
            continue
        words = dict.fromkeys([*names, *(w for name in names for w in name.split("/"))])
        close = difflib.get_close_matches(pattern, list(words), n=1)
        if close:
            hint = f"did you mean {close[0]!r}?"
        else:
            more = ", ..." if len(names) > _MAX_NAMES_SHOWN else ""
            hint = "channel groups: " + ", ".join(names[:_MAX_NAMES_SHOWN]) + more
        raise UserError(
            f"sparsity.exclude = {pattern!r} matches no channel group; {hint}"
        )


def _is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether a channel group is left dense."""
    return any(pattern in name for pattern in exclude)


def _check_density(density: float) -> None:
    if not 0.0 < density <= 1.0:  # Written so that NaN fails too.
        raise UserError(
            f"density {density:g} is outside (0, 1]; it is the share of the channels "
            "that is kept, 1 keeps all"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class CountFamily:
    """Sets of kept counts, from least to most; every group grows or stays.

    Attributes:
      start: The least counts, by group.
      steps: (group, its count from here on), in the order in which groups grow.
      ends: Member i is what the first `ends[i]` steps make of `start`; rising.
    """

    start: Mapping[str, int]
    steps: tuple[tuple[str, int], ...]
    ends: Sequence[int]

    def __len__(self) -> int:
        """Number of members."""
        return len(self.ends)

    def counts(self, index: int) -> dict[str, int]:
        """Kept count per group of one member, counted from the least."""
        return {**self.start, **dict(self.steps[: self.ends[index]])}

    def thinned(self, largest: int) -> "CountFamily":
        """At most `largest` members, evenly chosen, the least and the most included."""
        if len(self) <= largest:
            return self
        chosen = np.linspace(0, len(self) - 1, max(largest, 2)).round().astype(int)
        return dataclasses.replace(self, ends=[self.ends[i] for i in chosen])


def uniform_family(
    sizes: Mapping[str, int],
    round_to: int = 8,
    exclude: Sequence[str] = (),
    multiples: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
) -> CountFamily:
    """Lists counts of one density in every group, to rounding, over all densities.

    All counts that `uniform_keep_counts` gives are members. Groups that grow at the
    same density do so one by one, in the given order, so that members lie close
    together also where all groups have the same number of steps.

    Args:
      sizes: Number of channels per group.
      round_to: See `uniform_keep_counts`.
      exclude: Groups whose name contains one of these stay dense.
      multiples: See `uniform_keep_counts`.
      least: See `uniform_keep_counts`.
    Returns:
      The family.
    Raises:
      UserError: What `quanta_of` refuses.
    Example:
      >>> family = uniform_family({'a': 16, 'b': 4})
      >>> [family.counts(i) for i in (0, 1, 2, len(family) - 1)]
      [{'a': 2, 'b': 1}, {'a': 4, 'b': 1}, {'a': 6, 'b': 1}, {'a': 16, 'b': 4}]
    """
    quanta = quanta_of(sizes, round_to, multiples)
    start = _floors(sizes, quanta, exclude, least)
    events = _uniform_events(sizes, quanta, start)
    return _family(start, [(name, count) for _, name, count in events])


def ranked_family(
    scores: Mapping[str, np.ndarray],
    round_to: int = 8,
    exclude: Sequence[str] = (),
    floor_share: float = 1 / 8,
    previous: Mapping[str, int] | None = None,
    multiples: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
) -> CountFamily:
    """Lists the counts that a falling threshold on all scores gives.

    Each group's channels are ranked and taken in blocks of its quantum; the blocks of
    all groups are ranked by their mean score. Up to `floor_share` of a group its
    density is uniform, so that no layer vanishes because its scores are small before
    all others are at their floor.

    Where all groups have one quantum this is what `global_keep_counts` chooses for the
    same number of channels. Where they have several, that function fits the number
    better and its counts are not always inside each other; these are.

    Args:
      scores: float[size] per group, comparable between groups (`normalise_scores`) and
        the same on every host. NaN counts as 0, infinity as the largest finite score.
      round_to: See `uniform_keep_counts`.
      exclude: Groups whose name contains one of these stay dense.
      floor_share: Share of a group that is kept before scores decide, in (0, 1].
      previous: Counts that may not be exceeded, those of the stair before.
      multiples: See `uniform_keep_counts`.
      least: See `uniform_keep_counts`.
    Returns:
      The family.
    Raises:
      UserError: `floor_share` outside (0, 1], what `quanta_of` refuses, or a group
        missing from `previous`.
    Example:
      >>> strong, weak = np.linspace(3, 2, 16), np.linspace(1, 0.1, 16)
      >>> family = ranked_family({'a': strong, 'b': weak})
      >>> [family.counts(i) for i in (0, 1, 7, 8)]
      [{'a': 2, 'b': 2}, {'a': 4, 'b': 2}, {'a': 16, 'b': 2}, {'a': 16, 'b': 4}]
    """
    if not 0.0 < floor_share <= 1.0:
        raise UserError(f"floor_share {floor_share:g} is outside (0, 1]")
    sizes = {name: len(score) for name, score in scores.items()}
    quanta = quanta_of(sizes, round_to, multiples)
    floors = uniform_keep_counts(
        sizes, floor_share, round_to, exclude, multiples, least
    )
    start = _floors(sizes, quanta, exclude, least)
    events = _uniform_events(sizes, quanta, start)
    steps = [(name, count) for _, name, count in events if count <= floors[name]]
    steps += _ranked_steps(scores, floors, quanta)
    ceilings = _ceilings_of(sizes, previous)
    start = {name: min(count, ceilings[name]) for name, count in start.items()}
    return _family(start, [(name, n) for name, n in steps if n <= ceilings[name]])


def _family(start: Mapping[str, int], steps: Sequence[tuple[str, int]]) -> CountFamily:
    return CountFamily(start, tuple(steps), range(len(steps) + 1))


def _uniform_events(
    sizes: Mapping[str, int], quanta: Mapping[str, int], start: Mapping[str, int]
) -> list[tuple[float, str, int]]:
    """(density, group, count) wherever a group grows from its start on, rising."""
    events = []
    for name, size in sizes.items():
        quantum = quanta[name]
        counts = _counts_above(start[name], size, quantum)
        for number, count in enumerate(counts, start[name] // quantum + 1):
            # Counts are rounded to the nearest multiple; see `uniform_keep_counts`.
            events.append((min(1.0, (number - 0.5) * quantum / size), name, count))
    return sorted(events, key=lambda event: event[0])


def _counts_above(floor: int, size: int, quantum: int) -> list[int]:
    """Counts between a floor and the whole group, rising; the last is the group."""
    return [*range(floor + quantum, size, quantum), size] if floor < size else []


def _ranked_steps(
    scores: Mapping[str, np.ndarray],
    floors: Mapping[str, int],
    quanta: Mapping[str, int],
) -> list[tuple[str, int]]:
    """How groups grow from their floors to their sizes, best block first."""
    finite = _finite_scores(scores)
    best = max((float(score.max(initial=0.0)) for score in finite.values()), default=0)
    blocks = []
    for name, score in finite.items():
        size, ranked = len(score), np.sort(score)[::-1]
        counts = _counts_above(floors[name], size, quanta[name])
        below = [floors[name], *counts][:-1]
        means = [ranked[a:b].mean() for a, b in zip(below, counts, strict=True)]
        # Coarser than the rounding of means, so that equal scores share equally.
        ranks = np.round(np.array(means) / (best or 1.0), 12)
        for rank, count in zip(ranks, counts, strict=True):
            blocks.append((-rank, count / size, name, count))
    blocks.sort(key=lambda block: block[:2])
    return [(name, count) for _, _, name, count in blocks]
