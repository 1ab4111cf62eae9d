"""Arithmetic of trees, of which some may be absent; norms in float32."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.comm import sum_over_slices
from prunex_jax.mesh import ALONE, MeshAxes


def add(tree: PyTree, other: PyTree | None) -> PyTree:
    """Adds a part of the state that may be absent."""
    return tree if other is None else optax.tree.add(tree, other)


def add_scaled(tree: PyTree, scale: jax.typing.ArrayLike, other: PyTree) -> PyTree:
    """tree + scale * other, in the types of `tree`; scale may be a float32 array."""
    return jax.tree.map(lambda x, y: (x + scale * y).astype(x.dtype), tree, other)


def dot(tree: PyTree, other: PyTree, axes: MeshAxes = ALONE) -> jax.Array:
    """Inner product of two trees, float32[] whatever their types.

    Collectives:
      As `comm.sum_over_slices` for one number.
    """

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32))

    parts = jax.tree.leaves(jax.tree.map(product, tree, other))
    total: jax.Array = sum(parts, start=jnp.zeros((), jnp.float32))
    return sum_over_slices(total, axes)


def squares(tree: PyTree, axes: MeshAxes = ALONE) -> dict[str, jax.Array]:
    """Sum of the squares of every leaf by path, float32[] whatever its type.

    Collectives:
      As `comm.sum_over_slices` for one number per leaf.
    """
    wide = jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)
    return sum_over_slices(flatten_by_path(wide), axes)


def norm_of(squares: Mapping[str, jax.Array]) -> jax.Array:
    """Euclidean norm of a tree, of which these are the squares."""
    return jnp.sqrt(sum(squares.values(), start=jnp.zeros((), jnp.float32)))


def norm(tree: PyTree, axes: MeshAxes = ALONE) -> jax.Array:
    """Euclidean norm of a whole tree, float32[] whatever its types.

    Collectives:
      As `squares`.
    """
    return norm_of(squares(tree, axes))
