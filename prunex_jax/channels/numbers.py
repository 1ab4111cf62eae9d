"""What values dead channels have, as far as it can be known.

A dead channel may be removed where it is read with weight zero, which needs its value
to be finite, or where it is zero and summed up, or where its value is known and can be
counted. So the number that a dead channel has is carried through the program: weights
are 0, exp(0) is 1, 0 / 0 is none. What is no number, but one value for all dead
channels, is a `labels.Shared`.

A value is a number, None for some finite number, or nan for perhaps none: not finite,
or without a finite derivative, which would make every gradient of the network nan.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.jaxprs import MESH_CASTS

Value = float | None

# Nearer than this, relative to the operands, two rounded numbers may be equal.
_NEAR = 1e-3


class _Rounded(float):
    """A number that is known up to rounding: another program may round otherwise."""


def _round(x: float) -> float | None:
    is_half = abs(x - math.trunc(x)) == 0.5  # goes up, away or to even, as asked for
    return None if is_half else round(x)


def _erf_inv(x: float) -> float | None:
    if abs(x) >= 1:
        return math.inf
    return 0.0 if x == 0 else None


def _reduce_precision(x: float) -> float | None:
    is_kept = x in _PLAIN or not math.isfinite(x)
    return x if is_kept else None  # depends on how few bits are asked for


def _atan2(y: float, x: float) -> float | None:
    return None if y == 0 and x < 0 else math.atan2(y, x)  # the sign of 0 decides


def _sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def _bessel_i1e(x: float) -> float | None:
    return 0.0 if x == 0 else None


def _in_total_order(compare: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison that tells -0 from 0, which are one number here."""
    return lambda x, y: None if x == y == 0 else compare(x, y)


def _horner(x: float, *coefficients: float) -> float:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


# Operations that treat every position alike, with what they compute; None where only
# "some finite number" is said.
ELEMENTWISE: Mapping[str, Callable[..., Any] | None] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "add": np.add,
    "add_any": np.add,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": _atan2,
    "atanh": np.arctanh,
    "bessel_i0e": None,
    "bessel_i1e": _bessel_i1e,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: min(max(x, low), high),
    "conj": np.positive,
    "copy": np.positive,
    "copy_p": np.positive,
    "cos": np.cos,
    "cosh": np.cosh,
    "div": np.divide,
    "eq": np.equal,
    "eq_to": _in_total_order(np.equal),
    "erf": math.erf,
    "erf_inv": _erf_inv,
    "erfc": math.erfc,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "imag": lambda x: 0.0,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "le_to": _in_total_order(np.less_equal),
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "logistic": _sigmoid,
    "lt": np.less,
    "lt_to": _in_total_order(np.less),
    "max": max,
    "min": min,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "one_minus_square": lambda x: 1 - x * x,
    "polynomial": _horner,
    "pow": np.power,
    "real": np.positive,
    "reduce_precision": _reduce_precision,
    "rem": np.fmod,
    "round": _round,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": np.positive,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    **dict.fromkeys(("and", "clz", "complex", "digamma", "lgamma", "nextafter", "not")),
    **dict.fromkeys(("mulhi", "or", "population_count", "xor")),
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical")),
}

# Operations that are not finite for some finite operands, and the operands in question.
_SINGULAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("acos", "acosh", "asin", "atanh", "tan"), (0,)),
    **dict.fromkeys(("cbrt", "pow", "rsqrt", "sqrt"), (0,)),
    **dict.fromkeys(("log", "log1p", "log2", "lgamma", "digamma", "erf_inv"), (0,)),
    **dict.fromkeys(("div", "rem"), (1,)),
    "atan2": (0, 1),
}

# Those of them that are finite above zero, as are their slopes.
SMOOTH_ABOVE_ZERO = {
    *("atan2", "cbrt", "digamma", "div", "lgamma", "log", "log1p", "log2", "pow"),
    *("rsqrt", "sqrt"),
}

# Operations whose slope is a power of the last operand, which overflows near zero.
_SLOPE_POWERS: Mapping[str, float] = {"div": -2.0, "rsqrt": -1.5}

