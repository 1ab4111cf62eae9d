"""Projects trees onto "at most K channels alive in each group".

It joins scores, choice and masking into the projection that structured ADMM needs.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.channels.groups import Layouts
from prunex_jax.channels.slicing import mask_channels
from prunex_jax.sparsity.masks import choose_keep_indices, masks_of, narrow_alive
from prunex_jax.sparsity.scores import channel_scores, group_sizes


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

    Solved exactly when no entry carries two channels (`scores.shared_paths` is empty):
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
        scores = channel_scores(tree, layouts)
    keep_indices = choose_keep_indices(scores, keep_counts, alive)
    if alive is None:
        masks = masks_of(keep_indices, group_sizes(layouts))
    else:
        masks = narrow_alive(alive, keep_indices)
    return Projection(mask_channels(tree, layouts, masks), keep_indices, masks)
