"""Rules of sums, products of matrices, convolutions, windows and orderings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.jaxprs import open_program
from prunex_jax.channels.context import Context, freeze_all
from prunex_jax.channels.labels import (
    Shared,
    Sum,
    Traced,
    frozen_axis,
    frozen_value,
    has_channels,
)
from prunex_jax.channels.numbers import (
    Value,
    is_exact,
    is_nan,
    same_value,
    sum_of,
    value_of,
)
from prunex_jax.channels.rules.axes import axes_of

# Operations with finite slopes.
_BOUNDED = {
    *("abs", "add", "add_any", "and", "eq", "ge", "gt", "le", "lt", "max", "min"),
    *("mul", "ne", "neg", "not", "or", "select_n", "square", "sub"),
}
_NOT_ZERO = "reads removed channels that may not be exactly zero"
_NARROW = "reads removed channels of a type that cannot be put back"
_NOT_KNOWN = "reads removed channels that may have different values"
_NOT_FINITE = "reads removed channels that may not be finite, or not have a derivative"


def reduce(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Sums skip dead channels that are zero; others count with the value they share."""
    gone = ctx.eqn.params["axes"]
    left = [axis for axis in range(len(x.labels)) if axis not in gone]
    is_sum = ctx.name == "reduce_sum"
    with_channels = [axis for axis in gone if has_channels(x.labels[axis])]
    reading = [axis for axis in with_channels if not (is_sum and x.dead[axis] == 0)]
    total = math.prod(x.shape[axis] for axis in gone)
    unread = _count_dead(ctx, x, reading)
    summed = None
    if ctx.renormalise and is_sum and len(with_channels) == 1:
        (axis,) = with_channels
        reason = ctx.reason(_with_cause(ctx, unread[axis])) if axis in unread else None
        if unread.get(axis) != _NOT_FINITE:
            summed = Sum(x.labels[axis], total, reason)
            ctx.table.sums.append(summed)
    for axis, text in unread.items() if summed is None else ():
        ctx.freeze(x.labels[axis], _with_cause(ctx, text))
    out = axes_of(x, left)
    dead = out.dead
    if ctx.name in ("reduce_sum", "reduce_prod"):
        count = total if is_sum else None
        aval: Any = ctx.eqn.outvars[0].aval
        dead = tuple(sum_of(value, count, aval.dtype) for value in dead)
    # What is read beside the channels that are left is not known beside it.
    known = [] if reading else left
    shared = ctx.share_axes({axis: (own,) for axis, own in enumerate(known)})
    return [Traced(out.labels, dead, summed=summed, shared=shared)]


def _count_dead(ctx: Context, x: Traced, axes: Sequence[int]) -> dict[int, str]:
    """Has dead channels counted along axes, with what they are.

    Of axes whose dead channels share something, one can be cut: what this is where the
    other one is dead too is not known.

    Returns:
      Axes along which they cannot be counted, and why.
    """
    unread: dict[int, str] = {}
    counted: list[int] = []
    is_choice = ctx.name not in ("reduce_sum", "reduce_prod")  # jumps at a tie
    # XLA aborts where numbers of less than a byte are put beside each other.
    is_put_back = ctx.name != "reduce_sum" or len(axes) > 1
    is_narrow = is_put_back and _is_narrow(ctx.eqn.invars[0].aval)
    for axis in sorted(axes, key=lambda axis: axis not in x.shared):
        value = x.dead[axis]
        if value is not None and not math.isfinite(value):
            unread[axis] = _NOT_FINITE
        elif is_narrow:
            unread[axis] = _NARROW
        elif axis in x.shared:
            ctx.table.read_shared(x.shared[axis])
            counted.append(axis)
        elif is_exact(value) or (value is not None and not is_choice):
            counted.append(axis)
        else:
            unread[axis] = _NOT_KNOWN
    ctx.notes["counted"] = tuple(counted)
    ctx.cut_one_of([x.labels[axis] for axis in counted if axis in x.shared])
    return unread


def _with_cause(ctx: Context, text: str) -> str:
    """Adds to why channels stay what made it so, and what to do about it."""
    kind = {_NOT_FINITE: "broken", _NOT_KNOWN: "different"}.get(text)
    return ctx.because(text, kind) if kind else text


