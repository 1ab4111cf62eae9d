"""Makes one computation wait for another, in a way that compilers leave alone."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh.varying import agreed, axes_of


def zero_after(values: Iterable[jax.Array]) -> jax.Array:
    """An int32[] zero that can be had only when some values have been computed.

    Added to a position, or multiplied with one added to it, it makes what follows wait.
    XLA's optimization barriers do not: they are gone before it joins equal operations
    and orders them.

    Example:
      >>> int(zero_after([jnp.array([jnp.nan]), jnp.array(3.0)]))
      0
    """
    firsts = [jnp.ravel(x)[0].astype(jnp.float32) for x in values if x.size]
    # At most a half, thus zero; also for infinity, and for what is not a number.
    zero = (0.5 / (1.0 + jnp.abs(sum(firsts)))).astype(jnp.int32)
    return agreed(zero, *axes_of(jax.typeof(zero)))


def after(values: Iterable[jax.Array], tree: PyTree) -> PyTree:
    """The same tree, which can be had only when some values have been computed.

    Example:
      >>> after([jnp.ones(2)], {'a': jnp.array(3.0)})['a'].item()
      3.0
    """
    one = 1 + zero_after(values)
    return jax.tree.map(lambda x: x * one.astype(x.dtype), tree)
