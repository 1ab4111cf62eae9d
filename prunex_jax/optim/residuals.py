"""How far the copies are from agreeing, and penalties that follow from it.

Knows norms and penalties only; `optim.admm` says when they are taken.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.trees import PyTree

# Residual balancing (Boyd et al., 2011, section 3.4.1): a penalty doubles or halves
# when the residuals differ tenfold. It stays within a factor 1024 of its start: where z
# stands still the dual residual is zero, and doubling would not end before infinity.
_TOLERATED_RATIO = 10.0
_FACTOR = 2.0
_LARGEST_CHANGE = 1024.0


class Residuals(NamedTuple):
    """ADMM residuals of the last round (Boyd et al., 2011), as norms.

    Placed like the parameters: each copy has its own.
    """

    primal_device: jax.Array  # float32[]: ||theta_ij - z_i||, before the pull
    dual_device: jax.Array  # float32[]: rho_device ||z_i - previous z_i||
    primal_host: jax.Array  # float32[]: ||z_i - z||
    dual_host: jax.Array  # float32[]: rho_host ||z - previous z||


def zero_residuals() -> Residuals:
    """Residuals before the first round, from which no penalty adapts."""
    nothing = jnp.zeros((), jnp.float32)
    return Residuals(nothing, nothing, nothing, nothing)


def norm(tree: PyTree) -> jax.Array:
    """Euclidean norm of a whole tree, float32[] whatever its types."""
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def balanced(
    penalty: jax.Array, start: float, primal: jax.Array, dual: jax.Array
) -> jax.Array:
    """Penalty of the next round: more where copies disagree, less where z races.

    Args:
      penalty: float32[], now.
      start: What the run began with.
      primal: float32[], primal residual of the last round.
      dual: float32[], its dual residual.
    Returns:
      float32[], within a factor 1024 of `start`. The scaled dual must be multiplied by
      old / new, so that the dual itself, penalty times scaled dual, does not jump.
    Example:
      >>> one = jnp.ones(())
      >>> float(balanced(one, 1.0, 11 * one, one)), float(balanced(one, 1.0, one, one))
      (2.0, 1.0)
    """
    wanted = jnp.where(primal > _TOLERATED_RATIO * dual, penalty * _FACTOR, penalty)
    wanted = jnp.where(dual > _TOLERATED_RATIO * primal, penalty / _FACTOR, wanted)
    return jnp.clip(wanted, start / _LARGEST_CHANGE, start * _LARGEST_CHANGE)
