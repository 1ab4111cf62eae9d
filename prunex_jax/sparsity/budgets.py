"""Turns a density into a number of kept channels per group.

Counts are plain Python integers, computed on the host: each distinct set of counts is a
compiled shape. Which channels fill the counts is decided by `masks`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import SparsityConfig
from prunex_jax.sparsity.checks import check_density, check_round_to, is_excluded

# A group moves in steps of at most 1/8 of itself, so that rounding to the nearest
# changes its density by at most 1/16.
_QUANTA_PER_GROUP = 8
# Absorbs what binary floats do to densities such as 1 - 0.7.
_ROUNDING_SLACK = 1e-9


def quantum_of(size: int, round_to: int = 8) -> int:
    """Finds the step in which the kept count of a group moves.

    The largest power of two up to `round_to` of which the group holds at least eight,
    and 1 for smaller groups: accelerators like multiples of 8, small groups cannot
    afford them.

    Args:
      size: Number of channels of the group.
      round_to: Upper bound on the result.
    Returns:
      A power of two.
    Raises:
      UserError: `round_to` is below 1.
    Example:
      >>> [quantum_of(size) for size in (5, 16, 32, 64, 512)]
      [1, 2, 4, 8, 8]
    """
    check_round_to(round_to)
    bound = max(1, min(round_to, size // _QUANTA_PER_GROUP))
    return 1 << (bound.bit_length() - 1)


def _round_count(size: int, density: float, round_to: int) -> int:
    """Kept count of one group: the nearest multiple of its quantum, ties upwards."""
    if density == 1.0:
        return size
    quantum = quantum_of(size, round_to)
    multiple = math.floor(density * size / quantum + 0.5 + _ROUNDING_SLACK)
    return min(size, quantum * max(1, multiple))


def uniform_keep_counts(
    sizes: Mapping[str, int],
    density: float,
    round_to: int = 8,
    exclude: Sequence[str] = (),
) -> dict[str, int]:
    """Gives every group the same density, to rounding.

    Counts never grow when the density falls.

    Args:
      sizes: Number of channels per group.
      density: Share of the channels that is kept, in (0, 1]; 1 keeps all exactly.
      round_to: Counts are multiples of this, or of less where a group is small; see
        `quantum_of`. Always at least one multiple, at most the group.
      exclude: Groups whose name contains one of these stay dense.
    Returns:
      Kept count per group, in [1, size].
    Raises:
      UserError: Density outside (0, 1], or `round_to` below 1.
    Example:
      >>> uniform_keep_counts({'stem': 16, 'body': 64, 'tiny': 3}, 0.3)
      {'stem': 4, 'body': 16, 'tiny': 1}
    """
    check_density(density)
    check_round_to(round_to)
    return {
        name: size
        if is_excluded(name, exclude)
        else _round_count(size, density, round_to)
        for name, size in sizes.items()
    }


def global_keep_counts(
    scores: Mapping[str, np.ndarray],
    density: float,
    round_to: int = 8,
    exclude: Sequence[str] = (),
    floor_share: float = 1 / 8,
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
    floor keeps a layer from vanishing because its scores happen to be small: it is
    `floor_share` of the group, rounded like every count, or the density where that is
    lower.

    Runs in numpy on the host. Every host must pass the same numbers.

    Args:
      scores: float[size] per group, comparable between groups; see `normalise_scores`.
        NaN counts as 0, infinity as the largest finite score.
      density: Share of the channels of all groups together that is kept, excluded
        groups aside, in (0, 1]; 1 keeps all exactly.
      round_to: See `uniform_keep_counts`.
      exclude: Groups whose name contains one of these stay dense.
      floor_share: Least share of a group that stays, in (0, 1].
      previous: Counts that may not be exceeded, those of the stair before, so that no
        group needs a channel that is dead already. None means the sizes.
    Returns:
      Kept count per group, in [1, size], in the order of `scores`.
    Raises:
      UserError: Density or `floor_share` outside (0, 1], `round_to` below 1, or a group
        missing from `previous`.
    Example:
      >>> strong, weak = np.linspace(3, 2, 16), np.linspace(1, 0.1, 16)
      >>> global_keep_counts({'a': strong, 'b': weak}, 0.5)
      {'a': 14, 'b': 2}
    """
    check_density(density)
    if not 0.0 < floor_share <= 1.0:
        raise UserError(f"floor_share {floor_share:g} is outside (0, 1]")
    sizes = {name: len(score) for name, score in scores.items()}
    ceilings = ceilings_of(sizes, previous)
    ranked = [name for name in sizes if not is_excluded(name, exclude)]
    if density == 1.0 or not ranked:
        return {n: ceilings[n] if n in ranked else sizes[n] for n in sizes}
    floor_density = min(floor_share, density)
    options = [
        _admissible(sizes[n], ceilings[n], floor_density, round_to) for n in ranked
    ]
    finite = finite_scores(scores)
    values = [
        _kept_values(finite[n], counts)
        for n, counts in zip(ranked, options, strict=True)
    ]
    target = density * sum(sizes[n] for n in ranked)
    chosen = dict(zip(ranked, _best_counts(options, values, target), strict=True))
    return {name: chosen.get(name, size) for name, size in sizes.items()}


def ceilings_of(
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


def _admissible(
    size: int, ceiling: int, floor_density: float, round_to: int
) -> np.ndarray:
    """All counts that one group may have, rising."""
    floor = min(ceiling, _round_count(size, floor_density, round_to))
    quantum = quantum_of(size, round_to)
    counts = np.arange(floor, ceiling + 1, quantum)
    # Whole groups need not be a multiple of their quantum.
    return np.union1d(counts, [size]) if ceiling == size else counts


def _kept_values(score: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sum of the largest scores for each count."""
    sums = np.cumsum(np.sort(score)[::-1])[counts - 1]
    # Far below any difference that matters; makes equal scores share equally.
    return sums - 1e-9 * max(1.0, float(score.mean())) * counts**2 / len(score)


def finite_scores(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Puts NaN last and infinity beside the best, without spoiling sums."""
    wide = {name: np.asarray(score, np.float64) for name, score in scores.items()}
    best = max(np.max(s, initial=1.0, where=np.isfinite(s)) for s in wide.values())
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
) -> dict[str, int]:
    """Kept channels of every group at one density.

    Args:
      config: Budget, rounding and exclusions.
      sizes: Channels of every group.
      density: Share that is kept.
      scores: Comparable between groups; needed for a global budget below density 1.
      previous: Counts of the stage before, which a global budget never exceeds.
    Returns:
      Group name -> static count.
    """
    if config.budget == "global" and scores is not None and density < 1.0:
        return global_keep_counts(
            scores,
            density,
            config.round_to,
            config.exclude,
            previous=previous,
        )
    return uniform_keep_counts(sizes, density, config.round_to, config.exclude)
