"""Labels the derivatives that people wrote for their functions.

A gradient may mix channels that the function itself keeps apart, so it is walked too,
and what it ties is tied.

Nor may it move what is dead. A dead channel is either a known number, whose tangent is
0 and whose cotangent may be anything, or a number that nobody knows, whose tangent may
be anything and whose cotangent is 0, since it is read with weight zero. Either way it
adds nothing to a gradient, and derivatives that people write must leave it so.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.base.jaxprs import transposed_call
from prunex_jax.channels.context import Context, Walk
from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    LabelledProgram,
    LabelTable,
    Reason,
    Traced,
    has_channels,
)
from prunex_jax.channels.numbers import is_nan


def has_tangent(atom: Any) -> bool:
    """Whether a value can be differentiated."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


def label_jvp(
    eqn: core.JaxprEqn,
    operands: Sequence[Traced],
    results: Sequence[Traced],
    table: LabelTable,
    walk: Walk,
) -> tuple[LabelledProgram, list[Traced]]:
    """Labels the forward derivative of a `custom_jvp_call`.

    Returns:
      A program of the operands that are no constants, and of the tangents of those that
      have some. It gives the results and their tangents; see `tangents_of`. And the
      results, of which nothing is said where their tangents are not zero.
    """
    params: Any = eqn.params
    count = params["num_consts"]
    is_zero = [not has_tangent(atom) for atom in eqn.invars[count:]]
    jaxpr, consts, _ = params["jvp_jaxpr_fun"].call_wrapped(*is_zero)
    moved = [
        _tangent(value)
        for value, zero in zip(operands[count:], is_zero, strict=True)
        if not zero
    ]
    closed = core.ClosedJaxpr(jaxpr, consts)
    program = walk(closed, [*operands[count:], *moved])
    for wanted, value in zip(results, program.results, strict=False):
        _tie(table, value, wanted)
    tangents = program.results[len(results) :]
    moving = list(results)
    for index, value in zip(tangents_of(eqn), tangents, strict=True):
        _tie(table, value, results[index])
        moving[index] = _moving(results[index], value)
    return program, moving


def tangents_of(eqn: core.JaxprEqn) -> list[int]:
    """Results of a `custom_jvp_call` that have tangents which are not zero."""
    params: Any = eqn.params
    invars = eqn.invars[params["num_consts"] :]
    is_zero = [not has_tangent(atom) for atom in invars]
    *_, out_is_zero = params["jvp_jaxpr_fun"].call_wrapped(*is_zero)
    return [index for index, zero in enumerate(out_is_zero) if not zero]


def moving_operands(eqn: core.JaxprEqn) -> list[int]:
    """Operands of a call with its own derivative that can be differentiated."""
    first = eqn.params.get("num_consts", 0)
    return [i for i in range(first, len(eqn.invars)) if has_tangent(eqn.invars[i])]


def label_vjp(
    eqn: core.JaxprEqn,
    operands: Sequence[Traced],
    results: Sequence[Traced],
    table: LabelTable,
    walk: Walk,
    evaluate: Callable[..., list[Any]],
    reason: Reason | None,
) -> LabelledProgram:
    """Labels the backward derivative of a `custom_vjp_call`.

    Freezes what it would move for the given reason; None if nobody cares.

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
    cotangents = [_cotangent(results[index]) for index in given]
    program = walk(closed, [*operands, *cotangents])
    for index, value in zip(moving, program.results, strict=True):
        _tie(table, value, operands[index])
        if reason is not None:
            _freeze_moved(table, operands[index], value, reason)
    return program


def label_linear_call(ctx: Context, results: Sequence[Traced]) -> LabelledProgram:
    """Labels what the caller of a `linear_call` says is its transpose.

    Freezes what it ties, and what it would move.

    Returns:
      The program of `base.jaxprs.transposed_call`.
    """
    program, kept, moving = transposed_call(ctx.eqn)
    cotangents = [_cotangent(result) for result in results]
    walked = ctx.walk(program, [*(ctx.operands[i] for i in kept), *cotangents])
    reason = ctx.reason("has a transpose that is not zero at removed channels")
    for index, value in zip(moving, walked.results, strict=True):
        _tie(ctx.table, value, ctx.operands[index])
        _freeze_moved(ctx.table, ctx.operands[index], value, reason)
    return walked


def _freeze_moved(
    table: LabelTable, operand: Traced, cotangent: Traced, reason: Reason
) -> None:
    """Freezes channels of an operand that a derivative moves when they are dead."""
    axes = zip(operand.labels, operand.dead, cotangent.dead, strict=True)
    for own, dead, moved in axes:
        is_still = moved == 0 or (dead is not None and not is_nan(moved))
        if not is_still:
            table.freeze(own, reason)


def _tangent(value: Traced) -> Traced:
    """A tangent of a value: its channels, and 0 where they are dead and known."""
    dead = tuple(None if x is None or is_nan(x) else 0.0 for x in value.dead)
    return Traced(value.labels, dead, origin=value.origin)


def _cotangent(value: Traced) -> Traced:
    """A cotangent of a value: its channels, and 0 where they are dead and unknown."""
    dead = tuple(
        0.0 if x is None and has_channels(own) and (own != UNIFORM).all() else None
        for own, x in zip(value.labels, value.dead, strict=True)
    )
    return Traced(value.labels, dead, origin=value.origin)


def _moving(value: Traced, tangent: Traced) -> Traced:
    """A value of which nothing is said where its tangent is not zero."""
    dead = tuple(
        x if moved == 0 or is_nan(x) else math.nan if is_nan(moved) else None
        for x, moved in zip(value.dead, tangent.dead, strict=True)
    )
    return dataclasses.replace(value, dead=dead, masked=None)


def _tie(table: LabelTable, value: Traced, wanted: Traced) -> None:
    """Makes sure that nothing wanted is missing; what stays in full can be cut."""
    reason = Reason("", "is tied by a derivative to an axis of fixed size")
    for own, other in zip(value.labels, wanted.labels, strict=True):
        table.join(own, other)
        table.freeze(own[other <= FROZEN], reason)
