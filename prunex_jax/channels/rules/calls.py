"""Rules of loops, branches and solvers: programs that are run again, or not at all."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from prunex_jax.base.jaxprs import (
    called_program,
    linear_solve_operands,
    scan_operands,
    while_operands,
)
from prunex_jax.channels.context import Context, freeze_all
from prunex_jax.channels.derivatives import has_tangent, label_linear_call
from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    LabelledProgram,
    Traced,
    frozen_axis,
    frozen_value,
    has_channels,
)
from prunex_jax.channels.numbers import is_nan, same_value

# What is known of a carry only ever shrinks: labels, then values, then nothing.
_MAX_TURNS = 8


def scan(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """What is carried is joined with itself a turn later; what is scanned stays."""
    params = ctx.eqn.params
    consts, start, stacks = scan_operands(ctx.eqn, operands)
    carry = _as_in_a_loop(ctx, len(consts), start)
    rows = []
    for index, x in enumerate(stacks, len(consts) + len(start)):
        ctx.freeze(x.labels[0], "loops over it", is_inherent=True)
        ctx.fits[index, 0] = x.labels[0]
        rows.append(_one_turn(x))

    def turn(carried: Sequence[Traced]) -> list[LabelledProgram]:
        return [ctx.walk(params["jaxpr"], [*consts, *carried, *rows])]

    carried, (body,) = _loop(ctx, turn, carry)
    ctx.inner = (body,)
    _fit_carry(ctx, len(consts), carried)
    stacked = [_all_turns(y, params["length"]) for y in body.results[len(start) :]]
    return [*carried, *stacked]


def _one_turn(x: Traced) -> Traced:
    return dataclasses.replace(_not_constant(x), labels=x.labels[1:], dead=x.dead[1:])


def _all_turns(y: Traced, length: int) -> Traced:
    turns = frozen_axis(length)
    return Traced((turns, *y.labels), (None, *y.dead), origin=y.origin)


def while_loop(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """What is carried is joined with itself a turn later."""
    params = ctx.eqn.params
    cond_consts, body_consts, start = while_operands(ctx.eqn, operands)
    first = len(cond_consts) + len(body_consts)
    carry = _as_in_a_loop(ctx, first, start)

    def turn(carried: Sequence[Traced]) -> list[LabelledProgram]:
        return [ctx.walk(params["body_jaxpr"], [*body_consts, *carried])]

    carried, (body,) = _loop(ctx, turn, carry)
    test = ctx.walk(params["cond_jaxpr"], [*cond_consts, *carried])
    ctx.inner = (test, body)
    _fit_carry(ctx, first, carried)
    return carried


def _as_in_a_loop(ctx: Context, first: int, carry: Sequence[Traced]) -> list[Traced]:
    """What is carried may be nan a turn later if anything that it meets may be."""
    if not any(operand.may_be_nan for operand in ctx.operands):
        return list(carry)
    atoms = ctx.eqn.invars[first : first + len(carry)]
    return [
        dataclasses.replace(value, may_be_nan=has_tangent(atom))
        for value, atom in zip(carry, atoms, strict=True)
    ]


def _fit_carry(ctx: Context, first: int, carried: Sequence[Traced]) -> None:
    for index, value in enumerate(carried):
        for axis, labels in enumerate(value.labels):
            ctx.fits[first + index, axis] = labels


def _loop(
    ctx: Context,
    turn: Callable[[Sequence[Traced]], list[LabelledProgram]],
    start: Sequence[Traced],
) -> tuple[list[Traced], list[LabelledProgram]]:
    """Walks programs that give back what they are given, until that tells nothing new.

    Args:
      ctx: The equation.
      turn: Walks them, all with what is carried.
      start: What is carried at first.
    """
    mark = ctx.table.mark()
    carried = [_not_constant(value) for value in start]
    for _ in range(_MAX_TURNS):
        ctx.table.forget(mark)
        programs = turn(carried)
        after = carried
        for program in programs:
            after = [
                _after_a_turn(ctx, before, result)
                for before, result in zip(after, program.results, strict=False)
            ]
        is_stable = all(_is_same(a, b) for a, b in zip(carried, after, strict=True))
        carried = after
        if is_stable:
            break
    else:  # not known to happen; nothing is claimed then
        ctx.table.forget(mark)
        carried = [frozen_value(value.shape, "a loop") for value in start]
        programs = turn(carried)
        for result in (x for p in programs for x in p.results[: len(carried)]):
            for labels in result.labels:
                ctx.freeze(labels, "is carried through a loop that does not settle")
    for before, value in zip(start, carried, strict=True):
        for own, labels in zip(before.labels, value.labels, strict=True):
            ctx.join(own, labels)
    return carried, programs


def _not_constant(value: Traced) -> Traced:
    return dataclasses.replace(
        value,
        constant=None,
        number=None,
        summed=None,
        shared={},
        maximum_of=None,
        transposed=None,
        peaks=None,
        masked=None,
        filled=None,
        finite=None,
    )


def _after_a_turn(ctx: Context, before: Traced, result: Traced) -> Traced:
    """Joins what is carried with what comes back."""
    labels = []
    for own, new in zip(before.labels, result.labels, strict=True):
        needs_own = (own == UNIFORM) & (new != UNIFORM)
        if needs_own.any():
            fresh = ctx.table.fresh(len(own))
            own = np.where(needs_own, np.where(new == FROZEN, FROZEN, fresh), own)
        ctx.join(own, new)
        if has_channels(own[new == FROZEN]):
            own = np.where(new == FROZEN, FROZEN, own)
        labels.append(own)
    dead = [same_value([a, b]) for a, b in zip(before.dead, result.dead, strict=True)]
    return dataclasses.replace(
        before,
        labels=tuple(labels),
        dead=tuple(dead),
        is_given=before.is_given and result.is_given,
        is_fixed=before.is_fixed and result.is_fixed,
        is_positive=before.is_positive and result.is_positive,
        at_least=before.at_least if result.at_least >= before.at_least else -math.inf,
    )


def _is_same(a: Traced, b: Traced) -> bool:
    same_labels = all(
        np.array_equal(x, y) for x, y in zip(a.labels, b.labels, strict=True)
    )
    # repr, since nan is not equal to itself
    same_dead = repr(a.dead) == repr(b.dead)
    same_source = a.is_given == b.is_given and a.is_fixed == b.is_fixed
    same_bounds = a.is_positive == b.is_positive and a.at_least == b.at_least
    return same_labels and same_dead and same_source and same_bounds


def linear_solve(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """A solver, the map that it inverts, and both transposed keep the same axes apart.

    The latter three are what derivatives are made of.
    """
    known = [dataclasses.replace(x, shared={}) for x in operands]
    programs, right = linear_solve_operands(ctx.eqn, known)
    first = len(operands) - len(right)

    def turn(carried: Sequence[Traced]) -> list[LabelledProgram]:
        return [ctx.walk(each, [*consts, *carried]) for each, consts in programs]

    carried, walked = _loop(ctx, turn, _as_in_a_loop(ctx, first, right))
    ctx.inner = tuple(walked)
    _fit_carry(ctx, first, carried)
    solutions = [_of_linear(x) for x in carried]
    return [*solutions, *walked[0].results[len(right) :]]


def _of_linear(x: Traced) -> Traced:
    """What comes out of a linear map; of other numbers than 0, nothing is known."""
    dead = tuple(value if value == 0 or is_nan(value) else None for value in x.dead)
    return Traced(x.labels, dead, origin=x.origin)


def linear_call(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """A linear function, and what its caller says is its transpose."""
    known = [dataclasses.replace(x, shared={}) for x in operands]
    ctx.inner = (ctx.walk(called_program(ctx.eqn), known),)
    results = [_of_linear(x) for x in ctx.inner[0].results]
    try:
        ctx.notes["transpose"] = label_linear_call(ctx, results)
    except Exception:  # somebody else's code, which may fail in any way
        return freeze_all(ctx, *operands, text="has a transpose that cannot be traced")
    return results


def cond(ctx: Context, which: Traced, *operands: Traced) -> Sequence[Traced]:
    """Results of all branches are joined."""
    operands = tuple(_not_constant(x) for x in operands)
    ctx.inner = tuple(
        ctx.walk(branch, operands) for branch in ctx.eqn.params["branches"]
    )
    return [
        _either(ctx, values)
        for values in zip(*(branch.results for branch in ctx.inner), strict=True)
    ]


def _either(ctx: Context, values: Sequence[Traced]) -> Traced:
    labels = list(values[0].labels)
    for other in values[1:]:
        labels = [ctx.join(a, b) for a, b in zip(labels, other.labels, strict=True)]
    dead = [same_value(some) for some in zip(*(x.dead for x in values), strict=True)]
    return Traced(tuple(labels), tuple(dead))
