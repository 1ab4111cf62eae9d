"""Clipping and momentum in front of an exchange, on what one host has.

For exchanges that send few entries: momentum that is applied behind them would be that
of a gradient long past. `optim.inner.after_momentum` makes the optimizer that follows.
"""

import math

import jax
import jax.numpy as jnp

from prunex_jax.mesh import MeshAxes, axis_size

# Smallest norm that is divided by.
_TINY = 1e-30


def clip_of_host(local: jax.Array, clip_norm: float, axes: MeshAxes) -> jax.Array:
    """Clips the mean gradient of a host.

    Args:
      local: float32[n], per_host.
      clip_norm: Largest norm of the mean over hosts, if their gradients were
        independent: that of one host may be sqrt(hosts) times as large. 0 is no limit.
      axes: Mesh axes.
    Returns:
      float32[n], per_host.
    Example:
      >>> from prunex_jax.mesh import ALONE
      >>> clip_of_host(jnp.array([3.0, 4.0]), 1.0, ALONE).round(3).tolist()
      [0.6000000238418579, 0.800000011920929]
    """
    if not clip_norm:
        return local
    bound = clip_norm * math.sqrt(axis_size(axes.host))
    norm = jnp.sqrt(jnp.sum(jnp.square(local)))
    return local * jnp.minimum(1.0, bound / jnp.maximum(norm, _TINY))


def add_momentum(
    local: jax.Array, velocity: jax.Array, momentum: float, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """One step of momentum, u = momentum u + g.

    Args:
      local: g.
      velocity: u.
      momentum: In [0, 1).
      nesterov: Whether the step is g + momentum u, and not u.
    Returns:
      u, and the step.
    """
    velocity = momentum * velocity + local
    return velocity, local + momentum * velocity if nesterov else velocity
