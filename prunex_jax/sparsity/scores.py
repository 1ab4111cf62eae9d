"""Ranks channels: one score per channel of every group.

It reads trees through layouts and chooses nothing; `masks` chooses. Raw scores are sums
of squares, so they add up over hosts; normalised scores compare between groups and do
not add up.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.channels.groups import Layouts
from prunex_jax.channels.slicing import sum_squares_by_channel

Scores = Mapping[str, jax.Array]


def channel_scores(
    tree: PyTree,
    layouts: Layouts,
    normalise: Literal["none", "group_mean"] = "none",
) -> dict[str, jax.Array]:
    """Scores every channel by the squared norm of all entries that carry it.

    score_c = sum over the members of the group of ||entries of channel c||^2, so that
    in a group removing the channels of lowest score moves the tree least.

    To agree over hosts, sum raw scores over the hosts, then normalise the sum with
    `normalise_scores`: a mean of normalised scores depends on how the hosts differ in
    scale, and a sum of raw ones is the squared norm of the stacked trees.

    Args:
      tree: Parameters, or any tree of floating leaves that the layouts name.
      layouts: From `channels.groups.layouts_of`.
      normalise: "none", or "group_mean" for scores that compare between groups.
    Returns:
      float32[size] per group.
    Raises:
      UserError: `normalise` is neither of the two.
    """
    if normalise not in ("none", "group_mean"):
        raise UserError(f"normalise {normalise!r} is unknown; use none or group_mean")
    scores = sum_squares_by_channel(tree, layouts)
    return scores if normalise == "none" else normalise_scores(scores)


def normalise_scores(scores: Scores) -> dict[str, jax.Array]:
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
    """Reads the number of channels of every group off its layouts.

    Args:
      layouts: From `channels.groups.layouts_of`.
    Returns:
      Number of channels by group name.
    """
    return {
        name: positions.shape[0]
        for by_axis in layouts.values()
        for layout in by_axis.values()
        for name, positions in layout.slices
    }


def entries_per_channel(tree: PyTree, layouts: Layouts) -> dict[str, int]:
    """Counts the entries that carry one channel of each group.

    An entry that carries a channel on two axes counts twice, as it does in its score.

    Args:
      tree: Any tree whose leaves have a shape.
      layouts: From `channels.groups.layouts_of`, made for these shapes.
    Returns:
      Number of entries by group name.
    """
    counts: dict[str, int] = {}
    for path, leaf in flatten_by_path(tree).items():
        for layout in layouts.get(path, {}).values():
            for name, positions in layout.slices:
                entries = leaf.size // layout.size * positions.shape[1]
                counts[name] = counts.get(name, 0) + entries
    return counts


def shared_paths(layouts: Layouts) -> tuple[str, ...]:
    """Lists the leaves whose entries belong to more than one channel.

    A kernel between two pruned layers is one: each entry carries an input channel and
    an output channel. Where the list is empty, channels are disjoint sets of entries,
    and the projections and proximal maps separate into one problem per group.

    Args:
      layouts: From `channels.groups.layouts_of`.
    Returns:
      Paths, sorted.
    """
    return tuple(sorted(path for path, by_axis in layouts.items() if len(by_axis) > 1))
