"""Gradients of a batch in several parts, one after the other, as if of the whole.

It runs before any exchange: what crosses a link does not depend on the parts.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import vary
from prunex_jax.mesh.ordering import zero_after

# (params, statistics, batch) -> ((mean loss, (statistics, sums over the batch)), the
# gradient of the loss)
Gradient = Callable[
    [PyTree, PyTree, PyTree], tuple[tuple[jax.Array, tuple[PyTree, PyTree]], PyTree]
]


def accumulated_grads(
    gradient: Gradient,
    num_parts: int = 1,
    axes: Sequence[str | None] = (),
    *,
    unroll: bool = False,
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, jax.Array, PyTree, PyTree]]:
    """Makes the gradient of a mean loss over a batch that is taken in equal parts.

    Activations need memory for one part only. Gradients and losses are the means of
    those of the parts, which are those of the batch; but batch norm sees the statistics
    of a part, and running statistics go through the parts in order.

    Args:
      gradient: (params, statistics, batch) -> ((mean loss, (statistics, sums)), the
        gradient), as `jax.value_and_grad` makes it.
      num_parts: Divides the leading axis of every leaf of a batch.
      axes: Mesh axes over which gradients differ; None is skipped.
      unroll: Write the parts out, one after the other, instead of in a loop: XLA on
        CPU computes convolutions in a loop several times slower. Memory is needed for
        one part in both forms.
    Returns:
      (params, statistics, batch) -> (gradients, mean loss, statistics, sums).
    Collectives:
      Those of `gradient`, once for every part.
    Example:
      >>> def loss(w, calls, x):
      ...     return jnp.mean((w * x) ** 2), (calls + 1, jnp.sum(x))
      >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> gradient = jax.value_and_grad(loss, has_aux=True)
      >>> found = accumulated_grads(gradient, 2)(jnp.ones(()), jnp.zeros(()), x)
      >>> [float(value) for value in found]
      [15.0, 7.5, 2.0, 10.0]
    """

    def one(
        params: PyTree, statistics: PyTree, batch: PyTree
    ) -> tuple[PyTree, jax.Array, PyTree, PyTree]:
        (value, (statistics, sums)), grads = gradient(params, statistics, batch)
        return grads, value, statistics, sums

    def several(
        params: PyTree, statistics: PyTree, batch: PyTree
    ) -> tuple[PyTree, jax.Array, PyTree, PyTree]:
        def add(
            carry: tuple[PyTree, PyTree], part: PyTree
        ) -> tuple[tuple[PyTree, PyTree], None]:
            total, statistics = carry
            grads, value, statistics, sums = one(params, statistics, part)
            found = (grads, value, sums)
            return (jax.tree.map(jnp.add, total, found), statistics), None

        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], parts)
        grads, value, _, sums = jax.eval_shape(one, params, statistics, first)
        nothing = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), (grads, value, sums)
        )
        carry = (vary(nothing, axes), statistics)
        if unroll:
            for number in range(num_parts):
                part = _part_after(carry[0], parts, number)
                carry, _ = add(carry, part)
        else:
            carry, _ = jax.lax.scan(add, carry, parts)
        (grads, value, sums), statistics = carry
        grads, value = jax.tree.map(lambda x: x / num_parts, (grads, value))
        return grads, value, statistics, sums

    return one if num_parts == 1 else several


def _part_after(earlier: PyTree, parts: PyTree, number: int) -> PyTree:
    """Part of that number, which can be had only when `earlier` has been computed.

    Otherwise XLA computes the parts beside each other, and holds the activations of
    all.
    """
    zero = zero_after(jax.tree.leaves(earlier))
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, number + zero, keepdims=False), parts
    )
