"""Chooses the channels that stay, the same way wherever the scores are the same.

The raw score of a channel is the squared norm of all entries that carry it, from
`channels.sum_squares_by_channel`: in a group, removing the channels of lowest score
moves the tree least. Raw scores add up over hosts; normalised scores compare between
groups and do not add up. To agree over hosts, sum raw scores, then normalise the sum.

Scores and counts become keep indices and masks, and a tree its projection onto "at most
K channels alive in each group". Counts are static, so moving scores never recompile;
`counts` sets them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.channels.groups import Layouts
from prunex_jax.channels.slicing import mask_channels, mask_of, sum_squares_by_channel


def normalise_scores(scores: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Divides the scores of each group by their mean.

    Raw scores do not compare between groups: a channel of a wide layer has more entries
    than one of a narrow layer, and initialisation gives them another scale; a global
    ranking of raw scores removes whole layers for that reason alone. A normalised score
    is the energy of a channel relative to the average channel of its group, whatever
    the number or the scale of its entries.

    The mean runs over all channels, those already dead included as zeros. Removing weak
    channels then hardly changes the scores of the others; a mean over the living would
    lower the scores of thinned groups and thin them further at the next stair.

    Args:
      scores: float[size] per group, not negative; raw, summed over hosts if several.
    Returns:
      float[size] per group with mean 1. A group of zeros stays zero. Scores that are
      not finite stay as they are and are left out of the mean.
    Example:
      >>> normalise_scores({'a': jnp.array([1.0, 3.0])})['a'].tolist()
      [0.5, 1.5]
    """

    def divide(score: jax.Array) -> jax.Array:
        mean = jnp.mean(jnp.where(jnp.isfinite(score), score, 0.0))
        return score / jnp.where(mean > 0.0, mean, 1.0)

    return {name: divide(jnp.asarray(score)) for name, score in scores.items()}


def group_sizes(layouts: Layouts) -> dict[str, int]:
    """Reads the number of channels of every group off its layouts."""
    return {
        name: positions.shape[0]
        for by_axis in layouts.values()
        for layout in by_axis.values()
        for name, positions in layout.slices
    }


def _check_names(expected: Mapping, given: Mapping, what: str) -> None:
    """Refuses mappings over other groups than the scores."""
    differing = sorted(set(expected) ^ set(given))
    if differing:
        raise UserError(
            f"scores and {what} differ in channel group {differing[0]!r}; pass both "
            "for the same groups"
        )


def _keep_best(score: jax.Array, alive: jax.Array | None, count: int) -> jax.Array:
    """Sorted positions of the `count` best; see `choose_keep_indices` for the order."""
    # Sorts by the last key first; equal keys keep their order, NaN goes to the end.
    keys = [-score]
    if alive is not None:
        keys.append(jnp.logical_not(alive))
    return jnp.sort(jnp.lexsort(keys)[:count]).astype(jnp.int32)