# Operations whose result is exact if it can be written down in the type of the result.
_ARITHMETIC = {
    *("abs", "add", "add_any", "ceil", "clamp", "conj", "copy", "copy_p", "div"),
    *("floor", "imag", "is_finite", "max", "min", "mul", "neg", "one_minus_square"),
    *("real", "rem", "round", "sign", "square", "stop_gradient", "sub"),
    *("eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "ne"),
}
_COMPARISONS = {"eq", "eq_to", "ge", "gt", "le", "le_to", "lt", "lt_to", "ne"}
_STEPS = {"ceil", "floor", "nextafter", "rem", "round"}
# Operations that a rounding error can throw from one number to another.
JUMPS = {
    *_STEPS,
    *_COMPARISONS,
    *("bitcast_convert_type", "convert_element_type", "is_finite", "pow", "sign"),
}
# Numbers that functions such as exp, cos and tanh take and give without rounding.
_PLAIN = {-1.0, 0.0, 0.5, 1.0}
_EXACT_FUNCTIONS = set(ELEMENTWISE) - _ARITHMETIC - {"cosh"}


def is_nan(value: Value) -> bool:
    """Whether a value is perhaps none."""
    return value is not None and math.isnan(value)


def is_exact(value: Value) -> bool:
    """Whether a value is a number that every program computes alike."""
    return (
        value is not None and math.isfinite(value) and not isinstance(value, _Rounded)
    )


def value_of(
    name: str,
    values: Sequence[Value],
    is_risky: Sequence[bool] = (),
    dtypes: Sequence[Any] = (),
) -> Value:
    """Computes what an operation, a key of `ELEMENTWISE`, makes of values.

    Args:
      name: The operation.
      values: One per operand.
      is_risky: For each operand, whether it is made of parameters, so that nobody
        vouches that the operation is finite and has a derivative there.
      dtypes: Type of every operand; float32 if not given.
    Example:
      >>> value_of('mul', [0.0, None]), value_of('div', [0.0, 0.0])
      (0.0, nan)
    """
    if any(is_nan(value) for value in values):
        return math.nan
    risky = list(is_risky) or [False] * len(values)
    result = _computed(name, values, risky, dtypes)
    # Of infinity, even where it becomes a number again, the slope is none.
    is_lost = result is not None and math.isinf(result) and any(risky)
    return math.nan if is_lost else result


def _computed(
    name: str, values: Sequence[Value], is_risky: Sequence[bool], dtypes: Sequence[Any]
) -> Value:
    dtype = dtypes[0] if dtypes else np.float32
    if _has_no_derivative(name, values, is_risky, dtype):
        return math.nan
    compute = ELEMENTWISE[name]
    is_whole = any(_is_whole(dtype) for dtype in dtypes)
    if is_whole and name in ("div", "rem") and None in values:
        return None  # by 0, it is some number or other
    if compute is None or None in values:
        return _value_of_unknown(name, values, is_risky)
    known = [value for value in values if value is not None]
    if is_whole:
        return _value_of_integers(name, compute, known, dtypes)
    if any(isinstance(value, _Rounded) for value in known):
        result = _value_of_rounded(name, compute, known)
    else:
        result = _value_of_exact(name, compute, known, dtype)
    if isinstance(result, _Rounded) and not _is_precise(dtype):
        is_finite = math.isfinite(_in_range(result, dtype) or 0.0)
        return None if is_finite else math.nan
    return _in_range(result, dtype)


def _in_range(value: Value, dtype: Any) -> Value:
    """The value, as far as it can be one of its type: neither too large nor small."""
    if value is None or not jax.dtypes.issubdtype(dtype, np.floating):
        return value
    limits = jax.numpy.finfo(dtype)
    if 0 < abs(value) < float(limits.tiny):
        return None
    if abs(value) <= float(limits.max):
        return value
    with np.errstate(all="ignore"):
        return float(np.asarray(float(value)).astype(dtype))  # some have no infinity


def _is_whole(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, np.integer)


def _compute(compute: Callable[..., Any], values: Sequence[float]) -> Value:
    with np.errstate(all="ignore"):
        try:
            result = compute(*(np.float64(value) for value in values))
        except (OverflowError, ZeroDivisionError, ValueError):
            return math.nan
    return None if result is None else float(result)


def _is_precise(dtype: Any) -> bool:
    """Whether numbers of a type, rounded a few times, are told apart by `_NEAR`."""
    if not jax.dtypes.issubdtype(dtype, np.floating):
        return True
    return 64 * float(jax.numpy.finfo(dtype).eps) < _NEAR


def _value_of_exact(
    name: str, compute: Callable[..., Any], values: Sequence[float], dtype: Any
) -> Value:
    result = _compute(compute, values)
    if result is None or not math.isfinite(result):
        return result
    if name in _ARITHMETIC:
        is_exact = _fits(result, dtype)
        if name == "div":
            is_exact = is_exact and result * values[1] == values[0]
    else:
        is_exact = {*values, result} <= _PLAIN or not all(map(math.isfinite, values))
        is_exact = is_exact and name in _EXACT_FUNCTIONS
        is_exact = is_exact or (name == "pow" and values[0] in (0.0, 1.0))
    return result if is_exact else _Rounded(result)


def _fits(number: float, dtype: Any) -> bool:
    """Whether a number can be written down in a type as it is."""
    if not jax.dtypes.issubdtype(dtype, np.floating):
        return number == int(number)
    with np.errstate(all="ignore"):
        return float(np.asarray(number).astype(dtype)) == number


def _value_of_integers(
    name: str, compute: Callable[..., Any], values: Sequence[float], dtypes: Any
) -> Value:
    """Whole numbers wrap around, and are divided without a remainder."""
    if name not in _ARITHMETIC:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    if name in ("div", "rem"):
        if values[1] == 0:
            return math.nan
        quotient = math.trunc(values[0] / values[1])
        return float(quotient if name == "div" else math.fmod(*values))
    result = _compute(compute, values)
    if result is None or name in _COMPARISONS:
        return result
    return result if _is_inside(result, dtypes[-1]) else None


def _is_inside(number: float, dtype: Any) -> bool:
    """Whether a whole number can be one of a type of whole numbers."""
    bits = jax.numpy.iinfo(dtype)
    return int(bits.min) <= number <= int(bits.max)


def _value_of_rounded(
    name: str, compute: Callable[..., Any], values: Sequence[float]
) -> Value:
    size = max(abs(value) for value in values)
    if name in _STEPS:
        return None
    if name in ("max", "min", "clamp", *_COMPARISONS):
        ordered = sorted(values)
        is_clear = all(b - a > _NEAR * size for a, b in itertools.pairwise(ordered))
        if name in _COMPARISONS:
            return _compute(compute, values) if is_clear else None
        chosen = compute(*values)
        return chosen if is_clear else _Rounded(chosen)
    result = _compute(compute, values)
    if result is None or not math.isfinite(result):
        return None if result is None else math.nan
    if name in ("sign", "is_finite") or (name == "mul" and 0.0 in values):
        return result
    if name == "div" and values[0] == 0:
        return result  # the divisor is no 0, or the result would not be finite
    if name in ("add", "add_any", "sub") and abs(result) <= _NEAR * size:
        return None
    return None if result == 0 else _Rounded(result)


def _value_of_unknown(
    name: str, values: Sequence[Value], is_risky: Sequence[bool]
) -> Value:
    if not all(value is None or math.isfinite(value) for value in values):
        return None if _is_no_limit(name, values, is_risky) else math.nan
    is_hidden = ELEMENTWISE[name] is None
    for operand in _SINGULAR.get(name, ()):
        value = values[operand]
        if value is None and is_risky[operand]:
            return math.nan
        if value is not None and is_hidden and value <= 0:  # a pole, perhaps
            return math.nan
    if name in ("div", "rem"):
        if values[1] == 0:
            return math.nan
        return 0.0 if values[0] == 0 else None
    if name == "pow" and values[0] is not None and values[0] <= 0:
        return math.nan
    return 0.0 if name in ("and", "mul") and 0.0 in values else None


def _is_no_limit(name: str, values: Sequence[Value], is_risky: Sequence[bool]) -> bool:
    """Whether a finite number is compared with an infinite one that never wins."""
    never = {"max": -math.inf, "min": math.inf}.get(name)
    return never is not None and all(
        value is None or math.isfinite(value) or (value == never and not risky)
        for value, risky in zip(values, is_risky, strict=True)
    )


def _is_steep(value: Value, power: float, dtype: Any) -> bool:
    """Whether a power of a small number, not zero, is too large for its type."""
    if not value or not jax.dtypes.issubdtype(dtype, np.floating):
        return False
    largest = float(jax.numpy.finfo(dtype).max)
    return abs(value) < largest ** (1 / power)


def _has_no_derivative(
    name: str, values: Sequence[Value], is_risky: Sequence[bool], dtype: Any
) -> bool:
    """Whether the slope is infinite where a parameter can move the operand."""
    if not any(is_risky):
        return False
    if name in _SLOPE_POWERS and is_risky[-1]:
        return _is_steep(values[-1], _SLOPE_POWERS[name], dtype)
    first = values[0]
    if name in ("cbrt", "sqrt"):
        return first == 0
    if name in ("acos", "asin"):
        return first in (-1.0, 1.0)
    if name == "acosh":
        return first == 1
    if name == "atan2":
        return first == 0 and values[1] == 0
    if name == "pow":  # the slope by the exponent is that of a logarithm
        is_steep = first == 0 and not (values[1] or 0.0) >= 1
        is_bent = first is None or first < 0
        return (is_risky[0] and is_steep) or (is_risky[1] and is_bent)
    return False


def value_of_logaddexp(values: Sequence[Value], dtype: Any) -> Value:
    """What `jnp.logaddexp`, as in softplus, makes of two values; see `value_of`.

    Its program chooses between two cases by whether an operand is nan, and so says
    less of numbers than it could.
    """
    if not jax.dtypes.issubdtype(dtype, np.floating) or not _is_precise(dtype):
        return None
    known = [x for x in values if x is not None and math.isfinite(x)]
    if len(known) < len(values):
        return None
    result = float(np.logaddexp(known[0], known[1]))
    is_near = abs(result) <= _NEAR * max(map(abs, known))
    return None if is_near else _in_range(_Rounded(result), dtype)


# Operations that give numbers above zero of such numbers: of all of their operands, of
# the first one, or of any. What is too small to be told from zero is not looked at.
_KEEP_POSITIVE = {
    "abs",
    *("add", "broadcast_in_dim", "concatenate", "convert_element_type", "copy"),
    *("cbrt", "div", "dot_general", "integer_pow", "min", "mul", "name", "reduce_max"),
    *("reduce_min", "reduce_prod", "reduce_sum", "reduce_window_max", "reshape", "rev"),
    *("rsqrt", "slice", "sqrt", "square", "squeeze", "tile"),
    "transpose",
    *MESH_CASTS,
}


def may_be_infinite(name: str) -> bool:
    """Whether an operation gives numbers that are not finite where rules say nothing.

    Such as those of finite ones, or those that are left between what is written.
    """
    return name in _SINGULAR or name.startswith("scatter")


def is_positive(name: str, operands: Sequence[bool]) -> bool:
    """Whether an operation gives numbers above zero, of operands of which some are."""
    if name == "max":
        return any(operands)
    if name == "pow":
        return operands[0]
    return name in _KEEP_POSITIVE and all(operands)


# Operations that give no numbers below zero, and those that do not either where no
# operand is below zero.
_NEVER_NEGATIVE = {
    *("abs", "erfc", "exp", "exp2", "iota", "logistic", "rsqrt", "square"),
}
_KEEP_NOT_NEGATIVE = {
    *("cbrt", "cumprod", "cumsum", "div", "dot_general", "erf", "expm1", "integer_pow"),
    *("log1p", "pow", "reduce_prod", "reduce_sum", "scatter-add", "scatter-mul"),
    *("scatter_add", "sign", "tanh"),
}
# Operations that give numbers that are among those of their operands.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "copy", "cummax", "cummin", "dynamic_slice"),
    *("dynamic_update_slice", "gather", "min", "name", "reduce_max", "reduce_min"),
    *("reshape", "rev", "scatter", "scatter-max", "scatter-min", "slice", "split"),
    *("squeeze", "stop_gradient", "tile", "transpose"),
    *MESH_CASTS,
}


