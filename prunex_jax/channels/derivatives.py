"""Labels the derivatives that people wrote for their functions.

A gradient may mix channels that the function itself keeps apart, so it is walked too,
and what it ties is tied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.channels.context import Walk
from prunex_jax.channels.labels import (
    FROZEN,
    LabelledProgram,
    LabelTable,
    Reason,
    Traced,
)


def has_tangent(atom: Any) -> bool:
    """Whether a value can be differentiated."""
    return jax.dtypes.issubdtype(atom.aval.dtype, np.inexact)


def label_jvp(
    eqn: core.JaxprEqn,
    operands: Sequence[Traced],
    results: Sequence[Traced],
    table: LabelTable,
    walk: Walk,
) -> LabelledProgram:
    """Labels the forward derivative of a `custom_jvp_call`.

    Returns:
      A program of the operands that are no constants, and of the tangents of those that
      have some. It gives the results and their tangents; see `tangents_of`.
    """
    params: Any = eqn.params
    count = params["num_consts"]
    is_zero = [not has_tangent(atom) for atom in eqn.invars[count:]]
    jaxpr, consts, _ = params["jvp_jaxpr_fun"].call_wrapped(*is_zero)
    moved = [
        _moved(value)
        for value, zero in zip(operands[count:], is_zero, strict=True)
        if not zero
    ]
    closed = core.ClosedJaxpr(jaxpr, consts)
    program = walk(closed, [*operands[count:], *moved])
    for wanted, value in zip(results, program.results, strict=False):
        _tie(table, value, wanted)
    tangents = program.results[len(results) :]
    for index, value in zip(tangents_of(eqn), tangents, strict=True):
        _tie(table, value, results[index])
    return program


def tangents_of(eqn: core.JaxprEqn) -> list[int]:
    """Results of a `custom_jvp_call` that have tangents which are not zero."""
    params: Any = eqn.params
    invars = eqn.invars[params["num_consts"] :]
    is_zero = [not has_tangent(atom) for atom in invars]
    *_, out_is_zero = params["jvp_jaxpr_fun"].call_wrapped(*is_zero)
    return [index for index, zero in enumerate(out_is_zero) if not zero]


def moving_operands(eqn: core.JaxprEqn) -> list[int]:
    """Operands of a call with its own derivative that can be differentiated."""
    first = eqn.params["num_consts"]
    return [i for i in range(first, len(eqn.invars)) if has_tangent(eqn.invars[i])]


def label_vjp(
    eqn: core.JaxprEqn,
    operands: Sequence[Traced],
    results: Sequence[Traced],
    table: LabelTable,
    walk: Walk,
    evaluate: Callable[..., list[Any]],
) -> LabelledProgram:
    """Labels the backward derivative of a `custom_vjp_call`.

    Returns:
      A program of the operands and of the cotangents of those results that have some.
      It gives the cotangents of the operands that have some.
    """
    inputs: list[Any] = list(eqn.invars)
    outputs: list[Any] = list(eqn.outvars)
    moving = moving_operands(eqn)
    given = [i for i, atom in enumerate(outputs) if has_tangent(atom)]

    def pull(values: list[Any], cotangents: list[Any]) -> Any:
        def function(*some: Any) -> list[Any]:
            full = list(values)
            for index, value in zip(moving, some, strict=True):
                full[index] = value
            outs = evaluate(eqn, full)
            return [outs[index] for index in given]

        _, back = jax.vjp(function, *(values[index] for index in moving))
        return back(cotangents)

    closed = jax.make_jaxpr(pull)(
        [atom.aval for atom in inputs], [outputs[index].aval for index in given]
    )
    cotangents = [_moved(results[index]) for index in given]
    program = walk(closed, [*operands, *cotangents])
    for index, value in zip(moving, program.results, strict=True):
        _tie(table, value, operands[index])
    return program


def _moved(value: Traced) -> Traced:
    """A tangent or cotangent of a value: its channels, with any finite numbers."""
    return Traced(value.labels, (None,) * len(value.labels), origin=value.origin)


def _tie(table: LabelTable, value: Traced, wanted: Traced) -> None:
    """Makes sure that nothing wanted is missing; what stays in full can be cut."""
    reason = Reason("", "is tied by a derivative to an axis of fixed size")
    for own, other in zip(value.labels, wanted.labels, strict=True):
        table.join(own, other)
        table.freeze(own[other <= FROZEN], reason)
