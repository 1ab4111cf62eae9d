"""What each jax primitive does to channels.

A rule receives the equation and what is known of its operands, joins or freezes labels,
and says what is known of the results. A primitive without a rule freezes everything it
touches, by name: it is never taken to be harmless. `channels.trace` walks the program.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from prunex_jax.channels.elementwise import (
    ELEMENTWISE,
    convert,
    elementwise,
    integer_pow,
    select,
    value_of,
)
from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    Context,
    Rule,
    Traced,
    freeze_all,
    frozen_value,
    has_channels,
    same_value,
    uniform_value,
)

_NOT_ZERO = "reads removed channels that may not be exactly zero"
_NOT_FINITE = "reads removed channels that may not be finite"


def _passthrough(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    return [Traced(x.labels, x.dead, x.number) for x in operands]


def _axes_of(x: Traced, axes: Sequence[int]) -> Traced:
    """The value with the given axes only."""
    return Traced(tuple(x.labels[a] for a in axes), tuple(x.dead[a] for a in axes))


def _sum_of(value: float | None) -> float | None:
    """What is known of a sum of numbers of which this is known."""
    if value is None or value == 0:
        return value
    return None if math.isfinite(value) else math.nan


def _broadcast_in_dim(ctx: Context, x: Traced, *sizes: Traced) -> Sequence[Traced]:
    shape = ctx.out_shape()
    if not x.labels:
        return [uniform_value(shape, x.number)]
    out = uniform_value(shape)
    labels, dead = list(out.labels), list(out.dead)
    for source, target in enumerate(ctx.eqn.params["broadcast_dimensions"]):
        if len(x.labels[source]) == shape[target]:
            labels[target] = x.labels[source]
            dead[target] = x.dead[source]
    return [Traced(tuple(labels), tuple(dead))]


def _transpose(ctx: Context, x: Traced) -> Sequence[Traced]:
    return [_axes_of(x, ctx.eqn.params["permutation"])]


def _squeeze(ctx: Context, x: Traced) -> Sequence[Traced]:
    gone = ctx.eqn.params["dimensions"]
    return [_axes_of(x, [axis for axis in range(len(x.labels)) if axis not in gone])]


def _rev(ctx: Context, x: Traced) -> Sequence[Traced]:
    turned = ctx.eqn.params["dimensions"]
    labels = [own[::-1] if i in turned else own for i, own in enumerate(x.labels)]
    return [Traced(tuple(labels), x.dead)]


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
        blocks.append((from_axes, to_axes))
    return blocks


def _outer_labels(ctx: Context, axes: Sequence[np.ndarray]) -> np.ndarray:
    """Labels of the positions of several axes taken together, flattened.

    A position made of one channel and otherwise frozen or uniform positions belongs to
    that channel. One made of two channels belongs to that of the axis with more of
    them, such as the features of a kernel, and the other axis stays.
    """
    flat = axes[0]
    for axis in axes[1:]:
        rows = np.repeat(flat, len(axis))
        columns = np.tile(axis, len(flat))
        clash = (rows > FROZEN) & (columns > FROZEN)
        of_rows, of_columns = np.unique(rows[clash]), np.unique(columns[clash])
        rows_win = len(of_rows) > len(of_columns)
        loser = of_columns if rows_win else of_rows
        ctx.freeze(loser, "merges it with another channel axis into one")
        winner = rows if rows_win else columns
        flat = np.where(clash, winner, np.maximum(rows, columns))
    return flat


def _split_labels(
    ctx: Context, flat: np.ndarray, shape: Sequence[int]
) -> list[np.ndarray]:
    """Gives the labels of a flat axis to the axes it is split into.

    Works where channels vary along one of the new axes only; otherwise freezes them.
    """
    if (flat == UNIFORM).all():
        return [np.full(size, UNIFORM, np.int64) for size in shape]
    split = [np.full(size, FROZEN, np.int64) for size in shape]
    if not has_channels(flat):
        return split
    block = flat.reshape(shape)
    for axis, size in enumerate(shape):
        rows = np.moveaxis(block, axis, 0).reshape(size, -1)
        if (rows == rows[:, :1]).all():
            split[axis] = rows[:, 0].copy()
            return split
    ctx.freeze(np.unique(flat), "splits a channel axis")
    return split


def _reshape(ctx: Context, x: Traced) -> Sequence[Traced]:
    shape = ctx.out_shape()
    if ctx.eqn.params.get("dimensions") is not None or 0 in shape:
        return freeze_all(ctx, x)
    labels = [np.full(size, FROZEN, np.int64) for size in shape]
    dead: list[float | None] = [None] * len(shape)
    for from_axes, to_axes in _reshape_blocks(x.shape, shape):
        wide = [axis for axis in to_axes if shape[axis] != 1]
        sources = [axis for axis in from_axes if len(x.labels[axis]) != 1]
        if not wide:  # axes of length 1, which carry no channel
            continue
        carriers = [a for a in sources if has_channels(x.labels[a])] or sources
        flat = _outer_labels(ctx, [x.labels[axis] for axis in sources])
        split = _split_labels(ctx, flat, [shape[axis] for axis in wide])
        for axis, part in zip(wide, split, strict=True):
            labels[axis] = part
            dead[axis] = same_value([x.dead[a] for a in carriers])
    return [Traced(tuple(labels), tuple(dead))]


def _reduce(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Sums skip dead channels where they are zero; nothing else does."""
    gone = ctx.eqn.params["axes"]
    is_sum = ctx.name == "reduce_sum"
    for axis in gone:
        if not (is_sum and x.dead[axis] == 0):
            ctx.freeze(x.labels[axis], _NOT_ZERO)
    out = _axes_of(x, [axis for axis in range(len(x.labels)) if axis not in gone])
    if ctx.name in ("reduce_sum", "reduce_prod"):
        return [Traced(out.labels, tuple(_sum_of(value) for value in out.dead))]
    return [out]


