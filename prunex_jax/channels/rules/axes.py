"""Rules of operations that move, make, cut or join axes."""

from collections.abc import Sequence

import numpy as np

from prunex_jax.channels.context import Context, freeze_all
from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    Shared,
    Traced,
    frozen_axis,
    has_channels,
    uniform_axis,
    uniform_value,
)
from prunex_jax.channels.numbers import is_nan, same_value
from prunex_jax.channels.shuffles import reshape_blocks


def passthrough(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Results are the operands."""
    return [Traced(x.labels, x.dead, x.number) for x in operands]


def axes_of(x: Traced, axes: Sequence[int]) -> Traced:
    """The value with the given axes only."""
    return Traced(tuple(x.labels[a] for a in axes), tuple(x.dead[a] for a in axes))


def broadcast_in_dim(ctx: Context, x: Traced, *sizes: Traced) -> Sequence[Traced]:
    """New axes belong to nobody."""
    shape = ctx.out_shape()
    if not x.labels:
        return [uniform_value(shape, x.number)]
    out = uniform_value(shape)
    labels, dead = list(out.labels), list(out.dead)
    alone = (None,) * len(sizes)
    # One for each axis, since what is computed beside has length 1 along that one.
    shared = {
        axis: Shared((None, *alone), varies=x.constant is None)
        for axis in range(len(shape))
    }
    for source, target in enumerate(ctx.eqn.params["broadcast_dimensions"]):
        if len(x.labels[source]) == shape[target]:
            labels[target] = x.labels[source]
            dead[target] = x.dead[source]
            found = x.shared.get(source)
            if found is None:
                del shared[target]
            else:
                shared[target] = Shared((source, *alone), (found,), found.varies)
    return [Traced(tuple(labels), tuple(dead), summed=x.summed, shared=shared)]


def transpose(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Axes change places."""
    order = ctx.eqn.params["permutation"]
    return [ctx.carry(axes_of(x, order), order)]


def squeeze(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Axes of length 1 go."""
    gone = ctx.eqn.params["dimensions"]
    left = [axis for axis in range(len(x.labels)) if axis not in gone]
    return [ctx.carry(axes_of(x, left), left)]


def rev(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Positions are reversed."""
    turned = ctx.eqn.params["dimensions"]
    labels = [own[::-1] if i in turned else own for i, own in enumerate(x.labels)]
    return [ctx.carry(Traced(tuple(labels), x.dead), range(len(labels)))]


def reshape(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Merges and splits axes, block by block."""
    shape = ctx.out_shape()
    if 0 in shape:
        return freeze_all(ctx, x)
    order = ctx.eqn.params.get("dimensions") or range(len(x.labels))
    before, x = x, axes_of(x, order)
    labels = [frozen_axis(size) for size in shape]
    dead: list[float | None] = [None] * len(shape)
    same: list[int | None] = [None] * len(shape)  # axes that are only moved
    for from_axes, to_axes in reshape_blocks(x.shape, shape):
        wide = [axis for axis in to_axes if shape[axis] != 1]
        sources = [axis for axis in from_axes if len(x.labels[axis]) != 1]
        if not wide:  # axes of length 1, which carry no channel
            continue
        carriers = _finite_carriers(ctx, x, sources) or sources
        flat = ctx.merge(
            [
                ctx.own(0, order[a]) if has_channels(x.labels[a]) else x.labels[a]
                for a in sources
            ]
        )
        split = ctx.split(flat, [shape[axis] for axis in wide])
        for axis, part in zip(wide, split, strict=True):
            labels[axis] = part
            dead[axis] = same_value([x.dead[a] for a in carriers])
        if len(wide) == len(sources) == 1:
            same[wide[0]] = order[sources[0]]
    return [ctx.carry(Traced(tuple(labels), tuple(dead), summed=before.summed), same)]


def _finite_carriers(ctx: Context, x: Traced, axes: Sequence[int]) -> list[int]:
    """Axes with channels; of several, only those that are finite where they are dead.

    Of axes that become one, only one can be cut, and not one that breaks something.
    """
    carriers = [axis for axis in axes if has_channels(x.labels[axis])]
    finite = [axis for axis in carriers if not is_nan(x.dead[axis])]
    if len(carriers) > 1 and finite:
        for axis in carriers:
            if axis not in finite:
                text = "may not be finite where channels are dead"
                ctx.freeze(x.labels[axis], ctx.because(text, "broken"))
        return finite
    return carriers


def concatenate(ctx: Context, *parts: Traced) -> Sequence[Traced]:
    """Axes other than the one along which parts are laid out are joined."""
    return _laid_out(ctx, parts, ctx.eqn.params["dimension"])


def _laid_out(
    ctx: Context, parts: Sequence[Traced], dimension: int | None
) -> Sequence[Traced]:
    labels: list[np.ndarray] = []
    dead: list[float | None] = []
    shared: dict[int, Shared] = {}
    for axis in range(len(parts[0].labels)):
        if axis == dimension:
            labels.append(np.concatenate([_placed(part, axis) for part in parts]))
        else:
            labels.append(ctx.join_axes(*((i, axis) for i in range(len(parts)))))
            found = ctx.share(*(axis for _ in parts))
            shared.update({axis: found} if found else {})
        # A part that is frozen along this axis has nothing that dies.
        mortal = [part for part in parts if (_placed(part, axis) != FROZEN).any()]
        dead.append(same_value([part.dead[axis] for part in mortal]))
    return [Traced(tuple(labels), tuple(dead), shared=shared)]


def _placed(part: Traced, axis: int) -> np.ndarray:
    """Labels of a part where it is laid out; a single constant can be cut off."""
    if part.constant is not None and part.shape[axis] == 1:
        return uniform_axis(1)
    return part.labels[axis]


def stack(ctx: Context, *parts: Traced) -> Sequence[Traced]:
    """A concatenation along a new axis."""
    new = ctx.eqn.params["axis"]
    (joined,) = _laid_out(ctx, parts, dimension=None)
    labels, dead = list(joined.labels), list(joined.dead)
    labels.insert(new, frozen_axis(len(parts)))
    dead.insert(new, None)
    shared = {axis + (axis >= new): found for axis, found in joined.shared.items()}
    return [Traced(tuple(labels), tuple(dead), shared=shared)]


def unstack(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Single positions of an axis."""
    gone = ctx.eqn.params["axis"]
    ctx.freeze(x.labels[gone], "takes single channels out")
    kept = axes_of(x, [axis for axis in range(len(x.labels)) if axis != gone])
    return [kept] * len(ctx.eqn.outvars)


def tile(ctx: Context, x: Traced) -> Sequence[Traced]:
    """The same positions again and again; of a single one, it is a broadcast."""
    reps = ctx.eqn.params["reps"]
    labels, dead = [], []
    for own, value, times in zip(x.labels, x.dead, reps, strict=True):
        is_single = len(own) == 1
        labels.append(uniform_axis(times) if is_single else np.tile(own, times))
        # What is known of a single position is known of none that is dead.
        dead.append(None if is_single else value)
    return [Traced(tuple(labels), tuple(dead))]


def slice_(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Positions at equal distances."""
    params = ctx.eqn.params
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    labels = tuple(
        axis[start:limit:stride]
        for axis, start, limit, stride in zip(
            x.labels, starts, limits, strides, strict=True
        )
    )
    return [ctx.carry(Traced(labels, x.dead), _whole(x.shape, ctx.out_shape()))]


def _whole(before: Sequence[int], after: Sequence[int]) -> list[int | None]:
    """Axes that are read in full."""
    pairs = enumerate(zip(before, after, strict=True))
    return [axis if size == left else None for axis, (size, left) in pairs]


def split(ctx: Context, x: Traced) -> Sequence[Traced]:
    """Several slices that lie side by side."""
    axis, sizes = ctx.eqn.params["axis"], ctx.eqn.params["sizes"]
    pieces = np.split(x.labels[axis], np.cumsum(sizes)[:-1])
    return [
        Traced((*x.labels[:axis], piece, *x.labels[axis + 1 :]), x.dead)
        for piece in pieces
    ]


def pad(ctx: Context, x: Traced, value: Traced) -> Sequence[Traced]:
    """Padding of a spatial axis stays; of a channel axis, it belongs to no channel."""
    labels: list[np.ndarray] = []
    for axis, (own, (low, high, interior)) in enumerate(
        zip(x.labels, ctx.eqn.params["padding_config"], strict=True)
    ):
        if min(low, high) < 0 or interior:
            ctx.freeze(own, "pads between or cuts off positions")
            size = ctx.out_shape()[axis]
            labels.append(frozen_axis(size))
        else:
            edge = FROZEN if (own == FROZEN).all() else UNIFORM
            labels.append(np.pad(own, (low, high), constant_values=edge))
    # Dead channels have padding too, and padding of a channel axis may join any.
    dead = tuple(same_value([before, value.number]) for before in x.dead)
    whole = _whole(x.shape, ctx.out_shape())
    shared = ctx.share_axes({axis: (axis, None) for axis in whole if axis is not None})
    return [Traced(tuple(labels), dead, shared=shared)]


def made(ctx: Context, *operands: Traced) -> Sequence[Traced]:
    """Counters and random numbers: drawn in full, then cut to fit.

    So what is left of them is what a network with dead channels would have drawn.
    """
    return [uniform_value(ctx.out_shape(i)) for i in range(len(ctx.eqn.outvars))]
