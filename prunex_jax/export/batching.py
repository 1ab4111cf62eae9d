"""Makes programs that take any number of examples, and tells which do not.

It owns the symbolic batch. Some functions cannot be traced with one, because they look
at every size, as the shrunk functions of `shrink` do; where examples do not influence
each other, such a function of one example is mapped over the batch instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.shrink import certify

_BATCH = "batch"


def with_symbolic_batch(shapes: Sequence[PyTree]) -> list[PyTree]:
    """Replaces first axes by a symbolic size.

    Args:
      shapes: Trees of jax.ShapeDtypeStruct.
    Returns:
      The same, of any batch size; as they are, if the caller has made some symbolic.
    Raises:
      UserError: First axes differ, so that the batch is not known.
    """
    leaves = [x for x in jax.tree.leaves(list(shapes)) if x.shape]
    if any(map(_is_symbolic, leaves)):
        return list(shapes)
    sizes = sorted({x.shape[0] for x in leaves})
    if len(sizes) > 1:
        raise UserError(
            f"inputs have first axes of {sizes[0]} and {sizes[1]}, so which of them is "
            "the batch is not clear; give shapes with jax.export.symbolic_shape, or "
            "fixed_batch=True"
        )
    (batch,) = export.symbolic_shape(_BATCH)

    def widen(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) if x.shape else x

    return jax.tree.map(widen, list(shapes))


def one_more(inputs: Sequence[PyTree]) -> list[PyTree] | None:
    """Gives inputs one example more, to try a program at another batch size.

    A function may be lowered for any batch and hold a fixed one all the same, say in a
    reshape: jax finds out only when the program is compiled for another one.

    Args:
      inputs: Arrays or shapes.
    Returns:
      Inputs whose last example is there twice, or their shapes; None if shapes have
      symbolic dimensions of the caller's.
    Example:
      >>> one_more([np.array([1, 2])])[0].tolist()
      [1, 2, 2]
    """
    if any(map(_is_symbolic, jax.tree.leaves(list(inputs)))):
        return None

    def more(x: Any) -> Any:
        if not np.ndim(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)
        return jnp.concatenate([x, x[-1:]])

    return jax.tree.map(more, list(inputs))


def mapped_over_examples(
    apply: Callable[..., PyTree], params: PyTree, inputs: Sequence[PyTree]
) -> Callable[..., PyTree] | None:
    """Makes a function of a batch from what it computes of single examples.

    Args:
      apply: (params, *inputs) -> any tree of arrays with a batch in front.
      params: Arrays.
      inputs: Arrays to prove on that it is the same function.
    Returns:
      A function of the same arguments that traces `apply` for one example whatever the
      batch; None if it is not the same, or nothing is there to prove it with.
    Example:
      >>> apply = lambda params, x: x * params
      >>> mapped = mapped_over_examples(apply, 2.0, [np.ones((3, 2))])
      >>> mapped(2.0, np.ones((5, 2))).shape
      (5, 2)
      >>> apply = lambda params, x: x - x.mean(0, keepdims=True)
      >>> mapped_over_examples(apply, 2.0, [np.eye(3)]) is None
      True
    """
    leaves = jax.tree.leaves((params, list(inputs)))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return None

    def mapped(params: PyTree, *inputs: PyTree) -> PyTree:
        axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, inputs)
        batched = jax.tree.map(lambda x: bool(np.ndim(x)), inputs)

        def of_one(*rows: PyTree) -> PyTree:
            batch = jax.tree.map(
                lambda x, is_in: x[None] if is_in else x, rows, batched
            )
            return jax.tree.map(_only, apply(params, *batch))

        return jax.vmap(of_one, in_axes=axes)(*inputs)

    try:
        same = certify(
            apply,
            mapped,
            params,
            params,
            one_more(inputs) or [],
            take=lambda tree: tree,
            gradients=False,
        )
    except Exception:
        return None
    return mapped if same.is_equal else None


def fixed_batch_error(error: Exception) -> UserError:
    """Says that a function can be exported for one batch size only."""
    return UserError(
        f"the function cannot be exported for batches of any size ({first_line(error)})"
        "; its program holds a fixed one: give fixed_batch=True to export it for the "
        "size of the inputs given"
    )


def first_line(error: Exception) -> str:
    """Type and first line of an error's text.

    Example:
      >>> first_line(ValueError('no such axis, and more'))
      'ValueError: no such axis, and more'
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _only(y: jax.Array) -> jax.Array:
    """What an output says of the only example of a batch."""
    if y.shape[:1] != (1,):
        raise ValueError(f"output {y.shape} does not have the batch in front")
    return y[0]


def _is_symbolic(leaf: Any) -> bool:
    return any(map(export.is_symbolic_dim, np.shape(leaf)))
