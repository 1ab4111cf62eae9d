"""What values dead channels have, and the rules of operations without axes.

A dead channel may be removed where it is read with weight zero, which needs its value
to be finite, or summed up, which needs it to be zero. So the number that a dead channel
has is carried through the program: weights are 0, exp(0) is 1, 0 / 0 is none.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.channels.context import Context, freeze_all
from prunex_jax.channels.labels import (
    FROZEN,
    Traced,
    has_channels,
    same_value,
)


def _round(x: np.float32) -> float | None:
    return 0.0 if x == 0 else None  # halves depend on a parameter


def _of(fn: Callable[[float], float]) -> Callable[[np.float32], float]:
    return lambda x: fn(float(x))


# Operations that treat every position alike, with what they compute; None where only
# "some finite number" is said, because it is seldom needed or depends on the type.
ELEMENTWISE: Mapping[str, Callable[..., Any] | None] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "add": np.add,
    "add_any": np.add,
    "and": None,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clz": None,
    "complex": None,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "conj": np.positive,
    "copy": np.positive,
    "copy_p": np.positive,
    "cos": np.cos,
    "cosh": np.cosh,
    "div": np.divide,
    "eq": np.equal,
    "erf": _of(math.erf),
    "erfc": _of(math.erfc),
    "erf_inv": lambda x: 0.0 if x == 0 else None,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "imag": lambda x: 0.0,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "nextafter": None,
    "not": None,
    "or": None,
    "population_count": None,
    "pow": np.power,
    "real": np.positive,
    "reduce_precision": np.positive,
    "rem": np.fmod,
    "round": _round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "shift_left": None,
    "shift_right_arithmetic": None,
    "shift_right_logical": None,
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": np.positive,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    "xor": None,
}

# Operations that are not finite for some finite operands, and the operands in question.
_SINGULAR: Mapping[str, tuple[int, ...]] = {
    "acos": (0,),
    "acosh": (0,),
    "asin": (0,),
    "atanh": (0,),
    "div": (1,),
    "log": (0,),
    "log1p": (0,),
    "log2": (0,),
    "pow": (0,),
    "rem": (1,),
    "rsqrt": (0,),
    "sqrt": (0,),
    "tan": (0,),
}


def value_of(
    name: str, values: Sequence[float | None], is_risky: Sequence[bool] = ()
) -> float | None:
    """Computes what an operation makes of values, as far as that is known.

    Args:
      name: A key of `ELEMENTWISE`.
      values: As in `Traced.dead`, one per operand.
      is_risky: For each operand that is "some finite number", whether nobody vouches
        that the operation is finite there.
    Returns:
      A number, None for some finite number, nan for perhaps none.
    Example:
      >>> value_of('mul', [0.0, None]), value_of('div', [0.0, 0.0])
      (0.0, nan)
    """
    if any(value is not None and math.isnan(value) for value in values):
        return math.nan
    compute = ELEMENTWISE[name]
    if compute is None:
        is_zero = name == "and" and 0.0 in values
        return 0.0 if is_zero else None
    if None in values:
        return _value_of_unknown(name, values, is_risky)
    with np.errstate(all="ignore"):
        value = compute(*map(np.float32, values))
    return None if value is None else float(value)


def _value_of_unknown(
    name: str, values: Sequence[float | None], is_risky: Sequence[bool]
) -> float | None:
    if not all(value is None or math.isfinite(value) for value in values):
        return math.nan
    for operand in _SINGULAR.get(name, ()):
        if values[operand] is None and (is_risky and is_risky[operand]):
            return math.nan
    if name in ("div", "rem"):
        if values[1] == 0:
            return math.nan
        return 0.0 if values[0] == 0 else None
    if name == "pow" and values[0] is not None and values[0] <= 0:
        return math.nan
    return 0.0 if name == "mul" and 0.0 in values else None


def elementwise(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Joins the axes of all operands; the rule of everything in `ELEMENTWISE`."""
    if ctx.name in ("div", "mul") and any(x.summed for x in operands):
        _note_mean(ctx, operands)
    return [_joined(ctx, operands, lambda *args: value_of(ctx.name, *args))]


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

    def compute(
        values: Sequence[float | None], is_risky: Sequence[bool]
    ) -> float | None:
        if exponent >= 0 and values[0] is None:
            return None
        return value_of("pow", [values[0], float(exponent)], [*is_risky, False])

    return [_joined(ctx, (x,), compute)]


def convert(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The rule of changes of type."""
    dtype = ctx.eqn.params["new_dtype"]

    def compute(values: Sequence[float | None], _: Sequence[bool]) -> float | None:
        (value,) = values
        if value is None or not math.isfinite(value):
            return value
        if dtype == np.bool_:
            return float(value != 0)
        return float(int(value)) if jax.dtypes.issubdtype(dtype, np.integer) else value

    return [dataclasses.replace(_joined(ctx, (x,), compute), summed=x.summed)]


def select(ctx: Context, which: Traced, *cases: Traced) -> Sequence[Traced]:
    """The rule of choices between cases, position by position."""

    def compute(values: Sequence[float | None], _: Sequence[bool]) -> float | None:
        chosen, *others = values
        if chosen is not None and math.isfinite(chosen):
            return others[int(chosen)]
        return same_value(others)

    return [_joined(ctx, (which, *cases), compute)]


def bitcast(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The rule of reading the same bits as another type."""
    if ctx.out_shape() != x.shape:
        return freeze_all(ctx, x)
    return [_joined(ctx, (x,), lambda values, _: None)]


def _joined(
    ctx: Context,
    operands: Sequence[Traced],
    compute: Callable[[Sequence[float | None], Sequence[bool]], float | None],
) -> Traced:
    """Joins axis by axis; operands without axes count on every axis."""
    shape = ctx.out_shape()
    if not shape:
        numbers = [operand.number for operand in operands]
        return Traced((), (), compute(numbers, [False] * len(numbers)))
    labels: list[np.ndarray] = []
    dead: list[float | None] = []
    for axis, size in enumerate(shape):
        has_axis = [bool(x.labels) and len(x.labels[axis]) == size for x in operands]
        joined = ctx.join_axes(*((i, axis) for i, has in enumerate(has_axis) if has))
        values: list[float | None] = []
        is_risky = []
        for operand, has in zip(operands, has_axis, strict=True):
            if has:
                values.append(operand.dead[axis])
                own = operand.labels[axis]
                is_risky.append(not operand.is_given and has_channels(own))
            else:  # without this axis, or with length 1: the same for all channels
                values.append(operand.number)
                is_risky.append(False)
        labels.append(joined)
        is_fixed = bool((joined == FROZEN).all())
        dead.append(None if is_fixed else compute(values, is_risky))
    return Traced(tuple(labels), tuple(dead))
