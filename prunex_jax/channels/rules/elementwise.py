"""Rules of operations that treat every position alike."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from prunex_jax.channels.context import Context, freeze_all
from prunex_jax.channels.labels import FROZEN, Shared, Traced, frozen_axis, has_channels
from prunex_jax.channels.numbers import (
    JUMPS,
    SMOOTH_ABOVE_ZERO,
    Value,
    converted,
    has_slopes_above,
    is_exact,
    is_nan,
    same_value,
    value_at_nan,
    value_of,
)

_SUMS = {"add", "add_any", "sub"}
# (value of every operand, whether it is made of parameters) -> value of the result
_Compute = Callable[[Sequence[Value], Sequence[bool]], Value]


def elementwise(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Joins the axes of all operands; the rule of everything in `ELEMENTWISE`."""
    if ctx.name in ("div", "mul") and any(x.summed for x in operands):
        _note_mean(ctx, operands)
    _note_ties(ctx, operands)
    dtypes = [atom.aval.dtype for atom in ctx.eqn.invars]  # type: ignore[attr-defined]

    is_missing = [operand.may_be_nan for operand in operands]

    is_smooth = ctx.name in SMOOTH_ABOVE_ZERO
    is_safe = [
        is_smooth and (x.is_positive or has_slopes_above(x.at_least, dtype))
        for x, dtype in zip(operands, dtypes, strict=True)
    ]
    is_odd = [False] * len(operands)
    is_never = ctx.name == "lt" and _is_at_least(*operands)
    if ctx.name == "log1p":
        is_safe[0] |= operands[0].at_least >= 0
    elif ctx.name == "pow":
        is_safe[1] = operands[0].is_positive
        is_odd[0] = operands[0].constant is not None and not operands[0].is_positive
    elif ctx.name in ("div", "rem"):
        is_odd[1] = _has_zeros(operands[1])

    def compute(values: Sequence[Value], is_risky: Sequence[bool]) -> Value:
        if is_never:
            return 0.0
        risky = [a and not b for a, b in zip(is_risky, is_safe, strict=True)]
        if ctx.name in ("div", "pow", "rem"):
            risky = [
                a or (odd and value is None)
                for a, odd, value in zip(risky, is_odd, values, strict=True)
            ]
        value = value_of(ctx.name, values, risky, dtypes)
        if not any(is_missing):
            return value
        at_nan = value_at_nan(ctx.name, values, is_missing)
        return value if is_nan(at_nan) else same_value([value, at_nan])

    return [_joined(ctx, operands, compute)]


def _is_at_least(x: Traced, other: Traced) -> bool:
    """Whether nothing is below a constant; nan never is."""
    known = other.constant is not None and np.asarray(other.constant.small)
    return known is not False and bool((known <= x.at_least).all())


def _note_ties(ctx: Context, operands: Sequence[Traced]) -> None:
    """Says which channels are added up, and which are those of a scale or the like."""
    if len(operands) != 2:
        return
    one, other = operands
    if one.is_fixed or other.is_fixed:
        book = ctx.table.applied
    elif ctx.name in _SUMS:
        book = ctx.table.added
    else:
        return
    for left, right in zip(one.labels, other.labels, strict=False):
        if len(left) == len(right):
            ctx.table.note(book, left, right)


def _has_zeros(x: Traced) -> bool:
    """Whether a constant is zero somewhere."""
    if x.constant is None or x.is_positive or x.number is not None:
        return False
    return bool((np.asarray(x.constant.value) == 0).any())


def _note_mean(ctx: Context, operands: Sequence[Traced]) -> None:
    """A sum over channels, divided by their number, is their mean."""
    for index, (x, other) in enumerate([operands, operands[::-1]]):
        if x.summed is None or other.number is None:
            continue
        factor = x.summed.total if ctx.name == "div" else 1 / x.summed.total
        is_divisor = index == 0 or ctx.name == "mul"
        if is_divisor and math.isclose(other.number, factor, rel_tol=1e-6):
            ctx.table.means.append(x.summed)
            ctx.notes["mean_of"] = (index, x.summed)


