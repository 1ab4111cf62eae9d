"""Rules of operations that mix some axes and leave the others apart, as batches are.

Every table below says of operations by name which axes are left apart. Along these they
do at each position the same; all others stay.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from prunex_jax.channels.context import Context
from prunex_jax.channels.labels import Shared, Traced, frozen_value
from prunex_jax.channels.numbers import Value, sum_of

_MIXED = "mixes positions along it"


@dataclasses.dataclass(frozen=True)
class Batch:
    """An axis along which an operation does the same at each position."""

    operands: Mapping[int, int]  # Operand -> its axis.
    results: Mapping[int, int]  # Result -> its axis.


@dataclasses.dataclass(frozen=True)
class Batched:
    """An operation that leaves axes apart.

    Attributes:
      batches: Which ones, of an equation.
      linear_in: The operand in which results are linear: zero where it is zero.
      divides: Whether it divides by other operands, as by a matrix, which may have no
        inverse where it is dead.
    """

    batches: Callable[[Context], Sequence[Batch]]
    linear_in: int = 0
    divides: bool = False


def apart(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """The rule of everything in `BATCHED`."""
    what = BATCHED[ctx.name]
    batches = what.batches(ctx)
    _freeze_others(ctx, batches)
    origin = f"a result of {ctx.name}"
    results = [
        frozen_value(ctx.out_shape(i), origin) for i in range(len(ctx.eqn.outvars))
    ]
    labels = [list(result.labels) for result in results]
    dead = [list(result.dead) for result in results]
    shared: list[dict[int, Shared]] = [{} for _ in results]
    for batch in batches:
        joined = ctx.join_axes(*batch.operands.items())
        value = _value_along(ctx, batch, what)
        for result, axis in batch.results.items():
            labels[result][axis], dead[result][axis] = joined, value
            if len(operands) == 1:
                shared[result] |= ctx.share_axes({axis: (batch.operands[0],)})
    return [
        Traced(tuple(own), tuple(values), origin=origin, shared=found)
        for own, values, found in zip(labels, dead, shared, strict=True)
    ]


def _freeze_others(ctx: Context, batches: Sequence[Batch]) -> None:
    for index, operand in enumerate(ctx.operands):
        kept = {b.operands[index] for b in batches if index in b.operands}
        for axis, labels in enumerate(operand.labels):
            if axis not in kept:
                ctx.freeze(labels, _MIXED)
                ctx.fits[index, axis] = labels


def _value_along(ctx: Context, batch: Batch, what: Batched) -> Value:
    """What results are where a batch is dead."""
    index = what.linear_in
    if index not in batch.operands:
        return math.nan
    others = [i for i in batch.operands if i != index and not ctx.operands[i].is_given]
    if what.divides and others:
        return math.nan
    return sum_of(ctx.operands[index].dead[batch.operands[index]])


def _leading(num_mixed: int) -> Callable[[Context], list[Batch]]:
    """All axes but so many of the first operand's last ones; they come first."""

    def batches(ctx: Context) -> list[Batch]:
        count = len(ctx.operands[0].labels) - num_mixed
        return [_same(ctx, axis) for axis in range(count)]

    return batches


def _same(ctx: Context, axis: int) -> Batch:
    """An axis that has the same number everywhere."""
    return Batch(
        dict.fromkeys(range(len(ctx.operands)), axis),
        dict.fromkeys(range(len(ctx.eqn.outvars)), axis),
    )


def _of_fft(ctx: Context) -> list[Batch]:
    return _leading(len(ctx.eqn.params["fft_lengths"]))(ctx)


def _of_xor(ctx: Context) -> list[Batch]:
    gone = ctx.eqn.params["axes"]
    left = [a for a in range(len(ctx.operands[0].labels)) if a not in gone]
    return [Batch({0: axis}, {0: index}) for index, axis in enumerate(left)]


def _of_triangular_solve(ctx: Context) -> list[Batch]:
    """Besides axes in front, the columns that are solved for one by one."""
    count = len(ctx.operands[0].labels)
    alone = count - 1 if ctx.eqn.params["left_side"] else count - 2
    return [*_leading(2)(ctx), Batch({1: alone}, {0: alone})]


def _of_tridiagonal_solve(ctx: Context) -> list[Batch]:
    alone = len(ctx.operands[0].labels)
    return [*_leading(1)(ctx), Batch({3: alone}, {0: alone})]


def _of_windows(ctx: Context) -> list[Batch]:
    """Axes with windows of one position."""
    params = ctx.eqn.params
    windows = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        strict=True,
    )
    return [
        _same(ctx, axis)
        for axis, (size, stride, padding) in enumerate(windows)
        if size == stride == 1 and tuple(padding) == (0, 0)
    ]


BATCHED: Mapping[str, Batched] = {
    "fft": Batched(_of_fft),
    "reduce_xor": Batched(_of_xor),
    "select_and_scatter_add": Batched(_of_windows),
    "triangular_solve": Batched(_of_triangular_solve, linear_in=1, divides=True),
    "tridiagonal_solve": Batched(_of_tridiagonal_solve, linear_in=3, divides=True),
}
