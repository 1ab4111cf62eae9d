"""Walks programs inside programs; what is done on the way is the caller's business."""

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core


def inner_programs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Programs that an equation calls, branches or loops over, in order of parameters.

    Example:
      >>> import jax
      >>> closed = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)
      >>> [len(list(inner_programs(eqn))) for eqn in closed.jaxpr.eqns]
      [1]
    """
    yield from _programs(eqn.params.values())


def _programs(values: Iterable[Any]) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)