def _reduce_window(ctx: Context, x: Traced, *rest: Traced) -> Sequence[Traced]:
    params, shape = ctx.eqn.params, ctx.out_shape()
    if len(ctx.eqn.outvars) != 1:
        return freeze_all(ctx, x, *rest)
    labels = list(x.labels)
    for axis, size in enumerate(params["window_dimensions"]):
        is_moved = tuple(params["padding"][axis]) != (0, 0)
        if size != 1 or is_moved or len(x.labels[axis]) != shape[axis]:
            ctx.freeze(x.labels[axis], "slides a window along it")
            labels[axis] = np.full(shape[axis], FROZEN, np.int64)
    is_choice = ctx.name in ("reduce_window_max", "reduce_window_min")
    dead = x.dead if is_choice else tuple(_sum_of(value) for value in x.dead)
    if ctx.name == "reduce_window":  # combines values in a way that is not looked up
        dead = tuple(None if value == 0 else value for value in dead)
    return [Traced(tuple(labels), dead)]


def _contract(
    ctx: Context, left: Traced, left_axis: int, right: Traced, right_axis: int
) -> None:
    """Joins two axes that are multiplied and summed; exact if dead products are 0."""
    joined = ctx.join(left.labels[left_axis], right.labels[right_axis])
    product = value_of("mul", [left.dead[left_axis], right.dead[right_axis]])
    if product != 0:
        is_finite = product is None or math.isfinite(product)
        ctx.freeze(joined, _NOT_ZERO if is_finite else _NOT_FINITE)


def _conv(ctx: Context, x: Traced, kernel: Traced) -> Sequence[Traced]:
    params, shape = ctx.eqn.params, ctx.out_shape()
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        text = "convolves channels or images in groups"
        return freeze_all(ctx, x, kernel, text=text)
    numbers = params["dimension_numbers"]
    x_batch, x_in, *x_space = numbers.lhs_spec
    k_out, k_in, *k_space = numbers.rhs_spec
    out_batch, out_feature, *_ = numbers.out_spec
    _contract(ctx, x, x_in, kernel, k_in)
    for operand, axes in ((x, x_space), (kernel, k_space)):
        for axis in axes:
            ctx.freeze(operand.labels[axis], "convolves along it")
    labels = [np.full(size, FROZEN, np.int64) for size in shape]
    dead: list[float | None] = [None] * len(shape)
    labels[out_batch], dead[out_batch] = x.labels[x_batch], _sum_of(x.dead[x_batch])
    labels[out_feature] = kernel.labels[k_out]
    dead[out_feature] = _sum_of(kernel.dead[k_out])
    return [Traced(tuple(labels), tuple(dead))]


