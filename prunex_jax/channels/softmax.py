"""What a softmax shows: its divisor is not zero, and masks of -inf may be finite in it.

A softmax subtracts the maximum of a row, so one of the row's terms is exp(0), and their
sum at least 1, or nan if the row holds what is no number. A constant mask of -inf
leaves the maximum of a row finite that has some position outside of the mask, and exp
of the rest of the row is 0. `walk` asks here what follows from an equation, whatever
its rule; an operation that is not named here says nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.channels.context import Context
from prunex_jax.channels.labels import (
    Filled,
    Masked,
    MaximumOf,
    Peaks,
    Traced,
    Transposed,
)
from prunex_jax.channels.numbers import Value

_KEEP = {"convert_element_type", "copy", "stop_gradient"}


def maximum_of(ctx: Context) -> MaximumOf | None:
    """Of what a result is the maximum, where axes may have come back with length 1."""
    if not ctx.operands or len(ctx.eqn.outvars) != 1:
        return None
    if ctx.name == "reduce_max":
        base, gone = _in_order(ctx.operands[0]), ctx.eqn.params["axes"]
        left = tuple(x for axis, x in enumerate(base.order) if axis not in gone)
        return MaximumOf(base.x, tuple(base.order[axis] for axis in gone), left)
    if ctx.name == "max":
        for x, other in (ctx.operands, ctx.operands[::-1]):
            if x.maximum_of is not None and other.number == -math.inf:
                return x.maximum_of
        return None
    if ctx.name == "select_n":
        return _finite_maximum(*ctx.operands)
    found = ctx.operands[0].maximum_of
    if found is None:
        return None
    before, after = ctx.operands[0].shape, ctx.out_shape()
    if ctx.name in ("copy", "stop_gradient"):
        return found
    own: list[int | None] = [None] * len(after)
    if ctx.name == "broadcast_in_dim":
        for source, target in enumerate(ctx.eqn.params["broadcast_dimensions"]):
            if before[source] == after[target]:
                own[target] = found.own[source]
    elif ctx.name == "transpose":
        own = [found.own[axis] for axis in ctx.eqn.params["permutation"]]
    elif ctx.name == "reshape" and _without_ones(before) == _without_ones(after):
        wide = iter(axis for axis, size in enumerate(after) if size != 1)
        for source, size in enumerate(before):
            if size != 1:
                own[next(wide)] = found.own[source]
    else:
        return None
    return MaximumOf(found.x, found.gone, tuple(own))


def _finite_maximum(which: Traced, *cases: Traced) -> MaximumOf | None:
    """Of what a choice is the maximum where it is finite, and 0 elsewhere.

    Where the maximum is infinite, the row has an entry of at least 0 without it. Only
    rows of -inf have none; of removed channels none is so where the maximum is finite.
    """
    if len(cases) != 2 or not _is_zero(cases[0]) or which.finite is not cases[1]:
        return None
    return None if any(map(_is_lost, cases[1].dead)) else cases[1].maximum_of


def _has_full_rows(found: MaximumOf) -> bool:
    """Whether it may look at no position of some row."""
    filled = found.x.filled
    return filled is not None and bool(filled.where.all(axis=found.gone).any())


def _is_zero(x: Traced) -> bool:
    return x.constant is not None and not np.asarray(x.constant.small).any()


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def transposed(ctx: Context) -> Transposed | None:
    """Of what a result is the transpose."""
    if ctx.name != "transpose":
        return None
    order = tuple(int(axis) for axis in ctx.eqn.params["permutation"])
    before = _in_order(ctx.operands[0])
    return Transposed(before.x, tuple(before.order[axis] for axis in order))


def _in_order(x: Traced) -> Transposed:
    return x.transposed or Transposed(x, tuple(range(len(x.labels))))


def peaks(ctx: Context) -> Peaks | None:
    """Along which axes every row of a result has a 0, or a 1 among what is not less."""
    if ctx.name == "sub":
        return _shifted_peaks(*ctx.operands)
    known = ctx.operands[0].peaks if ctx.operands else None
    if ctx.name == "select_n":
        return _chosen_peaks(*ctx.operands)
    if ctx.name == "mul":
        for x, factor in (ctx.operands, ctx.operands[::-1]):
            if x.peaks is not None and x.peaks.is_exp:
                return x.peaks if _keeps_peaks(x.peaks, factor) else None
        return None
    if known is None:
        return None
    if ctx.name in ("exp", "exp2") and not known.is_exp:
        return dataclasses.replace(known, is_exp=True)
    is_kept = ctx.name in _KEEP and _is_floating(ctx)
    return known if is_kept else None


def _shifted_peaks(x: Traced, top: Traced) -> Peaks | None:
    """Of a value less its maximum along some axes, perhaps of some positions of it."""
    found, before = top.maximum_of, _in_order(x)
    if found is None or not _looks_at_no_more(found, before.x):
        return None
    gone = tuple(i for i, axis in enumerate(before.order) if axis in found.gone)
    is_row_by_row = len(top.shape) == len(x.shape) and all(
        found.own[i] == (None if i in gone else axis) or x.shape[i] == 1
        for i, axis in enumerate(before.order)
    )
    if not is_row_by_row:
        return None
    filled = found.x.filled
    if filled is None or _has_full_rows(found):
        return Peaks(gone, is_exp=False)
    return Peaks(gone, False, filled.where.transpose(before.order))


def _looks_at_no_more(found: MaximumOf, x: Traced) -> bool:
    """Whether a maximum is one of this value, which has numbers where it looks."""
    if found.x is x:
        return True
    seen = found.x.filled
    if seen is None or (x.filled.x if x.filled else x) is not seen.x:
        return False
    missing = x.filled.where if x.filled else np.zeros((1,) * len(x.labels), bool)
    is_whole = _has_full_rows(found) and not (missing == seen.where).all()
    return not is_whole and not (missing & ~seen.where).any()


def _chosen_peaks(which: Traced, *cases: Traced) -> Peaks | None:
    """Of a choice that leaves peaks where they are, and has none below 0 elsewhere."""
    for index, x in enumerate(cases):
        others = [case for case in cases if case is not x]
        peaks = x.peaks
        if peaks is None or not peaks.is_exp or any(y.at_least < 0 for y in others):
            continue
        if peaks.outside is None or which.constant is None:
            return None
        is_replaced = np.asarray(which.constant.small) != index
        return peaks if not (is_replaced & ~peaks.outside).any() else None
    return None


def _keeps_peaks(peaks: Peaks, factor: Traced) -> bool:
    """Whether a constant is above zero at peaks, and nowhere below."""
    if factor.constant is None or factor.at_least < 0:
        return False
    values = np.asarray(factor.constant.small)
    outside = False if peaks.outside is None else peaks.outside
    return bool((((values > 0) | outside) & np.isfinite(values)).all())


def filled(ctx: Context) -> Filled | None:
    """What a result is where it is not -inf because of a constant mask."""
    if ctx.name != "select_n" or ctx.operands[0].constant is None:
        return None
    which, *cases = ctx.operands
    is_gone = [_is_minus_infinity(x) for x in cases]
    if len(cases) != 2 or sum(is_gone) != 1:
        return None
    x, rank = cases[is_gone.index(False)], len(ctx.out_shape())
    assert which.constant is not None
    where = np.asarray(which.constant.small).astype(bool) == is_gone[1]
    where = where.reshape(where.shape or (1,) * rank)
    before = x.filled
    if before is None:
        return Filled(x, where)
    return Filled(before.x, where | before.where)


def _is_minus_infinity(x: Traced) -> bool:
    return x.constant is not None and bool(np.isneginf(x.constant.small).all())


def is_sum_with_peak(ctx: Context) -> bool:
    """Whether a result is a sum of numbers, none below 0, one of which is 1."""
    if ctx.name != "reduce_sum" or ctx.operands[0].peaks is None:
        return False
    known = ctx.operands[0].peaks
    return known.is_exp and set(known.axes) <= set(ctx.eqn.params["axes"])


def _is_floating(ctx: Context) -> bool:
    aval: Any = ctx.eqn.outvars[0].aval
    return bool(jax.dtypes.issubdtype(aval.dtype, np.floating))


def dead_behind_mask(ctx: Context, dead: Sequence[Value]) -> tuple[Value, ...]:
    """Values of dead channels, finite where a mask of -inf in the operand is harmless.

    Args:
      ctx: The equation.
      dead: What its rule says.
    """
    masked = ctx.operands[0].masked if ctx.operands else None
    if ctx.name in ("max", "select_n") and any(map(_is_lost, dead)):
        found = _masked(ctx, len(dead))
        is_gone = found is not None and not found.where.any()
        return (
            _finite_where(dead, found.is_finite) if found and is_gone else tuple(dead)
        )
    if masked is None:
        return tuple(dead)
    if ctx.name in ("exp", "exp2"):
        return _finite_where(dead, masked.is_finite)
    if ctx.name == "reduce_max":
        gone = tuple(int(axis) for axis in ctx.eqn.params["axes"])
        if not masked.where.all(axis=gone).any():
            left = [x for a, x in enumerate(masked.is_finite) if a not in gone]
            return _finite_where(dead, left)
    return tuple(dead)


def _finite_where(
    dead: Sequence[Value], is_finite: Sequence[bool]
) -> tuple[Value, ...]:
    pairs = zip(dead, is_finite, strict=True)
    return tuple(None if ok and _is_lost(value) else value for value, ok in pairs)


def _is_lost(value: Value) -> bool:
    return value is not None and not math.isfinite(value)


def masked(ctx: Context, dead: Sequence[Value]) -> Masked | None:
    """Where a result is -inf, if only a constant mask makes it so.

    Args:
      ctx: The equation.
      dead: What its rule says of dead channels.
    """
    if not any(_is_lost(value) for value in dead) or not _is_floating(ctx):
        return None
    if all(x.constant is not None for x in ctx.operands):
        return None  # `_masked_of` looks at the constant itself
    found = _masked(ctx, len(dead))
    return found if found is not None and found.where.any() else None


def _masked(ctx: Context, rank: int) -> Masked | None:
    if ctx.name == "select_n":
        which, *cases = ctx.operands
        known = [_masked_of(x, rank) for x in cases]
        if which.finite is not None and which.finite is cases[-1]:
            return _where_finite(known)
        return None if which.constant is None else _chosen(which, known, rank)
    if ctx.name == "scatter-max":
        return _with_empty_segments(ctx)
    known = [_masked_of(x, rank) for x in ctx.operands]
    if any(each is None for each in known):
        return None
    first, *others = [each for each in known if each is not None]
    if ctx.name in _KEEP:
        return first
    if ctx.name == "transpose":
        order = ctx.eqn.params["permutation"]
        is_finite = tuple(first.is_finite[axis] for axis in order)
        return Masked(first.where.transpose(order), is_finite)
    if ctx.name in ("add", "add_any"):
        return _both(first, others[0])
    if ctx.name == "max":
        both = _both(first, others[0])
        return Masked(first.where & others[0].where, both.is_finite)
    if ctx.name == "mul" and _is_scale(ctx.operands[0]):
        return others[0]
    is_scaled = ctx.name in ("div", "mul") and _is_scale(ctx.operands[1])
    is_shifted = ctx.name == "sub" and not others[0].where.any()
    return _both(first, others[0]) if is_scaled or is_shifted else None


def _both(one: Masked, other: Masked) -> Masked:
    pairs = zip(one.is_finite, other.is_finite, strict=True)
    return Masked(one.where | other.where, tuple(a and b for a, b in pairs))


def _where_finite(cases: Sequence[Masked | None]) -> Masked | None:
    """Of a choice of the last case where it is finite."""
    instead, last = cases
    if instead is None or last is None or instead.where.any():
        return None
    return Masked(instead.where, _both(instead, last).is_finite)


def _with_empty_segments(ctx: Context) -> Masked | None:
    """Of the largest of what is written anywhere; -inf where nothing is."""
    x, _, updates = ctx.operands
    if not _is_minus_infinity(x):
        return None
    numbers = ctx.eqn.params["dimension_numbers"]
    skipped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter(numbers.update_window_dims)
    is_finite = [
        axis in skipped or not _is_lost(updates.dead[next(windows)])
        for axis in range(len(x.labels))
    ]
    return Masked(np.ones((1,) * len(x.labels), bool), tuple(is_finite))


def _chosen(which: Traced, cases: Sequence[Masked | None], rank: int) -> Masked | None:
    assert which.constant is not None
    known = [each for each in cases if each is not None]
    if len(known) != len(cases):
        return None
    chosen = np.asarray(which.constant.small).astype(np.int64)
    chosen = chosen.reshape(chosen.shape or (1,) * rank)
    where = np.choose(chosen, [each.where for each in known])
    finite = zip(*(each.is_finite for each in known), strict=True)
    return Masked(where.astype(bool), tuple(all(own) for own in finite))


def _is_scale(x: Traced) -> bool:
    """Whether this is a constant whose numbers are finite and above zero."""
    if x.number is not None:
        return 0 < x.number < math.inf
    if x.constant is None or not x.is_positive:
        return False
    return bool(np.isfinite(np.asarray(x.constant.small)).all())


def _masked_of(x: Traced, rank: int) -> Masked | None:
    """Where an operand is -inf, and along which axes it is finite elsewhere."""
    nowhere = np.zeros((1,) * rank, bool)
    if x.masked is not None:
        return x.masked
    if not any(_is_lost(value) for value in (x.number, *x.dead)):
        return Masked(nowhere, (True,) * rank)
    if x.constant is not None:
        values = np.asarray(x.constant.small, np.float32)
        where = np.isneginf(values)
        if not (where | np.isfinite(values)).all():
            return None
        return Masked(where.reshape(where.shape or (1,) * rank), (True,) * rank)
    if len(x.dead) != rank:
        return None
    return Masked(nowhere, tuple(not _is_lost(value) for value in x.dead))
