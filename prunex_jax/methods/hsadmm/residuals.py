"""How far the copies are from agreeing, and penalties that follow from it.

Knows norms and penalties only; `optim.admm` says when they are taken.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.channels import Layouts

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
    # float32[]: rho_device ||z_i - previous z_i||, with 1 where there is no penalty
    dual_device: jax.Array
    primal_host: jax.Array  # float32[]: ||z_i - z||
    dual_host: jax.Array  # float32[]: rho_host ||z - previous z||


def zero_residuals() -> Residuals:
    """Residuals before the first round, from which no penalty adapts."""
    nothing = jnp.zeros((), jnp.float32)
    return Residuals(nothing, nothing, nothing, nothing)


class RoundHealth(NamedTuple):
    """Where in the network copies differed in the last round.

    Placed like the parameters: each copy has its own.
    """

    host_drift: jax.Array  # float32[]: ||theta_ij - z|| / ||z|| over kept channels
    primal_by_group: dict[str, jax.Array]  # float32[] per group: part of primal_device
    dual_by_group: dict[str, jax.Array]  # float32[] per group: part of dual_device


def zero_health(names: Iterable[str]) -> RoundHealth:
    """Health before the first round, for groups of these names."""
    nothing = jnp.zeros((), jnp.float32)
    by_group = dict.fromkeys(names, nothing)
    return RoundHealth(nothing, by_group, dict(by_group))


def norms_by_group(tree: PyTree, layouts: Layouts) -> dict[str, jax.Array]:
    """Norm of what carries the channels of each group.

    A parameter whose axes belong to two groups counts in both, and one that belongs to
    none in no group, so squares of these norms do not add up to that of `norm`.

    Args:
      tree: Like the parameters.
      layouts: From `channels.layouts_of`.
    Returns:
      float32[] per group that has parameters.
    Example:
      >>> import numpy as np
      >>> from prunex_jax.channels import AxisLayout
      >>> rows = AxisLayout(2, (('a', np.array([[0], [1]])),), np.array([]))
      >>> tree = {'x': jnp.array([3.0, 4.0]), 'y': jnp.ones(2)}
      >>> {name: float(x) for name, x in norms_by_group(tree, {'x': {0: rows}}).items()}
      {'a': 5.0}
    """
    leaves = flatten_by_path(tree)
    members: dict[str, list[jax.Array]] = {}
    for path, axes in layouts.items():
        for name in {name for layout in axes.values() for name, _ in layout.slices}:
            members.setdefault(name, []).append(leaves[path])
    return {name: norm(members[name]) for name in sorted(members)}


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
