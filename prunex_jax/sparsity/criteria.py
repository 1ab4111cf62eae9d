"""What the channels of a group are ranked by: criteria beside the norm.

Every criterion gives one float32 per channel and ranks within a group; how groups
compare is up to `normalise_scores`. One of them looks at gradients, which are there in
local steps and not in rounds: `gradient_scores` says what one step adds to a running
mean. With theta all entries that carry a channel, and g their gradient:

    norm      ||theta||^2
    taylor    |<theta, g>|, the mean over local steps
    scale     ||gamma||^2, of the vectors among theta that scale the channel

References:
  Molchanov et al., Importance Estimation for Neural Network Pruning, 2019,
  arXiv:1906.10771 (taylor; squared there, which ranks alike in one step).
  Liu et al., Learning Efficient Convolutional Networks through Network Slimming, 2017,
  arXiv:1708.06519 (scale).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.channels.groups import Layouts
from prunex_jax.channels.slicing import (
    sum_products_by_channel,
    sum_squares_by_channel,
)
from prunex_jax.sparsity.settings import Criterion

Scores = dict[str, jax.Array]
# Sums over all entries of a channel, from sums over those that a device has.
Total = Callable[[Any], Any]

# What remains in a step of the mean over the steps before: about a hundred count.
_MEMORY = 0.99
# Vectors of these names are added to a channel; all others scale it.
_OFFSETS = {"b", "beta", "bias", "offset"}


def _as_they_are(sums: Any) -> Any:
    return sums


def uses_gradients(criterion: Criterion) -> bool:
    """Whether a criterion needs what `gradient_scores` finds in local steps."""
    return criterion == "taylor"


def estimates_damage(criterion: Criterion) -> bool:
    """Whether scores say what the loss loses: then they compare between groups."""
    return criterion == "taylor"


def gradient_scores(
    params: PyTree, grads: PyTree, layouts: Layouts, total: Total = _as_they_are
) -> Scores:
    """What the gradients of one step say of every channel.

    Args:
      params: Floating leaves.
      grads: Gradients of the loss, the same structure.
      layouts: From `channels.layouts_of`.
      total: Adds up what devices found in slices of these trees: one number per
        channel.
    Returns:
      |<theta, g>|, float32[size] per group.
    Example:
      >>> import numpy as np
      >>> from prunex_jax.channels import AxisLayout
      >>> row = AxisLayout(2, (('a', np.array([[0], [1]])),), np.array([]))
      >>> theta, grads = {'x': jnp.array([3.0, 4.0])}, {'x': jnp.array([1.0, -0.5])}
      >>> found = gradient_scores(theta, grads, {'x': {0: row}})
      >>> found['a'].tolist()
      [3.0, 2.0]
    """
    products = total(sum_products_by_channel(params, grads, layouts))
    return {name: jnp.abs(x) for name, x in products.items()}


def running_mean(
    before: Mapping[str, jax.Array],
    found: Mapping[str, jax.Array],
    num_steps: jax.Array,
) -> Scores:
    """Adds what a step has found to the mean over the steps before it.

    Args:
      before: float32[size] per group.
      found: The same of this step.
      num_steps: int32[], steps before it. The mean is a plain one over the first
        hundred, and forgets from then on.
    Returns:
      float32[size] per group.
    Example:
      >>> mean = {'a': jnp.zeros(1)}
      >>> for step in range(3):
      ...     mean = running_mean(mean, {'a': jnp.full(1, step)}, jnp.int32(step))
      >>> mean['a'].tolist()
      [1.0]
    """
    share = jnp.maximum(1.0 - _MEMORY, 1.0 / (num_steps + 1))
    return {name: mean + share * (found[name] - mean) for name, mean in before.items()}


def channel_scores(
    criterion: Criterion,
    tree: PyTree,
    layouts: Layouts,
    of_gradients: Mapping[str, jax.Array] | None = None,
    total: Total = _as_they_are,
) -> Scores:
    """Scores of the channels of a tree.

    Args:
      criterion: Which. With "scale", a group that no vector scales, such as the hidden
        channels of a layer without a norm, is ranked by its norm.
      tree: Parameters; floating leaves.
      layouts: From `channels.layouts_of`; every group must touch at least one leaf.
      of_gradients: Mean over steps of what `gradient_scores` gives, for "taylor".
      total: Adds up what devices found in slices of the tree: one number per channel,
        for "taylor" nothing.
    Returns:
      float32[size] per group. Sums, or means, over hosts rank channels for all of them.
    Example:
      >>> import numpy as np
      >>> from prunex_jax.channels import AxisLayout
      >>> row = AxisLayout(2, (('a', np.array([[0], [1]])),), np.array([]))
      >>> tree = {'kernel': jnp.ones((4, 2)), 'scale': jnp.array([3.0, 1.0])}
      >>> layouts = {'kernel': {1: row}, 'scale': {0: row}}
      >>> channel_scores('norm', tree, layouts)['a'].tolist()
      [13.0, 5.0]
      >>> channel_scores('scale', tree, layouts)['a'].tolist()
      [9.0, 1.0]
    """
    if criterion == "taylor":
        assert of_gradients is not None, "it needs the mean of gradient scores"
        return dict(of_gradients)
    found = sum_squares_by_channel(tree, layouts)
    if criterion == "scale":
        found |= sum_squares_by_channel(tree, _scales(tree, layouts))
    squares: Scores = total(found)
    return squares


def _scales(tree: PyTree, layouts: Layouts) -> Layouts:
    """Layouts of the vectors that scale channels."""
    shapes = shapes_by_path(tree)
    return {
        path: axes
        for path, axes in layouts.items()
        if len(shapes[path]) == 1 and re.split("[/.]", path)[-1] not in _OFFSETS
    }
