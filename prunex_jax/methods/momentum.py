"""Momentum in front of an exchange, and the optimizer that then follows it.

For exchanges that send few entries: momentum that is applied behind them would be that
of a gradient long past.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import sum_over_slices
from prunex_jax.mesh import MeshAxes, axis_size
from prunex_jax.methods.method import Recipe

# Smallest norm that is divided by.
_TINY = 1e-30


def clip_of_host(local: PyTree, clip_norm: float, axes: MeshAxes) -> PyTree:
    """Clips the mean gradient of a host, float32; a norm of 0 is no limit.

    `clip_norm` is for the mean over hosts, if their gradients were independent: that of
    one host may be sqrt(hosts) times as large.

    Collectives:
      Of slices, as `comm.sum_over_slices` for one number.
    """
    if not clip_norm:
        return local
    bound = clip_norm * math.sqrt(axis_size(axes.host))
    norm = jnp.sqrt(sum_over_slices(optax.tree.norm(local, squared=True), axes))
    factor = jnp.minimum(1.0, bound / jnp.maximum(norm, _TINY))
    return jax.tree.map(lambda x: x * factor, local)


def add_momentum(
    local: PyTree, velocity: PyTree, momentum: float, nesterov: bool
) -> tuple[PyTree, PyTree]:
    """One step of momentum, u = momentum u + g, and the step that follows from it."""
    velocity = jax.tree.map(lambda u, g: momentum * u + g, velocity, local)
    if not nesterov:
        return velocity, velocity
    return velocity, jax.tree.map(lambda u, g: g + momentum * u, velocity, local)


class _AfterMomentumState(NamedTuple):
    """State of an optimizer that is given momentum; replicated."""

    inner: PyTree  # of the optimizer with momentum
    scale: PyTree  # of its learning rate


def after_momentum(
    inner: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Makes the optimizer behind an exchange that applies momentum itself.

    update = inner's update for gradients of zero - learning_rate * direction: weight
    decay keeps the momentum and the state that it has in `inner`, and for SGD, which is
    linear, decay and direction add up to what `inner` does to gradients.

    Example:
      >>> sgd = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1, 0.9))
      >>> tx = after_momentum(sgd, 0.1)
      >>> params = jnp.array([2.0])
      >>> update, _ = tx.update(jnp.array([3.0]), tx.init(params), params)
      >>> round(float(update[0]), 6)  # 0.1 * (3 + 0.5 * 2)
      -0.4
    """

    scale = optax.scale_by_learning_rate(learning_rate)

    def init(params: PyTree) -> _AfterMomentumState:
        return _AfterMomentumState(inner.init(params), scale.init(params))

    def update(
        direction: PyTree, state: _AfterMomentumState, params: PyTree | None = None
    ) -> tuple[PyTree, _AfterMomentumState]:
        nothing = jax.tree.map(jnp.zeros_like, direction)
        decay, inner_state = inner.update(nothing, state.inner, params)
        scaled, scale_state = scale.update(direction, state.scale)
        updates = jax.tree.map(jnp.add, decay, scaled)
        return updates, _AfterMomentumState(inner_state, scale_state)

    return optax.GradientTransformation(init, update)


def momentum_of(recipe: Recipe) -> dict[str, Any]:
    """Momentum, nesterov and clip_norm of the inner optimizer, for a method's exchange.

    Raises:
      UserError: The inner optimizer is not SGD.
    """
    optimizer = recipe.optimizer
    if optimizer.name != "sgd":
        raise UserError(
            f"method {recipe.config.name} has no form of optimizer.name="
            f"{optimizer.name!r}: it applies the momentum of SGD before it sends; "
            "choose sgd, or method topk"
        )
    return {
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov,
        "clip_norm": optimizer.clip_norm,
    }
