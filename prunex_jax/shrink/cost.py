"""Counts the work of a network from its traced program.

Multiply-accumulates of convolutions and matrix products; everything else is small
beside them and not counted, as in the published figures.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from prunex_jax.base.jaxprs import inner_programs
from prunex_jax.base.trees import PyTree


def count_params(params: PyTree) -> int:
    """Number of trainable parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> count_params({'kernel': jnp.ones((3, 4)), 'bias': jnp.ones(4)})
      16
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def count_macs(apply: Callable[..., Any], *args: Any) -> int:
    """Counts multiply-accumulates of one call.

    What padding multiplies by zero counts, what the dilation of an image (a transposed
    convolution) does not. Of branches the most expensive counts; a loop whose length is
    not part of the program counts as one turn.

    Args:
      apply: Any traceable function.
      *args: Its arguments, or their shapes; one example if the result is to be "for
        one example".
    Returns:
      The number.
    Example:
      >>> import jax.numpy as jnp
      >>> count_macs(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 5)))
      30
    """
    return sum(_macs(jax.make_jaxpr(apply)(*args).jaxpr))


def _macs(jaxpr: core.Jaxpr) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            yield _dot_macs(eqn)
        elif name == "conv_general_dilated":
            yield _conv_macs(eqn)
        elif name == "cond":
            yield max(sum(_macs(branch)) for branch in inner_programs(eqn))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            for inner in inner_programs(eqn):
                yield times * sum(_macs(inner))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _dot_macs(eqn: core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = _shape(eqn.invars[0])
    return math.prod(_shape(eqn.outvars[0])) * math.prod(left[i] for i in contracted)


def _conv_macs(eqn: core.JaxprEqn) -> int:
    out_axis = eqn.params["dimension_numbers"].rhs_spec[0]
    kernel = _shape(eqn.invars[1])
    per_output = math.prod(kernel[:out_axis] + kernel[out_axis + 1 :])
    total = math.prod(_shape(eqn.outvars[0])) * per_output
    return total // math.prod(eqn.params["lhs_dilation"])
