"""Orders kept counts from least to most, so that any cost of them can be searched.

A density names one set of counts. A family lists all the sets that one rule can give,
each inside the next, so that whatever grows with the counts (parameters, work, bytes)
grows along the family and a binary search finds what fits. It sits beside `budgets`,
whose counts the uniform family repeats; what is searched for is up to `targets`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity.budgets import (
    ceilings_of,
    finite_scores,
    quantum_of,
    uniform_keep_counts,
)
from prunex_jax.sparsity.checks import is_excluded


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
    sizes: Mapping[str, int], round_to: int = 8, exclude: Sequence[str] = ()
) -> CountFamily:
    """Lists counts of one density in every group, to rounding, over all densities.

    All counts that `uniform_keep_counts` gives are members. Groups that grow at the
    same density do so one by one, in the given order, so that members lie close
    together also where all groups have the same number of steps.

    Args:
      sizes: Number of channels per group.
      round_to: See `uniform_keep_counts`.
      exclude: Groups whose name contains one of these stay dense.
    Returns:
      The family.
    Raises:
      UserError: `round_to` below 1.
    Example:
      >>> family = uniform_family({'a': 16, 'b': 4})
      >>> [family.counts(i) for i in (0, 1, 2, len(family) - 1)]
      [{'a': 2, 'b': 1}, {'a': 4, 'b': 1}, {'a': 6, 'b': 1}, {'a': 16, 'b': 4}]
    """
    start, events = _uniform_events(sizes, round_to, exclude)
    return _family(start, [(name, count) for _, name, count in events])


def ranked_family(
    scores: Mapping[str, np.ndarray],
    round_to: int = 8,
    exclude: Sequence[str] = (),
    floor_share: float = 1 / 8,
    previous: Mapping[str, int] | None = None,
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
    Returns:
      The family.
    Raises:
      UserError: `floor_share` outside (0, 1], `round_to` below 1, or a group missing
        from `previous`.
    Example:
      >>> strong, weak = np.linspace(3, 2, 16), np.linspace(1, 0.1, 16)
      >>> family = ranked_family({'a': strong, 'b': weak})
      >>> [family.counts(i) for i in (0, 1, 7, 8)]
      [{'a': 2, 'b': 2}, {'a': 4, 'b': 2}, {'a': 16, 'b': 2}, {'a': 16, 'b': 4}]
    """
    if not 0.0 < floor_share <= 1.0:
        raise UserError(f"floor_share {floor_share:g} is outside (0, 1]")
    sizes = {name: len(score) for name, score in scores.items()}
    floors = uniform_keep_counts(sizes, floor_share, round_to, exclude)
    start, events = _uniform_events(sizes, round_to, exclude)
    steps = [(name, count) for _, name, count in events if count <= floors[name]]
    steps += _ranked_steps(scores, floors, round_to)
    ceilings = ceilings_of(sizes, previous)
    start = {name: min(count, ceilings[name]) for name, count in start.items()}
    return _family(start, [(name, n) for name, n in steps if n <= ceilings[name]])


def _family(start: Mapping[str, int], steps: Sequence[tuple[str, int]]) -> CountFamily:
    return CountFamily(start, tuple(steps), range(len(steps) + 1))


def _uniform_events(
    sizes: Mapping[str, int], round_to: int, exclude: Sequence[str]
) -> tuple[dict[str, int], list[tuple[float, str, int]]]:
    """The least counts, and (density, group, count) wherever a group grows, rising."""
    start, events = {}, []
    for name, size in sizes.items():
        quantum = quantum_of(size, round_to)
        start[name] = size if is_excluded(name, exclude) else quantum
        counts = _counts_above(start[name], size, quantum)
        for number, count in enumerate(counts, 2):
            # Counts are rounded to the nearest multiple; see `uniform_keep_counts`.
            events.append((min(1.0, (number - 0.5) * quantum / size), name, count))
    return start, sorted(events, key=lambda event: event[0])


def _counts_above(floor: int, size: int, quantum: int) -> list[int]:
    """Counts between a floor and the whole group, rising; the last is the group."""
    return [*range(floor + quantum, size, quantum), size] if floor < size else []


def _ranked_steps(
    scores: Mapping[str, np.ndarray], floors: Mapping[str, int], round_to: int
) -> list[tuple[str, int]]:
    """How groups grow from their floors to their sizes, best block first."""
    finite = finite_scores(scores)
    best = max((float(score.max(initial=0.0)) for score in finite.values()), default=0)
    blocks = []
    for name, score in finite.items():
        size, ranked = len(score), np.sort(score)[::-1]
        counts = _counts_above(floors[name], size, quantum_of(size, round_to))
        below = [floors[name], *counts][:-1]
        means = [ranked[a:b].mean() for a, b in zip(below, counts, strict=True)]
        # Coarser than the rounding of means, so that equal scores share equally.
        ranks = np.round(np.array(means) / (best or 1.0), 12)
        for rank, count in zip(ranks, counts, strict=True):
            blocks.append((-rank, count / size, name, count))
    blocks.sort(key=lambda block: block[:2])
    return [(name, count) for _, _, name, count in blocks]