# Of what looks numbers up or writes them, the operands that are no positions.
_BY_NUMBER: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("dynamic_slice", "gather"), (0,)),
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min"), (0, 2)),
    **dict.fromkeys(("scatter-mul", "scatter_add"), (0, 2)),
}


def bound_of(name: str, bounds: Sequence[float], params: Mapping[str, Any]) -> float:
    """A number that no result of an operation is below, where it is not nan.

    Args:
      name: The operation.
      bounds: A number for each operand that it is not below.
      params: Parameters of the operation.
    Example:
      >>> bound_of('add', [bound_of('exp', [-math.inf], {}), 0.5], {})
      0.5
    """
    if name in _BY_NUMBER:
        bounds = [bounds[i] for i in _BY_NUMBER[name]]
        if params.get("fill_value") is not None:
            bounds.append(float(params["fill_value"]))
    lowest = min(bounds, default=-math.inf)
    if name in ("add", "add_any"):  # of numbers of two signs, rounding may take all
        return sum(bounds) if lowest >= 0 else -math.inf
    if name == "max":
        return max(bounds)
    if name == "sqrt":
        return math.sqrt(max(lowest, 0.0))
    if name == "mul" and lowest >= 0:
        return math.prod(bounds)
    if name == "select_n":
        return min(bounds[1:])
    if name == "convert_element_type":
        return _bound_as(lowest, params["new_dtype"])
    if name in _MOVES:
        return lowest
    is_even = name == "integer_pow" and params["y"] % 2 == 0
    if name in _NEVER_NEGATIVE or is_even:
        return 0.0
    return 0.0 if name in _KEEP_NOT_NEGATIVE and lowest >= 0 else -math.inf


