"""Whether an optimizer goes on with a small network as it would with the masked one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prunex_jax.base.trees import PyTree, map_with_path
from prunex_jax.shrink import Cut, relative_error

# Of stand-ins for parameters: how long axes are, and what is left of those that lose.
_FULL, _LEFT = 4, 2
# The first step may have a rate of zero.
_STEPS = 3
# Sums over other numbers of terms round differently, and some optimizers amplify that.
_TOLERANCE = 1e-3


def follows_masked(tx: optax.GradientTransformation, params: PyTree, cut: Cut) -> bool:
    """Whether updates of what is left are those of the masked network, cut.

    It is tried on small arrays instead of the parameters, with gradients of zeros for
    what is dead: optimizers that look at single entries, and at sums over all of them,
    do the same with both. Those that take means, draw noise, or scale by the shape of
    an array do not.

    Args:
      tx: The optimizer.
      params: What is left of the parameters.
      cut: What is cut out.
    Returns:
      True, too, where it needs more than gradients and parameters, as the loss, so that
      it cannot be tried.
    Example:
      >>> from prunex_jax import prune
      >>> params = {'in': jnp.ones((3, 16)), 'out': jnp.ones((16, 2))}
      >>> apply = lambda p, x: jnp.tanh(x @ p['in']) @ p['out']
      >>> small = prune(apply, params, jnp.ones((4, 3)), sparsity=0.5)
      >>> follows_masked(optax.adam(0.1), small.params, small.cut)
      True
      >>> noisy = optax.noisy_sgd(0.1, key=jax.random.key(0))
      >>> follows_masked(noisy, small.params, small.cut)
      False
    """
    rng = np.random.default_rng(0)
    shapes, left = cut.parameters.shapes, cut.parameters.small_shapes

    def drawn(path: str, leaf: Any) -> np.ndarray:
        shape = shapes.get(path, np.shape(leaf))
        values = rng.normal(size=[min(size, _FULL) for size in shape])
        if path in shapes:
            values *= np.pad(np.ones(kept(path)), _missing(values.shape, kept(path)))
        return values.astype(jnp.result_type(leaf))

    def kept(path: str) -> tuple[int, ...]:
        return tuple(
            min(size, _FULL if size == rest else _LEFT)
            for size, rest in zip(shapes[path], left[path], strict=True)
        )

    def taken(path: str, leaf: jax.Array) -> jax.Array:
        return leaf[tuple(map(slice, kept(path)))] if path in shapes else leaf

    @jax.jit
    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, ...]:
        updates, state = tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    def updates_of(params: PyTree, *grads: PyTree) -> list[PyTree]:
        state, found = tx.init(params), []
        for each in grads:
            updates, state, params = step(each, state, params)
            found.append(updates)
        return found

    trees = [map_with_path(drawn, params) for _ in range(_STEPS + 1)]
    try:
        masked = updates_of(*trees)
        small = updates_of(*(map_with_path(taken, tree) for tree in trees))
    except Exception:
        return True
    wanted = [map_with_path(taken, tree) for tree in masked]
    return relative_error(*map(jax.tree.leaves, (small, wanted))) <= _TOLERANCE


def _missing(shape: tuple[int, ...], kept: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(0, size - left) for size, left in zip(shape, kept, strict=True)]
