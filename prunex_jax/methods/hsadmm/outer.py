"""The outer step: how z follows the mean movements of rounds, and by which law.

Momentum adds up movements that point the same way. If movements k rounds apart have a
cosine of rho^k, z moves along each of them, in the end, by an effective step of

    alpha (1 + beta / (1 - beta rho)),    alpha the step, beta its Nesterov momentum

so a fixed pair fits one rho only, and rho differs from run to run. By law, the period
gives beta, and every round chooses alpha from the cosines so far, such that the
effective step is `EFFECTIVE_STEP`. Nothing here communicates: movements are replicated,
and so is what follows from them.

References:
  Khaled et al., Understanding Outer Optimizers in Local SGD, 2025, arXiv:2509.10439:
  alpha / (1 - beta), to which the effective step grows for rho = 1.
  Douillard et al., DiLoCo, 2023, arXiv:2311.08105, algorithm 1 (the step itself).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import ALONE, MeshAxes
from prunex_jax.mesh.ordering import after
from prunex_jax.methods.hsadmm.arithmetic import add_scaled, dot, norm
from prunex_jax.methods.method import OuterRule

# The middle of 1.2 to 1.8. With cosines guessed as 0.5 for rounds of 16 steps and 0.9
# for 4, pairs that did well in short runs of ours give 1.9, and that of DiLoCo every 4
# steps, which lost, gives 4.0.
EFFECTIVE_STEP = 1.5
# Steps per round -> momentum, linear in the logarithm of the steps: short rounds do
# best with little.
_MOMENTUM_BY_PERIOD = {1: 0.0, 16: 0.5, 64: 0.9}
# What the average of cosines begins with, and what a round leaves of it.
_FIRST_COSINE = 0.5
_KEPT = 0.8


def law_momentum(sync_period: int) -> float:
    """Momentum of the outer step for so many steps per round, by law.

    Example:
      >>> [law_momentum(period) for period in (1, 4, 8, 16, 32, 64, 500)]
      [0.0, 0.25, 0.375, 0.5, 0.7, 0.9, 0.9]
    """
    periods = [math.log2(period) for period in _MOMENTUM_BY_PERIOD]
    momenta = list(_MOMENTUM_BY_PERIOD.values())
    return round(float(np.interp(math.log2(max(sync_period, 1)), periods, momenta)), 6)


def law_step(momentum: float, cosine: jax.Array) -> jax.Array:
    """Outer step at which the effective one is `EFFECTIVE_STEP`; cosines in [0, 1].

    Example:
      >>> [round(float(law_step(0.9, jnp.float32(rho))), 2) for rho in (0.0, 0.5, 1.0)]
      [0.79, 0.57, 0.15]
    """
    return EFFECTIVE_STEP / (1 + momentum / (1 - momentum * cosine))


class Movements(NamedTuple):
    """What is known of the movements of rounds, mean differences to z; replicated."""

    last: PyTree  # As params.
    cosine: jax.Array  # float32[]: of the last two movements; 0 where one is zero
    average: jax.Array  # float32[]: exponential, of cosines with negative ones as zero


def start_movements(rule: OuterRule, zeros: PyTree) -> Movements | None:
    """Before the first round; None where steps are fixed."""
    if rule == "fixed":
        return None
    average = jnp.asarray(_FIRST_COSINE, jnp.float32)
    last = jax.tree.map(jnp.copy, zeros)
    return Movements(last, jnp.zeros((), jnp.float32), average)


def follow(before: Movements, moved: PyTree, axes: MeshAxes = ALONE) -> Movements:
    """Compares the movement of a round with the one before.

    A round that cannot be compared leaves the average as it is.

    Collectives:
      As `comm.sum_over_slices` for the squares of two trees and one number.
    """
    scale = norm(moved, axes) * norm(before.last, axes)
    is_known = scale > 0
    cosine = jnp.where(is_known, dot(moved, before.last, axes) / scale, 0.0)
    toward = (1 - _KEPT) * (jnp.clip(cosine, 0.0, 1.0) - before.average)
    average = jnp.where(is_known, before.average + toward, before.average)
    # Written where the old one lies, once that was read: XLA would copy it otherwise.
    last = after([cosine], moved)
    return Movements(last, cosine, average)


def outer_step(
    z: PyTree,
    moved: PyTree,
    trace: PyTree | None,
    step: jax.typing.ArrayLike,
    momentum: float,
) -> tuple[PyTree, PyTree | None]:
    """Nesterov step of z along `moved`, the mean difference to z, and its momentum."""
    if trace is None:
        return add_scaled(z, step, moved), None
    trace = add_scaled(moved, momentum, trace)
    ahead = add_scaled(moved, momentum, trace)
    return add_scaled(z, step, ahead), trace