def _bound_as(bound: float, dtype: Any) -> float:
    if not jax.dtypes.issubdtype(dtype, np.floating):
        return -math.inf
    with np.errstate(all="ignore"):
        return float(np.asarray(bound).astype(dtype))


def has_slopes_above(bound: float, dtype: Any) -> bool:
    """Whether a function such as 1 / x has slopes that are numbers from a bound on."""
    if not jax.dtypes.issubdtype(dtype, np.floating):
        return bound > 0
    return bound > float(jax.numpy.finfo(dtype).max) ** -0.5


def same_value(values: Sequence[Value]) -> Value:
    """What is known of a value that is one of several."""
    if not values:
        return None
    if all(value is not None and value == values[0] for value in values):
        rounded = [value for value in values if isinstance(value, _Rounded)]
        return rounded[0] if rounded else values[0]
    is_finite = all(value is None or math.isfinite(value) for value in values)
    return None if is_finite else math.nan


def sum_of(value: Value, count: int | None = None, dtype: Any = np.float32) -> Value:
    """What is known of a sum of numbers of which this is known.

    Of so many, if `count` is known; whole numbers of a `dtype` wrap around.
    """
    if value is None or value == 0:
        return value
    if not math.isfinite(value):
        return math.nan
    if count is None:
        return None
    if _is_whole(dtype):
        is_known = _is_inside(value * count, dtype)
        return value * count if is_known else None
    is_known = _is_precise(dtype) and count * float(jax.numpy.finfo(dtype).eps) < _NEAR
    return _in_range(_Rounded(value * count), dtype) if is_known else None


