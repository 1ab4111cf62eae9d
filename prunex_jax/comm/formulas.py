"""From sizes alone: what is left of a tree."""

import math
from collections.abc import Mapping

from prunex_jax.channels.groups import Layouts, kept_shape


def dense_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of elements of a tree.

    Example:
      >>> dense_size({'kernel': (3, 4), 'bias': (4,)})
      16
    """
    return sum(math.prod(shape) for shape in shapes.values())


def compact_size(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Layouts,
    keep_counts: Mapping[str, int],
) -> int:
    """Number of elements of a tree of which each group keeps `keep_counts[name]`.

    sum over leaves of the product over axes of (kept channels on the axis, times the
    positions of each, plus the positions that belong to no group).

    Args:
      shapes: Shape of every leaf by path.
      layouts: From `channels.layouts_of` for these shapes.
      keep_counts: Kept channels of every group.
    Returns:
      The number of elements that one exchange of kept channels carries.
    Example:
      >>> from prunex_jax.channels import ChannelGroup, ChannelSlice, layouts_of
      >>> import numpy as np
      >>> rows = ChannelSlice('kernel', 0, np.arange(4)[:, None])
      >>> shapes = {'kernel': (4, 10), 'bias': (10,)}
      >>> layouts = layouts_of([ChannelGroup('g', 4, (rows,))], shapes)
      >>> compact_size(shapes, layouts, {'g': 2})
      30
    """
    return sum(
        math.prod(kept_shape(shape, layouts.get(path), keep_counts))
        for path, shape in shapes.items()
    )
