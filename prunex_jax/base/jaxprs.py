"""Programs inside programs: which there are, and where jax keeps what.

What is done with them is the caller's business.
"""

from collections.abc import Iterable, Iterator, Sequence
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


def open_program(program: Any) -> core.Jaxpr:
    """The program itself, of one that may come with its constants."""
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def constants_of(program: Any) -> Sequence[Any]:
    """Values of the constants of a program; none where they are operands."""
    is_closed = isinstance(program, core.ClosedJaxpr)
    return program.consts if is_closed else getattr(program, "consts", ())


def called_program(eqn: core.JaxprEqn) -> Any:
    """The program that an equation calls; where it is kept depends on jax."""
    params: Any = eqn.params
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried.

    What is scanned, or stacked up, has an axis more outside than inside.
    """
    params: Any = eqn.params
    body = open_program(params["jaxpr"])

    def count_stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(a.aval.ndim != b.aval.ndim for a, b in pairs)

    num_rows = count_stacked(eqn.invars, body.invars)
    num_carry = len(eqn.outvars) - count_stacked(eqn.outvars, body.outvars)
    return len(eqn.invars) - num_carry - num_rows, num_carry