def value_at_nan(
    name: str, values: Sequence[Value], is_missing: Sequence[bool]
) -> Value:
    """What an operation makes of operands of which some are nan.

    `is_missing` says which of them are nan, whatever is said of their values. The
    result is nan where that is passed on.
    """
    if name.endswith("_to"):  # nan has a place in a total order
        return None
    if name in _COMPARISONS:
        return float(name == "ne")
    if name == "is_finite":
        return 0.0
    if name == "pow":
        base, exponent = (
            math.nan if missing else value
            for value, missing in zip(values, is_missing, strict=True)
        )
        return 1.0 if base == 1 or exponent == 0 else math.nan
    return math.nan


def converted(value: Value, dtype: Any) -> Value:
    """What is known of a value after a change of type."""
    if value is None or math.isnan(value):
        return value
    if dtype == np.bool_:
        return float(value != 0)
    if not math.isfinite(value):
        return value if jax.dtypes.issubdtype(dtype, np.floating) else None
    if jax.dtypes.issubdtype(dtype, np.integer):
        whole = math.trunc(value)
        is_known = _is_inside(whole, dtype) and not isinstance(value, _Rounded)
        return float(whole) if is_known else None
    if isinstance(value, _Rounded) and not _is_precise(dtype):
        return None
    if not jax.dtypes.issubdtype(dtype, np.floating) or _fits(value, dtype):
        return value
    with np.errstate(all="ignore"):
        rounded = float(np.asarray(float(value)).astype(dtype))
    return _Rounded(rounded) if math.isfinite(rounded) else math.nan