def reduce_by_program(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Combines positions in a way of the caller's own; other axes stay apart."""
    count = len(operands) // 2
    xs, starts = operands[:count], operands[count:]
    gone = ctx.eqn.params["dimensions"]
    left = [axis for axis in range(len(xs[0].labels)) if axis not in gone]
    for axis in gone:
        joined = ctx.join_axes(*((index, axis) for index in range(count)))
        ctx.freeze(joined, "combines positions along it in a way of its own")
    labels = [
        ctx.join_axes(*((index, axis) for index in range(count))) for axis in left
    ]
    dead = [_combined(ctx, [x.dead[axis] for x in xs], starts) for axis in left]
    return [
        Traced(tuple(labels), tuple(values[index] for values in dead))
        for index in range(count)
    ]


def _combined(
    ctx: Context, values: Sequence[Value], starts: Sequence[Traced]
) -> Sequence[Value]:
    """What a program makes of numbers that start as they are and stay so, if it does.

    Only programs that have a finite derivative everywhere are tried.
    """
    unknown = [math.nan] * len(values)
    program = ctx.eqn.params["jaxpr"]
    names = {eqn.primitive.name for eqn in open_program(program).eqns}
    is_same = all(
        is_exact(a) and a == b.number for a, b in zip(values, starts, strict=True)
    )
    if not is_same or not names <= _BOUNDED:
        return unknown
    results = ctx.walk(program, [*starts, *starts]).results
    is_kept = all(
        is_exact(a.number) and a.number == b
        for a, b in zip(results, values, strict=True)
    )
    return values if is_kept else unknown


def _is_narrow(aval: Any) -> bool:
    is_whole = jax.dtypes.issubdtype(aval.dtype, np.integer)
    return is_whole and jax.numpy.iinfo(aval.dtype).bits < 8


def over_mesh(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Sums over a mesh; over axes of a vmap they have become axes of the array."""
    axes = [axis for axis in ctx.eqn.params["axes"] if isinstance(axis, int)]
    results = []
    for x in operands:
        for axis in axes:
            if not (ctx.name.startswith("psum") and x.dead[axis] == 0):
                ctx.freeze(x.labels[axis], _NOT_ZERO)
        left = axes_of(x, [axis for axis in range(len(x.labels)) if axis not in axes])
        dead = left.dead
        if ctx.name.startswith("psum"):
            dead = tuple(sum_of(value) for value in dead)
        results.append(Traced(left.labels, dead))
    return results


def reduce_window(ctx: Context, x: Traced, *rest: Traced) -> Sequence[Traced]:
    """Axes with a window of one position stay what they are."""
    params, shape = ctx.eqn.params, ctx.out_shape()
    if len(ctx.eqn.outvars) != 1:
        return freeze_all(ctx, x, *rest)
    labels = list(x.labels)
    for axis, size in enumerate(params["window_dimensions"]):
        is_moved = tuple(params["padding"][axis]) != (0, 0)
        if size != 1 or is_moved or len(x.labels[axis]) != shape[axis]:
            ctx.freeze(x.labels[axis], "slides a window along it")
            labels[axis] = frozen_axis(shape[axis])
    is_choice = ctx.name in ("reduce_window_max", "reduce_window_min")
    dead = x.dead if is_choice else tuple(sum_of(value) for value in x.dead)
    if is_choice and _sees_only_padding(params):  # which is infinite
        dead = tuple(same_value([value, math.inf]) for value in dead)
    if ctx.name == "reduce_window":  # combines values in a way that is not looked up
        dead = tuple(None if value == 0 else value for value in dead)
    return [Traced(tuple(labels), dead)]


def _sees_only_padding(params: Mapping[str, Any]) -> bool:
    """Whether a window may hold nothing but padding, or gaps between positions."""
    gaps = params.get("base_dilation") or (1,) * len(params["padding"])
    axes = zip(params["window_dimensions"], params["padding"], gaps, strict=True)
    return any(max(*ends) >= size or gap > size for size, ends, gap in axes)


def _check_products(
    ctx: Context, labels: np.ndarray, left: float | None, right: float | None
) -> None:
    """Products of what is dead are summed up: exact if they are zero."""
    product = value_of("mul", [left, right])
    if product != 0:
        is_finite = product is None or math.isfinite(product)
        text = _NOT_ZERO if is_finite else _NOT_FINITE
        ctx.freeze(labels, _with_cause(ctx, text))


def _count_products(ctx: Context, joined: np.ndarray, i: int, j: int) -> bool:
    """Has products of what dead channels share counted, where they are not zero."""
    left, right = ctx.operands
    shared = ctx.share(i, j)
    product = value_of("mul", [left.dead[i], right.dead[j]])
    is_finite = product is None or math.isfinite(product)
    if product == 0 or shared is None or not is_finite:
        _check_products(ctx, joined, left.dead[i], right.dead[j])
        return False
    if not has_channels(joined):
        return False
    for source in shared.sources:
        ctx.table.read_shared(source)
    return True


def dot_general(ctx: Context, left: Traced, right: Traced) -> Sequence[Traced]:
    """Contracted axes are joined, and so are batch axes."""
    (left_sum, right_sum), (left_batch, right_batch) = ctx.eqn.params[
        "dimension_numbers"
    ]
    counted: list[tuple[int, int]] = []
    of_counted: list[np.ndarray] = []
    is_computed = left.constant is None and right.constant is None
    for i, j in zip(left_sum, right_sum, strict=True):
        joined = ctx.join_axes((0, i), (1, j))
        if is_computed and left.is_fixed and right.is_fixed:  # of a product of two
            ctx.table.move(joined)
        if _count_products(ctx, joined, i, j):
            counted.append((i, j))
            of_counted.append(joined)
    ctx.notes["counted"] = tuple(counted)
    ctx.cut_one_of(of_counted)
    labels: list[np.ndarray] = []
    dead: list[float | None] = []
    for i, j in zip(left_batch, right_batch, strict=True):
        labels.append(ctx.join_axes((0, i), (1, j)))
        dead.append(sum_of(value_of("mul", [left.dead[i], right.dead[j]])))
    shared: dict[int, Shared] = {}
    for index, operand, used in (
        (0, left, (*left_sum, *left_batch)),
        (1, right, (*right_sum, *right_batch)),
    ):
        for axis, own in enumerate(operand.labels):
            if axis not in used:
                found = ctx.share(*((None, axis) if index else (axis, None)))
                if found is not None and not counted:
                    shared[len(labels)] = found
                labels.append(own)
                dead.append(sum_of(operand.dead[axis]))
    return [Traced(tuple(labels), tuple(dead), shared=shared)]


def ragged_dot(
    ctx: Context, left: Traced, right: Traced, sizes: Traced
) -> Sequence[Traced]:
    """Products of runs of rows with a matrix each: a product along all other axes."""
    numbers = ctx.eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    ragged, of_groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    if set(ragged) & {*contracted[0], *batch[0]}:
        return freeze_all(ctx, left, right, sizes, text="sums up runs of rows apart")
    for index, operand, axes in (
        (0, left, ragged),
        (1, right, of_groups),
        (2, sizes, range(len(sizes.labels))),
    ):
        for axis in axes:
            ctx.freeze(operand.labels[axis], "counts positions along it")
            ctx.fits[index, axis] = operand.labels[axis]
    for i, j in zip(*contracted, strict=True):
        joined = ctx.join_axes((0, i), (1, j))
        _check_products(ctx, joined, left.dead[i], right.dead[j])
    labels: list[np.ndarray] = []
    dead: list[Value] = []
    for i, j in zip(*batch, strict=True):
        labels.append(ctx.join_axes((0, i), (1, j)))
        dead.append(sum_of(value_of("mul", [left.dead[i], right.dead[j]])))
    for operand, used in (
        (left, (*contracted[0], *batch[0])),
        (right, (*contracted[1], *batch[1], *of_groups)),
    ):
        for axis, own in enumerate(operand.labels):
            if axis not in used:
                is_frozen = operand is left and axis in ragged
                labels.append(frozen_axis(len(own)) if is_frozen else own)
                dead.append(sum_of(operand.dead[axis]))
    return [Traced(tuple(labels), tuple(dead))]


def conv(ctx: Context, x: Traced, kernel: Traced) -> Sequence[Traced]:
    """Spatial axes stay; channels in are joined, channels out are the kernel's."""
    params, shape = ctx.eqn.params, ctx.out_shape()
    if params["batch_group_count"] != 1:
        return freeze_all(ctx, x, kernel, text="convolves images in groups")
    numbers = params["dimension_numbers"]
    x_batch, x_in, *x_space = numbers.lhs_spec
    k_out, k_in, *k_space = numbers.rhs_spec
    out_batch, out_feature, *_ = numbers.out_spec
    text = "convolves along it, so neighbours mix"
    for image_axis, window_axis in zip(x_space, k_space, strict=True):
        ctx.freeze(x.labels[image_axis], text)
        ctx.freeze(kernel.labels[window_axis], text, is_inherent=True)
    labels = [frozen_axis(size) for size in shape]
    dead: list[float | None] = [None] * len(shape)
    labels[out_batch], dead[out_batch] = x.labels[x_batch], sum_of(x.dead[x_batch])
    labels[out_feature] = kernel.labels[k_out]
    dead[out_feature] = sum_of(kernel.dead[k_out])
    groups = params["feature_group_count"]
    if groups == 1:
        joined = ctx.join_axes((0, x_in), (1, k_in))
        _check_products(ctx, joined, x.dead[x_in], kernel.dead[k_in])
    else:
        labels[out_feature], dead[out_feature] = _grouped(
            ctx, groups, (x, x_in), (kernel, k_in, k_out)
        )
    return [Traced(tuple(labels), tuple(dead))]


def _grouped(
    ctx: Context,
    groups: int,
    image: tuple[Traced, int],
    filters: tuple[Traced, int, int],
) -> tuple[np.ndarray, Value]:
    """Ties the channels of a convolution in groups; returns those that come out.

    Either whole groups can be removed, or as many channels of every group, of those
    that come in the same ones. Of the latter only the filters are dead, not what they
    see.
    """
    (x, x_in), (kernel, k_in, k_out) = image, filters
    of_groups = sum_of(value_of("mul", [x.dead[x_in], kernel.dead[k_out]]))
    of_filters = sum_of(value_of("mul", [None, kernel.dead[k_out]]))
    axes = [x.labels[x_in], kernel.labels[k_in], kernel.labels[k_out]]
    if not any(has_channels(labels) for labels in axes):
        return kernel.labels[k_out], of_filters
    num_in, num_out = len(kernel.labels[k_in]), len(kernel.labels[k_out]) // groups
    if num_in == num_out == 1:
        return ctx.join_axes((0, x_in), (1, k_out)), of_groups
    which = ctx.own(0, x_in)
    if num_in > 1:
        inside = ctx.own(1, k_in)
        block = which.reshape(groups, num_in)
        which = ctx.table.fresh(groups)
        ctx.multiply(block, [which, inside])
        _check_products(ctx, inside, x.dead[x_in], kernel.dead[k_in])
    outside = ctx.own(1, k_out)
    # Whole groups where only they are zero when they are dead.
    is_whole = num_out == 1 or (of_groups == 0 and of_filters != 0)
    if is_whole:
        ctx.fits[1, k_out] = ctx.join(np.repeat(which, num_out), outside)
        return ctx.fits[1, k_out], of_groups
    block = outside.reshape(groups, num_out)
    ctx.multiply(block, [which, ctx.table.fresh(num_out)], loose=1)
    return outside, same_value([of_groups, of_filters])


def cumulative(ctx: Context, x: Traced) -> Sequence[Traced]:
    """A running sum passes over zeros; other running results do not."""
    along = ctx.eqn.params["axis"]
    labels, dead = list(x.labels), [sum_of(value) for value in x.dead]
    if ctx.name == "cumlogsumexp":  # of zeros, it is not zero
        dead = [math.nan if is_nan(value) else None for value in x.dead]
    if ctx.name == "cumsum" and x.dead[along] == 0:
        dead[along] = None
    else:
        ctx.freeze(labels[along], "runs along it")
        labels[along] = frozen_axis(len(labels[along]))
    others = [axis for axis in range(len(labels)) if axis != along]
    shared = ctx.share_axes({axis: (axis,) for axis in others})
    return [Traced(tuple(labels), tuple(dead), shared=shared)]


def arg_reduce(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The position of an extreme counts positions."""
    gone = ctx.eqn.params["axes"]
    for axis in gone:
        ctx.freeze(x.labels[axis], "counts positions along it")
    out = axes_of(x, [axis for axis in range(len(x.labels)) if axis not in gone])
    # Of equal numbers, the first is the extreme one; of others, one that is nan.
    is_known = [is_exact(value) and not x.may_be_nan for value in out.dead]
    dead = tuple(0.0 if known else None for known in is_known)
    (axis,) = gone
    return [Traced(out.labels, dead, below=x.shape[axis])]


def sort(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Everything is ordered along one axis by values of one operand."""
    along = ctx.eqn.params["dimension"]
    labels = []
    for axis, own in enumerate(operands[0].labels):
        joined = ctx.join_axes(*((i, axis) for i in range(len(operands))))
        if axis == along:
            ctx.freeze(joined, "orders positions along it")
            joined = frozen_axis(len(own))
        labels.append(joined)
    return [Traced(tuple(labels), x.dead) for x in operands]


def top_k(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The largest along the last axis, and where they are."""
    params = ctx.eqn.params
    along = params.get("reduction_dimension", params.get("axis", -1)) % len(x.labels)
    ctx.freeze(x.labels[along], "orders positions along it")
    results = []
    for index in range(len(ctx.eqn.outvars)):
        out = frozen_value(ctx.out_shape(index), f"a result of {ctx.name}")
        labels = list(x.labels)
        labels[along] = out.labels[along]
        dead = x.dead if index == 0 else (None,) * len(labels)
        results.append(Traced(tuple(labels), dead, origin=out.origin))
    return results
