"""What the channels of a group are ranked by: criteria beside the norm.

Every criterion gives one float32 per channel and ranks within a group; how groups
compare is up to `normalise_scores`. Two of them look at gradients, which are there in
local steps and not in rounds: `gradient_scores` says what one step adds to a running
mean, and `channel_scores` makes scores of it and of the parameters. With theta all
entries that carry a channel, and g their gradient:

    norm      ||theta||^2
    taylor    |<theta, g>|, the mean over local steps
    scale     ||gamma||^2, of the vectors among theta that scale the channel
    mixture   (2 n(||theta||) + n(1 - cos(theta, g)) + n(|<theta, g>|)
              + n(<theta, g>^2 / 2)) / 5, where n divides by the mean over the group; of
              terms with g, the mean over local steps

References:
  Molchanov et al., Importance Estimation for Neural Network Pruning, 2019,
  arXiv:1906.10771 (taylor; squared there, which ranks alike in one step).
  Liu et al., Learning Efficient Convolutional Networks through Network Slimming, 2017,
  arXiv:1708.06519 (scale).
  Chen et al., HESSO: Towards Automatic Efficient and User Friendly Any Neural Network
  Training and Pruning, 2024, arXiv:2409.09085 (mixture).
"""

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
from prunex_jax.sparsity.choice import normalise_scores
from prunex_jax.sparsity.settings import Criterion

Scores = dict[str, jax.Array]
# Sums over all entries of a channel, from sums over those that a device has.
Total = Callable[[Any], Any]

# What remains in a step of the mean over the steps before: about a hundred count.
_MEMORY = 0.99
# Vectors of these names are added to a channel; all others scale it.
_OFFSETS = {"b", "beta", "bias", "offset"}
# Terms of the mixture.
_NUM_TERMS = 5


def _as_they_are(sums: Any) -> Any:
    return sums


def uses_gradients(criterion: Criterion) -> bool:
    """Whether a criterion needs what `gradient_scores` finds in local steps."""
    return criterion in ("taylor", "mixture")


def estimates_damage(criterion: Criterion) -> bool:
    """Whether scores say what the loss loses: then they compare between groups."""
    return criterion == "taylor"


def gradient_scores(
    criterion: Criterion,
    params: PyTree,
    grads: PyTree,
    layouts: Layouts,
    total: Total = _as_they_are,
) -> Scores:
    """What the gradients of one step say of every channel.

    Args:
      criterion: "taylor" or "mixture".
      params: Floating leaves.
      grads: Gradients of the loss, the same structure.
      layouts: From `channels.layouts_of`.
      total: Adds up what devices found in slices of these trees: one number per
        channel, for the mixture three.
    Returns:
      float32[size] per group, not negative: |<theta, g>|, or the sum of the last three
      terms of the mixture, each divided by its mean over the group.
    Example:
      >>> import numpy as np
      >>> from prunex_jax.channels import AxisLayout
      >>> row = AxisLayout(2, (('a', np.array([[0], [1]])),), np.array([]))
      >>> theta, grads = {'x': jnp.array([3.0, 4.0])}, {'x': jnp.array([1.0, -0.5])}
      >>> found = gradient_scores('taylor', theta, grads, {'x': {0: row}})
      >>> found['a'].tolist()
      [3.0, 2.0]
    """
    products = sum_products_by_channel(params, grads, layouts)
    if criterion == "taylor":
        return {name: jnp.abs(x) for name, x in total(products).items()}
    squares = [sum_squares_by_channel(tree, layouts) for tree in (params, grads)]
    products, *squares = total([products, *squares])
    norms, slopes = map(_roots, squares)
    first = {name: jnp.abs(x) for name, x in products.items()}
    against = {n: 1.0 - _cosine(x, norms[n] * slopes[n]) for n, x in products.items()}
    second = {n: jnp.square(x) / 2 for n, x in products.items()}
    against, first, second = map(normalise_scores, (against, first, second))
    return {n: against[n] + first[n] + second[n] for n in products}


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
      of_gradients: Mean over steps of what `gradient_scores` gives, where the criterion
        uses it.
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

    Differs from:
      HESSO's code: it divides by norms over all groups, and not by means in one; its
      scores are those of one step; it adds 1 + cos, but what a step along -g makes
      smaller (cos > 0) is worth less. Its mean magnitude is the norm over the number of
      entries, which all channels of a group share, so that the norm counts twice.
    """
    if criterion == "taylor":
        assert of_gradients is not None, "it needs the mean of gradient scores"
        return dict(of_gradients)
    found = sum_squares_by_channel(tree, layouts)
    if criterion == "scale":
        found |= sum_squares_by_channel(tree, _scales(tree, layouts))
    squares: Scores = total(found)
    if criterion != "mixture":
        return squares
    assert of_gradients is not None, "it needs the mean of gradient scores"
    norms = normalise_scores(_roots(squares))
    return {n: (2 * norms[n] + x) / _NUM_TERMS for n, x in of_gradients.items()}


def _roots(squares: Scores) -> Scores:
    return {name: jnp.sqrt(x) for name, x in squares.items()}


def _cosine(product: jax.Array, size: jax.Array) -> jax.Array:
    """Of the angle between vectors of some product; 0 where one of them is zero."""
    return jnp.where(size > 0, product / jnp.where(size > 0, size, 1.0), 0.0)


def _scales(tree: PyTree, layouts: Layouts) -> Layouts:
    """Layouts of the vectors that scale channels."""
    shapes = shapes_by_path(tree)
    return {
        path: axes
        for path, axes in layouts.items()
        if len(shapes[path]) == 1 and path.rsplit("/", 1)[-1] not in _OFFSETS
    }