def integer_pow(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The rule of powers with an exponent that is part of the program."""
    exponent = ctx.eqn.params["y"]

    def compute(values: Sequence[Value], is_risky: Sequence[bool]) -> Value:
        if exponent == 0:
            return 1.0
        if exponent > 0 and values[0] is None:
            return None
        return value_of("pow", [values[0], float(exponent)], [*is_risky, False])

    return [_joined(ctx, (x,), compute)]


def convert(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The rule of changes of type."""
    dtype = ctx.eqn.params["new_dtype"]

    def compute(values: Sequence[Value], _: Sequence[bool]) -> Value:
        value = converted(values[0], dtype)
        if not x.may_be_nan or jax.dtypes.issubdtype(dtype, np.inexact):
            return value
        return same_value([value, float(dtype == np.bool_)])

    return [dataclasses.replace(_joined(ctx, (x,), compute), summed=x.summed)]


def select(ctx: Context, which: Traced, *cases: Traced) -> Sequence[Traced]:
    """The rule of choices between cases, position by position."""

    def compute(values: Sequence[Value], is_risky: Sequence[bool]) -> Value:
        chosen, *others = values
        # The slope of what is not chosen is 0 times what is perhaps none.
        if any(
            is_nan(x) and risky for x, risky in zip(others, is_risky[1:], strict=True)
        ):
            return math.nan
        if chosen is not None and math.isfinite(chosen):
            return others[int(chosen)]
        return same_value(others)

    return [_joined(ctx, (which, *cases), compute)]


def bitcast(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The rule of reading the same bits as another type."""
    if ctx.out_shape() != x.shape:
        return freeze_all(ctx, x)
    return [_joined(ctx, (x,), lambda values, _: None)]


def _joined(ctx: Context, operands: Sequence[Traced], compute: _Compute) -> Traced:
    """Joins axis by axis; operands without axes count on every axis."""
    shape = ctx.out_shape()
    if not shape:
        numbers = [operand.number for operand in operands]
        return Traced((), (), compute(numbers, [False] * len(numbers)))
    labels: list[np.ndarray] = []
    dead: list[Value] = []
    shared: dict[int, Shared] = {}
    causes: dict[str, str] = {}
    count = len(operands)
    for axis, size in enumerate(shape):
        frozen = frozen_axis(size)
        if all(not x.labels or x.labels[axis] is frozen for x in operands):
            labels.append(frozen)
            dead.append(None)
            continue
        values: list[Value] = []
        is_risky = []
        with_axis = []
        for index, operand in enumerate(operands):
            own = operand.labels[axis] if operand.labels else None
            if own is not None and len(own) == size:
                with_axis.append((index, axis))
                values.append(operand.dead[axis])
                is_risky.append(not operand.is_given and has_channels(own))
            else:  # without this axis, or with length 1: the same for all channels
                values.append(operand.number)
                is_risky.append(False)
        joined = ctx.join_axes(*with_axis)
        is_fixed = joined is frozen or not (joined != FROZEN).any()
        labels.append(joined)
        dead.append(None if is_fixed else compute(values, is_risky))
        if not is_fixed and not is_exact(dead[-1]) and not is_nan(dead[-1]):
            own_axes = [axis if (i, axis) in with_axis else None for i in range(count)]
            found = None if _may_jump(ctx, own_axes) else ctx.share(*own_axes)
            shared.update({axis: found} if found else {})
            if found is None:
                causes.update(_difference(operands, axis))
        elif not is_fixed and is_nan(dead[-1]) and not any(map(is_nan, values)):
            causes["broken"] = _break(ctx)
    return Traced(tuple(labels), tuple(dead), shared=shared, causes=causes)


def _difference(operands: Sequence[Traced], axis: int) -> dict[str, str]:
    """Says which constant gives dead channels of an axis different values."""
    for x in operands:
        is_table = x.constant is not None and x.labels and x.dead[axis] is None
        if is_table and len(x.labels[axis]) > 1:
            text = (
                f"a constant of shape {x.shape} differs from channel to channel; give "
                "it to the function among the parameters, which are cut alike"
            )
            return {"different": text}
    return {}


def _break(ctx: Context) -> str:
    """Says what is not finite of removed channels, or has no slope."""
    return f"{ctx.name}{ctx.at} may be given zero or less of them; add such as 1e-12"


def _may_jump(ctx: Context, axes: Sequence[int | None]) -> bool:
    """Whether a rounding error may throw a constant from one number to another.

    What varies may be thrown too, but that is so for channels that are kept as well.
    """
    dtype = ctx.eqn.params.get("new_dtype", np.bool_)
    if ctx.name not in JUMPS or jax.dtypes.issubdtype(dtype, np.inexact):
        return False
    if any(x.may_be_nan for x in ctx.operands):  # where numbers are said to be known
        return True
    pairs = [(x, a) for x, a in zip(ctx.operands, axes, strict=True) if a is not None]
    return any(
        not x.shared[axis].varies if axis in x.shared else not is_exact(x.dead[axis])
        for x, axis in pairs
    )
