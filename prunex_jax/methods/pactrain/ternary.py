"""Ternary values: -1, 0 or 1 times a scale that all hosts share, one byte each.

They are drawn so that their mean is unbiased, and an ordinary sum adds them up.

References:
  Wen et al., TernGrad, 2017, arXiv:1705.07878.
"""

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import mean_over_devices, mean_over_mesh, min_over_mesh
from prunex_jax.comm.buffers import in_one_buffer
from prunex_jax.comm.collectives import sum_over_hosts
from prunex_jax.mesh import MeshAxes, axis_size, position

# Sums of that many fit into a byte.
_MAX_HOSTS = 127


def ternary_mean_over_mesh(tree: PyTree, axes: MeshAxes, key: jax.Array) -> PyTree:
    """Averages a tree over all devices, of which every host sends -1, 0 or 1 per entry.

    The mean is unbiased; with one host, nothing is drawn. The key is the same
    everywhere and another one in every call.

    Raises:
      UserError: More hosts than a byte can count.
    Collectives:
      As `comm.mean_over_devices`, as `comm.min_over_mesh` for the scale, and an int8
      sum as `collectives.sum_over_hosts`.
    """
    num_hosts = axis_size(axes.host)
    if num_hosts == 1:
        return mean_over_mesh(tree, axes)
    if num_hosts > _MAX_HOSTS:
        raise UserError(
            f"ternary values of {num_hosts} hosts do not add up in a byte; the most is "
            f"{_MAX_HOSTS}"
        )

    def mean(buffer: jax.Array) -> jax.Array:
        own = buffer.astype(jnp.float32)
        scale = -min_over_mesh(-jnp.max(jnp.abs(own)), axes)
        total = sum_over_hosts(_drawn(own, scale, axes, key), axes)
        return (total.astype(jnp.float32) * (scale / num_hosts)).astype(buffer.dtype)

    return in_one_buffer(mean_over_devices(tree, axes), mean)


def _drawn(
    values: jax.Array, scale: jax.Array, axes: MeshAxes, key: jax.Array
) -> jax.Array:
    """int8 of -1, 0 or 1, whose mean times the scale are the values."""
    # Another draw on every host, and the same on its devices.
    own_key = jax.random.fold_in(key, position(axes.host))
    chance = jnp.abs(values) / jnp.where(scale > 0.0, scale, 1.0)
    is_drawn = jax.random.uniform(own_key, values.shape) < chance
    return jnp.where(is_drawn, jnp.sign(values), 0.0).astype(jnp.int8)