def _dot_general(ctx: Context, left: Traced, right: Traced) -> Sequence[Traced]:
    (left_sum, right_sum), (left_batch, right_batch) = ctx.eqn.params[
        "dimension_numbers"
    ]
    for i, j in zip(left_sum, right_sum, strict=True):
        _contract(ctx, left, i, right, j)
    labels: list[np.ndarray] = []
    dead: list[float | None] = []
    for i, j in zip(left_batch, right_batch, strict=True):
        labels.append(ctx.join(left.labels[i], right.labels[j]))
        dead.append(_sum_of(value_of("mul", [left.dead[i], right.dead[j]])))
    for operand, used in (
        (left, (*left_sum, *left_batch)),
        (right, (*right_sum, *right_batch)),
    ):
        for axis, own in enumerate(operand.labels):
            if axis not in used:
                labels.append(own)
                dead.append(_sum_of(operand.dead[axis]))
    return [Traced(tuple(labels), tuple(dead))]


def _concatenate(ctx: Context, *parts: Traced) -> Sequence[Traced]:
    return _concatenate_along(ctx, parts, ctx.eqn.params["dimension"])


def _concatenate_along(
    ctx: Context, parts: Sequence[Traced], dimension: int | None
) -> Sequence[Traced]:
    labels: list[np.ndarray] = []
    dead: list[float | None] = []
    for axis in range(len(parts[0].labels)):
        own = [part.labels[axis] for part in parts]
        if axis == dimension:
            labels.append(np.concatenate(own))
        else:
            joined = own[0]
            for other in own[1:]:
                joined = ctx.join(joined, other)
            labels.append(joined)
        # A part that is frozen along this axis has nothing that dies.
        mortal = [part for part in parts if (part.labels[axis] != FROZEN).any()]
        dead.append(same_value([part.dead[axis] for part in mortal]))
    return [Traced(tuple(labels), tuple(dead))]


def _stack(ctx: Context, *parts: Traced) -> Sequence[Traced]:
    new = ctx.eqn.params["axis"]
    (joined,) = _concatenate_along(ctx, parts, dimension=None)
    labels, dead = list(joined.labels), list(joined.dead)
    labels.insert(new, np.full(len(parts), FROZEN, np.int64))
    dead.insert(new, None)
    return [Traced(tuple(labels), tuple(dead))]


def _unstack(ctx: Context, x: Traced) -> Sequence[Traced]:
    gone = ctx.eqn.params["axis"]
    ctx.freeze(x.labels[gone], "takes single channels out")
    kept = _axes_of(x, [axis for axis in range(len(x.labels)) if axis != gone])
    return [kept] * len(ctx.eqn.outvars)


def _tile(ctx: Context, x: Traced) -> Sequence[Traced]:
    reps = ctx.eqn.params["reps"]
    labels = [np.tile(own, times) for own, times in zip(x.labels, reps, strict=True)]
    return [Traced(tuple(labels), x.dead)]


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
    return [Traced(labels, x.dead)]


def _split(ctx: Context, x: Traced) -> Sequence[Traced]:
    axis, sizes = ctx.eqn.params["axis"], ctx.eqn.params["sizes"]
    pieces = np.split(x.labels[axis], np.cumsum(sizes)[:-1])
    return [
        Traced((*x.labels[:axis], piece, *x.labels[axis + 1 :]), x.dead)
        for piece in pieces
    ]


def _pad(ctx: Context, x: Traced, value: Traced) -> Sequence[Traced]:
    labels: list[np.ndarray] = []
    for own, (low, high, interior) in zip(
        x.labels, ctx.eqn.params["padding_config"], strict=True
    ):
        if min(low, high) < 0 or interior:
            ctx.freeze(own, "pads between or cuts off positions")
            size = ctx.out_shape()[len(labels)]
            labels.append(np.full(size, FROZEN, np.int64))
        else:
            # Padding of a spatial axis stays; of a channel axis, it is nobody's.
            edge = FROZEN if (own == FROZEN).all() else UNIFORM
            labels.append(np.pad(own, (low, high), constant_values=edge))
    # Dead channels have padding too, and padding of a channel axis may join any.
    dead = tuple(same_value([before, value.number]) for before in x.dead)
    return [Traced(tuple(labels), dead)]


def _iota(ctx: Context, *sizes: Traced) -> Sequence[Traced]:
    return [frozen_value(ctx.out_shape(), "a counter")]


RULES: Mapping[str, Rule] = {
    **{name: elementwise for name in ELEMENTWISE},
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "convert_element_type": convert,
    "dot_general": _dot_general,
    "integer_pow": integer_pow,
    "iota": _iota,
    "optimization_barrier": _passthrough,
    "pad": _pad,
    "pcast": _passthrough,
    "pvary": _passthrough,
    "reduce_and": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_or": _reduce,
    "reduce_prod": _reduce,
    "reduce_sum": _reduce,
    "reduce_window": _reduce_window,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "reshape": _reshape,
    "rev": _rev,
    "select_n": select,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
}
