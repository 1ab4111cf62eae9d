"""Chooses the channels that stay, the same way wherever the scores are the same.

It turns scores into keep indices and masks. Counts are static, so moving scores never
recompile; `budgets` sets the counts, `channels.slicing` applies the result.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.channels.slicing import mask_of


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