def choose_keep_indices(
    scores: Mapping[str, jax.Array],
    keep_counts: Mapping[str, int],
    alive: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """Keeps the channels of highest score in every group.

    The order is total and the same on every host that has the same scores: channels
    that are alive before those that are not, numbers before NaN, high before low,
    lower positions first among equals. So a channel whose score is NaN is kept only
    where there is nothing better; infinities rank as numbers.

    A dead channel is never preferred to a living one. Where a group has fewer living
    channels than its count, the result still has `keep_count` positions: the dead ones
    that fill it hold zeros and stay dead, if the caller keeps its record of the living
    with `narrow_alive`. Counts that never grow do not get there.

    Jit-able with static counts: bind them with `functools.partial` or a closure.

    Args:
      scores: float[size] per group.
      keep_counts: Static number of kept channels per group, in [1, size].
      alive: bool[size] per group, True where the channel may be kept; None means all.
    Returns:
      int32[keep_count] per group, sorted, distinct.
    Raises:
      UserError: The arguments name different groups, or a count is outside [1, size].
    Example:
      >>> scores = {'a': jnp.array([1.0, 3.0, 2.0, 3.0])}
      >>> choose_keep_indices(scores, {'a': 2})['a'].tolist()
      [1, 3]
      >>> alive = {'a': jnp.array([True, False, True, True])}
      >>> choose_keep_indices(scores, {'a': 2}, alive)['a'].tolist()
      [2, 3]
    """
    _check_names(scores, keep_counts, "keep_counts")
    if alive is not None:
        _check_names(scores, alive, "alive")
    for name, score in scores.items():
        if not 1 <= keep_counts[name] <= score.shape[0]:
            raise UserError(
                f"keep_count {keep_counts[name]} of channel group {name!r} is outside "
                f"[1, {score.shape[0]}], its number of channels"
            )
    return {
        name: _keep_best(
            jnp.asarray(score),
            None if alive is None else jnp.asarray(alive[name]),
            keep_counts[name],
        )
        for name, score in scores.items()
    }


def masks_of(
    keep_indices: Mapping[str, jax.Array], sizes: Mapping[str, int]
) -> dict[str, jax.Array]:
    """Turns the kept positions of every group into booleans.

    Args:
      keep_indices: int32[keep_count] per group.
      sizes: Number of channels per group.
    Returns:
      bool[size] per group, True where kept.
    """
    return {name: mask_of(kept, sizes[name]) for name, kept in keep_indices.items()}


def narrow_alive(
    alive: Mapping[str, jax.Array], keep_indices: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Removes from the living what was not kept, and never adds to them.

    Once the weights of a channel and of what follows it are exactly zero, its gradients
    are zero for ever; choosing it again would waste a slot.

    Args:
      alive: bool[size] per group.
      keep_indices: int32[keep_count] per group, from `choose_keep_indices`.
    Returns:
      bool[size] per group.
    Example:
      >>> alive = {'a': jnp.array([True, False, True])}
      >>> narrow_alive(alive, {'a': jnp.array([0, 1])})['a'].tolist()
      [True, False, False]
    """
    return {
        name: living & mask_of(keep_indices[name], living.shape[0])
        for name, living in alive.items()
    }


class Projection(NamedTuple):
    """A projected tree, and the channels that live in it, by group."""

    tree: PyTree
    keep_indices: dict[str, jax.Array]  # int32[keep_count], sorted
    masks: dict[str, jax.Array]  # bool[size], True where kept


def project_channels(
    tree: PyTree,
    layouts: Layouts,
    keep_counts: Mapping[str, int],
    *,
    scores: Mapping[str, jax.Array] | None = None,
    alive: Mapping[str, jax.Array] | None = None,
) -> Projection:
    """Moves a tree to where few channels are alive, changing it as little as it can.

    The problem, with a channel alive when any entry that carries it is not zero:

        minimise over x   ||x - tree||^2
        subject to        at most keep_counts[g] channels of group g alive, for all g

    Solved exactly when no entry carries two channels (every leaf has one touched axis):
    the K channels of largest norm stay, the others become zero.

    A kernel between two pruned layers carries an input and an output channel in every
    entry. Choosing for all groups at once is then combinatorial, and this is solved
    instead: every group keeps its K channels of largest norm, each norm taken as if the
    other groups kept everything. Given that choice, zeroing the rest and nothing else
    is the nearest point. The squared distance is at most m times the smallest possible,
    with m the largest number of channels that one entry carries (2 for such kernels):
    the sum of removed scores counts every removed entry between 1 and m times, and no
    choice has a smaller sum.

    The map is idempotent. As the proximal map of the constraint's indicator function it
    is the same for every strength. Jit-able with static counts.

    Args:
      tree: Any tree of floating leaves. Leaves in no group are returned as they are.
      layouts: From `channels.groups.layouts_of`.
      keep_counts: Static number of channels that may live, per group, in [1, size].
      scores: float[size] per group; None scores the tree by its squared norms. Where
        several hosts must agree on channels, give the sum of the scores of all.
      alive: bool[size] per group, True where a channel may be kept; None means all.
        What is dead stays dead, even where too few are alive.
    Returns:
      A tree like `tree` with exact zeros on the removed channels, and the choice.
    Raises:
      UserError: A count is missing or outside [1, size].
    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from prunex_jax.channels.groups import AxisLayout
      >>> layout = AxisLayout(
      ...     3, (('a', np.arange(3)[:, None]),), np.arange(0, dtype=np.int32))
      >>> tree = {'kernel': jnp.array([[3.0, 0.5, 1.0], [0.0, 0.5, 1.0]])}
      >>> found = project_channels(tree, {'kernel': {1: layout}}, {'a': 2})
      >>> found.tree['kernel'].tolist()
      [[3.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """
    if scores is None:
        scores = sum_squares_by_channel(tree, layouts)
    keep_indices = choose_keep_indices(scores, keep_counts, alive)
    if alive is None:
        masks = masks_of(keep_indices, group_sizes(layouts))
    else:
        masks = narrow_alive(alive, keep_indices)
    return Projection(mask_channels(tree, layouts, masks), keep_indices, masks)
