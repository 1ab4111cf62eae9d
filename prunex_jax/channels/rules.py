"""What each jax primitive does to channels.

A rule receives the equation and what is known of its operands, joins or freezes labels,
and says what is known of the results. A primitive without a rule freezes everything it
touches, by name: it is never taken to be harmless. `channels.trace` walks the program.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    LabelTable,
    Reason,
    Traced,
    frozen_value,
    source_of,
    uniform_value,
)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rule may use: the equation and the table of labels."""

    eqn: core.JaxprEqn
    table: LabelTable

    def reason(self, text: str) -> Reason:
        """A reason that names this equation."""
        return Reason(self.eqn.primitive.name, text, source_of(self.eqn))

    def freeze(self, labels: np.ndarray, text: str) -> None:
        """Freezes labels because of this equation."""
        if (labels > FROZEN).any():
            self.table.freeze(labels, self.reason(text))

    def join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Joins two axes because of this equation."""
        return self.table.join(
            left, right, self.reason("combines it with an axis of fixed size")
        )

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of a result of this equation."""
        aval: Any = self.eqn.outvars[index].aval
        return tuple(aval.shape)


Rule = Callable[..., Sequence[Traced]]


def freeze_all(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """The rule of everything unknown: what it touches stays."""
    for operand in operands:
        for labels in operand.labels:
            ctx.freeze(labels, "not known to keep channels apart")
    return [frozen_value(ctx.out_shape(i)) for i in range(len(ctx.eqn.outvars))]


def _elementwise(
    combine_zero: Callable[[Sequence[bool]], bool],
) -> Rule:
    """Rule of operations that treat every position alike.

    Args:
      combine_zero: From "operand is zero there" to "result is zero there".
    """

    def rule(ctx: Context, *operands: Traced) -> Sequence[Traced]:
        shape = ctx.out_shape()
        labels, is_zero = [], []
        for axis, size in enumerate(shape):
            joined = np.full(size, UNIFORM, np.int64)
            zeros = []
            for operand in operands:
                if not operand.labels:  # a scalar is zero everywhere or nowhere
                    zeros.append(all(operand.is_zero) and _is_zero_scalar(operand))
                    continue
                own = operand.labels[axis]
                if len(own) != size:  # broadcast: ties nothing, zero at no channel
                    zeros.append(False)
                    continue
                joined = ctx.join(joined, own)
                zeros.append(operand.is_zero[axis])
            labels.append(joined)
            is_zero.append(combine_zero(zeros))
        return [Traced(tuple(labels), tuple(is_zero))] * len(ctx.eqn.outvars)

    return rule


def _is_zero_scalar(operand: Traced) -> bool:
    return isinstance(operand, Scalar) and operand.value == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar(Traced):
    """A rank-0 value; known where it is a literal of the program."""

    value: float | None = None


def scalar(value: float | None) -> Scalar:
    """Describes a rank-0 value."""
    return Scalar((), (), None, value)


# Zero where every operand is zero: f(0, ..., 0) = 0.
_joint = _elementwise(all)
# Zero where any operand is zero: products.
_product = _elementwise(any)
# Zero where the first operand is zero: quotients and integer powers.
_first = _elementwise(lambda zeros: zeros[0])
# f(0) is not 0.
_nonzero = _elementwise(lambda zeros: False)


def _select(ctx: Context, which: Traced, *cases: Traced) -> Sequence[Traced]:
    (joined,) = _joint(ctx, *cases)
    if not which.labels:
        return [joined]
    (tied,) = _nonzero(ctx, which, *cases)
    return [Traced(tied.labels, joined.is_zero)]


def _clamp(ctx: Context, low: Traced, x: Traced, high: Traced) -> Sequence[Traced]:
    # clamp(l, 0, h) is 0 only where the bounds allow 0, which is not looked up.
    return _nonzero(ctx, x, low, high)


def _passthrough(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    return [Traced(x.labels, x.is_zero) for x in operands]


def _broadcast_in_dim(ctx: Context, x: Traced, *dynamic: Traced) -> Sequence[Traced]:
    shape = ctx.out_shape()
    if isinstance(x, Scalar):
        return [uniform_value(shape, _is_zero_scalar(x))]
    labels = [np.full(size, UNIFORM, np.int64) for size in shape]
    # Broadcast axes carry no channel: nothing dies there, so claim nothing.
    is_zero = [False] * len(shape)
    for source, target in enumerate(ctx.eqn.params["broadcast_dimensions"]):
        if len(x.labels[source]) == shape[target]:
            labels[target] = x.labels[source]
            is_zero[target] = x.is_zero[source]
    return [Traced(tuple(labels), tuple(is_zero))]


def _transpose(ctx: Context, x: Traced) -> Sequence[Traced]:
    order = ctx.eqn.params["permutation"]
    return [
        Traced(
            tuple(x.labels[axis] for axis in order),
            tuple(x.is_zero[axis] for axis in order),
        )
    ]


def _squeeze(ctx: Context, x: Traced) -> Sequence[Traced]:
    gone = ctx.eqn.params["dimensions"]
    kept = [axis for axis in range(len(x.labels)) if axis not in gone]
    if not kept:
        return [scalar(None)]
    return [Traced(tuple(x.labels[a] for a in kept), tuple(x.is_zero[a] for a in kept))]


def _reshape_blocks(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Splits a reshape into the smallest runs of axes with equal products."""
    blocks = []
    i = j = 0
    while i < len(old) or j < len(new):
        from_axes: list[int] = []
        to_axes: list[int] = []
        left = right = 1
        while True:
            if left <= right and i < len(old) and (left < right or not from_axes):
                left *= old[i]
                from_axes.append(i)
                i += 1
            elif j < len(new) and (right < left or not to_axes):
                right *= new[j]
                to_axes.append(j)
                j += 1
            else:
                break
        if not from_axes and not to_axes:  # only axes of length 1 are left over
            break
        blocks.append((from_axes, to_axes))
    return blocks


def _outer_labels(ctx: Context, axes: Sequence[np.ndarray]) -> np.ndarray:
    """Labels of the positions of several axes taken together, flattened.

    A position made of one channel and otherwise frozen or uniform positions belongs to
    that channel; one made of two channels cannot be given to either and is frozen.
    """
    flat = axes[0] if axes else np.array([UNIFORM], np.int64)
    for axis in axes[1:]:
        rows = np.repeat(flat, len(axis))
        columns = np.tile(axis, len(flat))
        clash = (rows > FROZEN) & (columns > FROZEN)
        for labels in (rows[clash], columns[clash]):
            ctx.freeze(np.unique(labels), "merges two channel axes into one")
        merged = np.maximum(rows, columns)
        flat = np.where(clash, FROZEN, merged)
    return flat


def _split_labels(
    ctx: Context, flat: np.ndarray, shape: Sequence[int]
) -> list[np.ndarray]:
    """Gives the labels of a flat axis to the axes it is split into.

    Works where channels vary along one of the new axes only; otherwise freezes them.
    """
    frozen = [np.full(size, FROZEN, np.int64) for size in shape]
    if not (flat > FROZEN).any():
        only = np.where((flat == UNIFORM).all(), UNIFORM, FROZEN)
        return [np.full(size, only, np.int64) for size in shape]
    block = flat.reshape(shape)
    for axis, size in enumerate(shape):
        rows = np.moveaxis(block, axis, 0).reshape(size, -1)
        if (rows == rows[:, :1]).all():
            frozen[axis] = rows[:, 0].copy()
            return frozen
    ctx.freeze(np.unique(flat), "splits a channel axis")
    return frozen


def _reshape(ctx: Context, x: Traced, *dynamic: Traced) -> Sequence[Traced]:
    shape = ctx.out_shape()
    if ctx.eqn.params.get("dimensions") is not None:
        return freeze_all(ctx, x)
    if not shape:
        return [scalar(None)]
    labels = [np.full(size, UNIFORM, np.int64) for size in shape]
    is_zero = [False] * len(shape)
    for from_axes, to_axes in _reshape_blocks(x.shape, shape):
        sources = [x.labels[axis] for axis in from_axes]
        with_channels = [a for a in from_axes if (x.labels[a] > FROZEN).any()]
        zero = all(x.is_zero[axis] for axis in with_channels or from_axes)
        wide = [axis for axis in to_axes if shape[axis] != 1]
        if len(wide) == 1:
            labels[wide[0]] = _outer_labels(ctx, sources)
        elif len(wide) > 1:
            flat = _outer_labels(ctx, sources)
            split = _split_labels(ctx, flat, [shape[axis] for axis in wide])
            for axis, part in zip(wide, split, strict=True):
                labels[axis] = part
        for axis in wide:
            is_zero[axis] = zero
    return [Traced(tuple(labels), tuple(is_zero))]


def _integer_pow(ctx: Context, x: Traced) -> Sequence[Traced]:
    return (_first if ctx.eqn.params["y"] > 0 else _nonzero)(ctx, x)


def _reduce(exact_on_zeros: bool) -> Rule:
    """Rule of reductions; summing skips dead channels only where they are zero."""

    def rule(ctx: Context, x: Traced, *rest: Traced) -> Sequence[Traced]:
        gone = ctx.eqn.params["axes"]
        for axis in gone:
            if not (exact_on_zeros and x.is_zero[axis]):
                ctx.freeze(
                    x.labels[axis], "reads removed channels that are not exactly zero"
                )
        kept = [axis for axis in range(len(x.labels)) if axis not in gone]
        out = Traced(
            tuple(x.labels[axis] for axis in kept),
            tuple(x.is_zero[axis] for axis in kept),
        )
        return [out if kept else scalar(None)] * len(ctx.eqn.outvars)

    return rule


def _reduce_window(ctx: Context, x: Traced, *rest: Traced) -> Sequence[Traced]:
    params, shape = ctx.eqn.params, ctx.out_shape()
    window = params["window_dimensions"]
    labels = list(x.labels)
    for axis, size in enumerate(window):
        is_untouched = size == 1 and len(x.labels[axis]) == shape[axis]
        if not is_untouched:
            ctx.freeze(x.labels[axis], "slides a window along it")
            labels[axis] = np.full(shape[axis], FROZEN, np.int64)
    return [Traced(tuple(labels), x.is_zero)] * len(ctx.eqn.outvars)


def _conv(ctx: Context, x: Traced, kernel: Traced) -> Sequence[Traced]:
    params, shape = ctx.eqn.params, ctx.out_shape()
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return freeze_all(ctx, x, kernel)
    numbers = params["dimension_numbers"]
    x_batch, x_in, *x_space = numbers.lhs_spec
    k_out, k_in, *k_space = numbers.rhs_spec
    out_batch, out_feature, *_ = numbers.out_spec
    _contract(ctx, x, x_in, kernel, k_in)
    for operand, axes in ((x, x_space), (kernel, k_space)):
        for axis in axes:
            ctx.freeze(operand.labels[axis], "convolves along it")
    labels = [np.full(size, FROZEN, np.int64) for size in shape]
    is_zero = [False] * len(shape)
    labels[out_batch], is_zero[out_batch] = x.labels[x_batch], x.is_zero[x_batch]
    labels[out_feature] = kernel.labels[k_out]
    is_zero[out_feature] = kernel.is_zero[k_out]
    return [Traced(tuple(labels), tuple(is_zero))]


def _contract(
    ctx: Context, left: Traced, left_axis: int, right: Traced, right_axis: int
) -> None:
    """Joins two contracted axes; exact only if one side is zero where dead."""
    a, b = left.labels[left_axis], right.labels[right_axis]
    joined = ctx.join(a, b)
    # Summing over an axis that one side repeats is a plain sum over the other.
    if not (left.is_zero[left_axis] or right.is_zero[right_axis]):
        ctx.freeze(joined, "reads removed channels that are not exactly zero")


def _dot_general(ctx: Context, left: Traced, right: Traced) -> Sequence[Traced]:
    (left_sum, right_sum), (left_batch, right_batch) = ctx.eqn.params[
        "dimension_numbers"
    ]
    for i, j in zip(left_sum, right_sum, strict=True):
        _contract(ctx, left, i, right, j)
    labels, is_zero = [], []
    for i, j in zip(left_batch, right_batch, strict=True):
        labels.append(ctx.join(left.labels[i], right.labels[j]))
        is_zero.append(left.is_zero[i] or right.is_zero[j])
    for operand, used in (
        (left, (*left_sum, *left_batch)),
        (right, (*right_sum, *right_batch)),
    ):
        for axis, own in enumerate(operand.labels):
            if axis not in used:
                labels.append(own)
                is_zero.append(operand.is_zero[axis])
    if not labels:
        return [scalar(None)]
    return [Traced(tuple(labels), tuple(is_zero))]


def _concatenate(ctx: Context, *parts: Traced) -> Sequence[Traced]:
    dimension = ctx.eqn.params["dimension"]
    labels, is_zero = [], []
    for axis in range(len(parts[0].labels)):
        own = [part.labels[axis] for part in parts]
        if axis == dimension:
            labels.append(np.concatenate(own))
        else:
            joined = own[0]
            for other in own[1:]:
                joined = ctx.join(joined, other)
            labels.append(joined)
        is_zero.append(all(part.is_zero[axis] for part in parts))
    return [Traced(tuple(labels), tuple(is_zero))]


def _slice(ctx: Context, x: Traced) -> Sequence[Traced]:
    params = ctx.eqn.params
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    labels = tuple(
        axis[start:limit:stride]
        for axis, start, limit, stride in zip(
            x.labels, starts, limits, strides, strict=True
        )
    )
    return [Traced(labels, x.is_zero)]


def _pad(ctx: Context, x: Traced, value: Traced) -> Sequence[Traced]:
    shape = ctx.out_shape()
    labels = []
    for axis, (low, high, interior) in enumerate(ctx.eqn.params["padding_config"]):
        if (low, high, interior) == (0, 0, 0):
            labels.append(x.labels[axis])
        elif min(low, high) < 0 or interior:
            ctx.freeze(x.labels[axis], "pads between or cuts off positions")
            labels.append(np.full(shape[axis], FROZEN, np.int64))
        else:
            # Padding of a spatial axis stays; of a channel axis, it is nobody's.
            edge = UNIFORM if (x.labels[axis] > FROZEN).any() else FROZEN
            labels.append(np.pad(x.labels[axis], (low, high), constant_values=edge))
    is_zero = tuple(zero and _is_zero_scalar(value) for zero in x.is_zero)
    return [Traced(tuple(labels), is_zero)]


def _iota(ctx: Context) -> Sequence[Traced]:
    return [frozen_value(ctx.out_shape())]


_JOINT = (
    "abs add add_any asin asinh atan atanh cbrt ceil conj copy erf expm1 floor imag "
    "log1p max min neg real reduce_precision round sign sin sinh sqrt square sub tan "
    "tanh convert_element_type pcast pvary"
).split()
_PRODUCT = ["mul", "and"]
_FIRST = ["div", "rem"]
_NONZERO = (
    "acos acosh atan2 cos cosh digamma eq erf_inv erfc exp exp2 ge gt is_finite le "
    "lgamma log logistic lt ne nextafter not or pow rsqrt xor"
).split()

RULES: Mapping[str, Rule] = {
    **{name: _joint for name in _JOINT},
    **{name: _product for name in _PRODUCT},
    **{name: _first for name in _FIRST},
    **{name: _nonzero for name in _NONZERO},
    "broadcast_in_dim": _broadcast_in_dim,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "optimization_barrier": _passthrough,
    "pad": _pad,
    "reduce_and": _reduce(False),
    "reduce_max": _reduce(False),
    "reduce_min": _reduce(False),
    "reduce_or": _reduce(False),
    "reduce_prod": _reduce(False),
    "reduce_sum": _reduce(True),
    "reduce_window": _reduce_window,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "reshape": _reshape,
    "select_n": _select,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
