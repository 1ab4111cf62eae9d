"""Rules of reading and writing at positions that are given as numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.channels.context import Context
from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    Traced,
    frozen_axis,
    has_channels,
)
from prunex_jax.channels.numbers import Value, is_exact, same_value, value_of
from prunex_jax.channels.rules.elementwise import elementwise

_BY_NUMBER = "looks positions up by number"
# What operations that write do with what is there; None where it is replaced.
SCATTERS: Mapping[str, str | None] = {
    "scatter": None,
    "scatter-add": "add",
    "scatter_add": "add",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "mul",
    "scatter-sub": "sub",
}


def gather(ctx: Context, x: Traced, indices: Traced) -> Sequence[Traced]:
    """Axes that are read in full stay; others must be read at known positions."""
    params, shape = ctx.eqn.params, ctx.out_shape()
    numbers = params["dimension_numbers"]
    sizes = params["slice_sizes"]
    labels = [frozen_axis(size) for size in shape]
    dead: list[Value] = [None] * len(shape)
    batch_axes = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    for axis, own, number in zip(
        batch_axes, indices.labels[:-1], indices.dead[:-1], strict=True
    ):
        # What is looked up by a channel is a channel, since nothing else is cut off.
        labels[axis] = own if x.is_given else np.where(own == UNIFORM, FROZEN, own)
        if (labels[axis] != FROZEN).any():
            dead[axis] = _found_by_dead(ctx, indices, number)
    ctx.freeze(indices.labels[-1], _BY_NUMBER)
    offsets = iter(numbers.offset_dims)
    skipped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    for axis, own in enumerate(x.labels):
        target = None if axis in skipped else next(offsets)
        if target is not None and sizes[axis] == len(own):
            labels[target] = own
            dead[target] = _or_fill(ctx, indices, x.dead[axis])
        elif target is not None and axis not in numbers.start_index_map:
            ctx.freeze(own, "reads a part of it")
        elif axis in numbers.operand_batching_dims:
            which = numbers.operand_batching_dims.index(axis)
            other = numbers.start_indices_batching_dims[which]
            out = batch_axes[other]
            number = indices.dead[other]
            labels[out] = ctx.join_axes((0, axis), (1, other))
            is_found = _found_by_dead(ctx, indices, number) is None
            dead[out] = x.dead[axis] if is_found else math.nan
        elif has_channels(own):
            found = _known_positions(ctx, axis, indices)
            if found is None:
                ctx.freeze(own, _BY_NUMBER, is_inherent=True)
            else:
                ctx.notes["positions"] = (axis, found)
                parts = _spread(ctx, own[found])
                for axis_out, part in zip(batch_axes, parts, strict=True):
                    labels[axis_out], dead[axis_out] = part, x.dead[axis]
    ctx.notes["full"] = tuple(
        size == len(own) for size, own in zip(sizes, x.labels, strict=True)
    )
    may_be_nan = math.isnan(_fill(ctx)) and not _is_inside(ctx, indices)
    return [Traced(tuple(labels), tuple(dead), may_be_nan=may_be_nan)]


def _is_inside(ctx: Context, indices: Traced) -> bool:
    """Whether everything that is looked up is known to exist, or moved to where it is.

    Nobody looks at positions that were promised to exist.
    """
    if "FILL" not in str(ctx.eqn.params["mode"]):
        return True
    if indices.below is not None and indices.below <= min(_limits(ctx)):
        return True
    if indices.constant is None:
        return False
    last = [size - 1 for size in _limits(ctx)]
    found = np.asarray(indices.constant.value)
    return bool((found >= 0).all() and (found <= np.asarray(last)).all())


def _limits(ctx: Context) -> list[int]:
    """How many positions there are to start from, for every number of an index."""
    params, shape = ctx.eqn.params, ctx.operands[0].shape
    starts = params["dimension_numbers"].start_index_map
    return [shape[axis] - params["slice_sizes"][axis] + 1 for axis in starts]


def _fill(ctx: Context) -> float:
    """The value of what is looked up where nothing is."""
    fill = ctx.eqn.params["fill_value"]
    if fill is not None:
        return float(fill)
    aval: Any = ctx.eqn.outvars[0].aval
    if jax.dtypes.issubdtype(aval.dtype, np.inexact):
        return math.nan
    if aval.dtype == np.bool_:
        return 1.0
    bits = jax.numpy.iinfo(aval.dtype)
    return float(bits.min if bits.min < 0 else bits.max)


def _or_fill(ctx: Context, indices: Traced, value: Value) -> Value:
    """A value that is another one where what is looked up does not exist.

    Where that is nan, it is so at kept channels too: see `Traced.may_be_nan`.
    """
    fill = _fill(ctx)
    is_found = math.isnan(fill) or _is_inside(ctx, indices)
    return value if is_found else same_value([value, fill])


def _found_by_dead(ctx: Context, indices: Traced, number: Value) -> Value:
    """What is found at the position that a dead channel gives."""
    if number is not None and all(0 <= number < limit for limit in _limits(ctx)):
        return None
    return None if _is_inside(ctx, indices) else same_value([None, _fill(ctx)])


def _known_positions(ctx: Context, axis: int, indices: Traced) -> np.ndarray | None:
    """What is read along one axis, if it is the only one and known beforehand."""
    numbers = ctx.eqn.params["dimension_numbers"]
    is_plain = numbers.start_index_map == (axis,) == numbers.collapsed_slice_dims
    if not is_plain or numbers.operand_batching_dims or indices.constant is None:
        return None
    found = np.asarray(indices.constant.value)[..., 0]
    size = len(ctx.operands[0].labels[axis])
    is_inside = found.size and found.min() >= 0 and found.max() < size
    return found if is_inside else None


def _spread(ctx: Context, labels: np.ndarray) -> list[np.ndarray]:
    """Labels of the axes of a block of labels."""
    wide = [size for size in labels.shape if size != 1]
    parts = iter(ctx.split(labels.ravel(), wide) if wide else [])
    if not wide:
        ctx.freeze(labels.ravel(), "takes a single channel out")
    return [
        next(parts) if size != 1 else np.array([FROZEN], np.int64)
        for size in labels.shape
    ]


def dynamic_slice(ctx: Context, x: Traced, *starts: Traced) -> Sequence[Traced]:
    """Axes that are read in full stay, whatever the start."""
    labels = list(x.labels)
    sizes = ctx.eqn.params["slice_sizes"]
    begins: list[int | None] = []
    for axis, (own, size, start) in enumerate(
        zip(x.labels, sizes, starts[: len(sizes)], strict=True)
    ):
        begin: int | None = None
        if size == len(own):
            begin = 0
        elif start.constant is not None:
            begin = int(np.clip(int(start.constant.value), 0, len(own) - size))
            labels[axis] = own[begin : begin + size]
        elif x.is_given and not has_channels(own):
            labels[axis] = own[:size]
        else:
            ctx.freeze(own, _BY_NUMBER)
            labels[axis] = frozen_axis(size)
        begins.append(begin)
    ctx.notes["begins"] = tuple(begins)
    return [Traced(tuple(labels), x.dead)]


def dynamic_update_slice(
    ctx: Context, x: Traced, update: Traced, *starts: Traced
) -> Sequence[Traced]:
    """Axes that are written in full are joined; along others positions stay."""
    labels: list[np.ndarray] = []
    dead: list[Value] = []
    for axis, (own, new) in enumerate(zip(x.labels, update.labels, strict=True)):
        if len(own) == len(new):
            labels.append(ctx.join_axes((0, axis), (1, axis)))
            dead.append(same_value([x.dead[axis], update.dead[axis]]))
        else:
            ctx.freeze(own, "writes at positions by number")
            ctx.freeze(new, "is written at positions by number")
            labels.append(frozen_axis(len(own)))
            dead.append(None)
    return [Traced(tuple(labels), tuple(dead))]


def scatter(
    ctx: Context, x: Traced, indices: Traced, updates: Traced
) -> Sequence[Traced]:
    """Axes that are written in full are joined; along others positions stay.

    Unless it is known beforehand which are written.
    """
    numbers = ctx.eqn.params["dimension_numbers"]
    skipped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    writes = _known_writes(ctx, indices)
    windows = iter(numbers.update_window_dims)
    labels: list[np.ndarray] = []
    dead: list[Value] = []
    for axis, own in enumerate(x.labels):
        window = None if axis in skipped else next(windows)
        is_written = axis in numbers.scatter_dims_to_operand_dims
        if (
            window is not None
            and not is_written
            and len(updates.labels[window]) == len(own)
        ):
            labels.append(ctx.join_axes((0, axis), (2, window)))
            is_full = _writes_everywhere(ctx, indices)
            dead.append(_combined(ctx, x.dead[axis], updates.dead[window], is_full))
        elif writes is not None and axis == writes[0]:
            labels.append(_written(ctx, *writes))
            dead.append(_value_written(ctx, axis, writes[1]))
        else:
            ctx.freeze(own, "writes at positions by number")
            if window is not None:
                ctx.freeze(updates.labels[window], "is written at positions by number")
            labels.append(frozen_axis(len(own)))
            dead.append(None)
    for own in indices.labels:
        ctx.freeze(own, "writes at positions by number")
    for axis, own in enumerate(updates.labels):
        is_known = writes is not None and axis == writes[1]
        if axis not in numbers.update_window_dims and not is_known:
            ctx.freeze(own, "is written at positions by number")
    return [Traced(tuple(labels), tuple(dead))]


def _known_writes(ctx: Context, indices: Traced) -> tuple[int, int, np.ndarray] | None:
    """Which axis is written, by which one of the updates, and int[n] where.

    None if there are several, or what is written where is not known beforehand, or of
    no interest.
    """
    numbers = ctx.eqn.params["dimension_numbers"]
    axes, windows = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
    x, _, updates = ctx.operands
    scattered = [a for a in range(len(updates.labels)) if a not in windows]
    is_plain = len(axes) == 1 and not numbers.operand_batching_dims
    if not is_plain or indices.constant is None:
        return None
    (axis,) = axes
    first = np.asarray(indices.constant.value)[..., 0]
    if axes == numbers.inserted_window_dims and len(scattered) == 1:
        source, positions = scattered[0], first
    elif not scattered and not numbers.inserted_window_dims:
        source = windows[axis]
        positions = first + np.arange(len(updates.labels[source]))
    else:
        return None
    is_inside = (positions >= 0).all() and (positions < x.shape[axis]).all()
    with_channels = has_channels(x.labels[axis]) or has_channels(updates.labels[source])
    is_free = len(np.unique(positions)) == len(positions)
    is_sum = SCATTERS[ctx.name] in ("add", "sub") and updates.dead[source] == 0
    if not is_inside or not with_channels or not (is_free or is_sum):
        return None
    return axis, source, positions


def _combined(ctx: Context, old: Value, new: Value, is_full: bool) -> Value:
    """What several or no writes make of a value; `is_full` rules the latter out.

    Of the largest of an empty set, which is infinite, it thus says nothing.
    """
    operation = SCATTERS[ctx.name]
    if operation is None:
        return same_value([old, new])
    once = value_of(operation, [old, new])
    if operation in ("max", "min"):
        return once if is_full else same_value([old, once])
    # More writes change nothing where one changes nothing.
    if once is not None and not math.isfinite(once):
        return math.nan
    return once if is_exact(once) and once == old else None


def _writes_everywhere(ctx: Context, indices: Traced) -> bool:
    """Whether every position is known to be written."""
    numbers = ctx.eqn.params["dimension_numbers"]
    axes = numbers.scatter_dims_to_operand_dims
    is_plain = len(axes) == 1 and axes == numbers.inserted_window_dims
    if not is_plain or numbers.operand_batching_dims or indices.constant is None:
        return False
    written = np.unique(np.asarray(indices.constant.value))
    return bool(np.isin(np.arange(ctx.operands[0].shape[axes[0]]), written).all())


def _written(ctx: Context, axis: int, source: int, positions: np.ndarray) -> np.ndarray:
    """Labels of an axis of which some positions are written, each by its own number."""
    own, new = ctx.operands[0].labels[axis], ctx.operands[2].labels[source]
    ctx.notes["positions"] = (axis, source, positions)
    out = own.copy()
    if len(np.unique(positions)) == len(positions):
        joined = ctx.join(own[positions], new)
        ctx.fits[2, source] = joined
    else:  # sums, which skip channels that are zero
        joined = frozen_axis(len(positions))
        ctx.freeze(own[positions], "adds several channels to it")
    out[positions] = joined
    ctx.fits[0, axis] = out
    return out


def _value_written(ctx: Context, axis: int, source: int) -> Value:
    x, _, updates = ctx.operands
    values = [x.dead[axis], updates.dead[source]]
    operation = SCATTERS[ctx.name]
    new = value_of(operation, values) if operation else updates.dead[source]
    return same_value([x.dead[axis], new])


def compare(ctx: Context, left: Traced, right: Traced) -> Sequence[Traced]:
    """Of inputs with a counter: a lookup by number in other words (one-hot)."""
    (out,) = elementwise(ctx, left, right)
    is_known = left.constant is not None and right.constant is not None
    if left.is_given and right.is_given and not is_known and out.labels:
        if any((own == FROZEN).any() for own in out.labels):
            labels = tuple(frozen_axis(len(own)) for own in out.labels)
            return [Traced(labels, (None,) * len(labels), origin="a comparison")]
    return [out]
