"""Scores of weights before training: what removing each does to the gradient's flow."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import mean_over_mesh
from prunex_jax.mesh import ALONE, MeshAxes, vary
from prunex_jax.methods.pactrain.packing import Packing, Pattern

# (params, batch, temperature) -> mean loss over the batch of one device, its logits
# divided by the temperature.
LossFn = Callable[[PyTree, Any, float], jax.Array]
# That of the authors' code: it makes predictions nearly uniform, whatever the network.
TEMPERATURE = 200.0


def grasp_pattern(
    loss_fn: LossFn,
    params: PyTree,
    batches: Sequence[Any],
    packing: Packing,
    *,
    axes: MeshAxes = ALONE,
    temperature: float = TEMPERATURE,
) -> Pattern:
    """Chooses what is kept so that the gradient keeps flowing.

    With g the mean gradient and H the Hessian of the loss over all batches of all
    devices, removing weight w changes the squared norm of g by about -2 w H g. So

        score = -w * (H g)

    and what scores highest is removed: its loss makes the gradient larger, or hardly
    smaller. A channel's score is the sum over all kernel entries that carry it.

    Args:
      loss_fn: See `LossFn`. Batches are as it takes them, on one device.
      params: The parameters, replicated or varying.
      batches: Parts of what is looked at, all of one shape, per_device; statistics of
        a batch norm are those of a part.
      packing: What lives or dies together.
      axes: Mesh axes.
      temperature: Divides logits.
    Returns:
      A pattern of `packing`, replicated.
    Collectives:
      As `comm.mean_over_mesh` for the gradients of kernels, then for the scores of the
      packing: one number per channel, or one per weight.
    Example:
      >>> from prunex_jax.methods.pactrain.packing import WeightPacking
      >>> params = {'kernel': jnp.array([[1.0, 1.0, 1.0, 1.0]])}
      >>> def loss_fn(params, batch, temperature):
      ...     return jnp.sum(batch * params['kernel'] ** 2) / 2
      >>> batches = [jnp.array([[1.0, 3.0, 2.0, 0.5]])]
      >>> packing = WeightPacking(0.5, {'kernel': (1, 4)})
      >>> grasp_pattern(loss_fn, params, batches, packing).tolist()
      [1, 2]

    References:
      Wang, Zhang and Grosse, Picking Winning Tickets Before Training by Preserving
      Gradient Flow, 2020, arXiv:2002.07376, and the authors' code.
    Differs from:
      The authors' code: the Hessian-vector product is taken forward over reverse; the
      examples are those of the first batches, not the same number of every class;
      dense layers are not drawn anew before.
    """
    own = vary(params, axes.names)

    def gradient(params: PyTree, batch: Any) -> PyTree:
        grads = jax.grad(lambda p: loss_fn(p, batch, temperature))(params)
        return _kernels_of(grads)

    # One after the other in a loop: they are compiled once, and need memory once.
    parts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)

    def mean(fn: Callable[[Any], PyTree]) -> PyTree:
        def add(total: PyTree, part: Any) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, fn(part)), None

        nothing = vary(jax.tree.map(jnp.zeros_like, own), axes.names)
        total, _ = jax.lax.scan(add, nothing, parts)
        return jax.tree.map(lambda leaf: leaf / len(batches), total)

    flow = mean_over_mesh(mean(lambda part: gradient(own, part)), axes)
    along = vary(flow, axes.names)
    bends = mean(lambda part: jax.jvp(lambda p: gradient(p, part), (own,), (along,))[1])
    # Highest is kept: the negative of the score.
    worth = jax.tree.map(lambda w, bend: w * bend, _kernels_of(own), bends)
    return packing.choose(mean_over_mesh(packing.scores(worth), axes))


def magnitude_pattern(params: PyTree, packing: Packing) -> Pattern:
    """Keeps the largest weights, or the channels of largest norm; sends nothing.

    Of parameters that a pattern has masked, it is that pattern.
    """
    return packing.choose(packing.scores(jax.tree.map(jnp.square, params)))


def _kernels_of(tree: PyTree) -> PyTree:
    """The tree with zeros for biases and the scales and offsets of norms."""
    return jax.tree.map(lambda x: x if x.ndim > 1 else jnp.zeros_like(x), tree)
