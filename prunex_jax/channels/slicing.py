"""Takes channels out of trees and puts them back: the only code that indexes channels.

Works on any tree whose paths the groups name: parameters, moments, duals, statistics.
Leaves that no group touches pass through. Sizes are static, indices may be traced.

Leaves may lie in slices over devices, along an axis whose layout has a `window`. Then
every device works on what it has, and nothing is sent here: where channels lie along
that axis, results are this device's part of a sum over all of them.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.trees import PyTree, map_with_path
from prunex_jax.channels.groups import AxisLayout, Layouts
from prunex_jax.mesh import axis_size, position, vary

# Of an entry of a flat array, in int32.
_LARGEST_INDEX = 2**31 - 1

KeepIndices = Mapping[str, jax.Array]
Masks = Mapping[str, jax.Array]


def mask_of(keep_indices: jax.Array, size: int) -> jax.Array:
    """Turns kept positions into booleans.

    Args:
      keep_indices: int32[keep_count], each in [0, size).
      size: Number of channels of the group.
    Returns:
      bool[size], True where kept.
    Example:
      >>> mask_of(jnp.array([0, 2]), 4).tolist()
      [True, False, True, False]
    """
    return jnp.zeros(size, bool).at[keep_indices].set(True)


def take_channels(tree: PyTree, layouts: Layouts, keep_indices: KeepIndices) -> PyTree:
    """Keeps only the given channels of every leaf, in their old order.

    Cuts along every touched axis, so keeping half of the input and half of the output
    channels of a kernel leaves a quarter.

    Args:
      tree: Any tree; leaves are arrays of the shapes the layouts were made for.
      layouts: From `groups.layouts_of`.
      keep_indices: int32[keep_count] per group, sorted; may be traced.
    Returns:
      A tree of the same structure with smaller leaves. Of an axis in slices it has all
      kept channels, zeros for those that other devices have.
    """

    def source_of(layout: AxisLayout) -> jax.Array:
        kept = _kept_positions(layout, keep_indices)
        return kept if layout.window is None else kept - _start_of(layout)

    return _gathered(tree, layouts, keep_indices, source_of)


def put_channels(tree: PyTree, layouts: Layouts, keep_indices: KeepIndices) -> PyTree:
    """Puts kept channels back where they came from, zeros elsewhere.

    The inverse of `take_channels` on what was kept:
    `put_channels(take_channels(x)) == mask_channels(x)`.

    Args:
      tree: What `take_channels` returned for the same layouts and indices, of an axis
        in slices the sum over all devices.
      layouts: From `groups.layouts_of`.
      keep_indices: As given to `take_channels`.
    Returns:
      A tree of full-size leaves, of an axis in slices the slice of this device.
    """

    def source_of(layout: AxisLayout) -> jax.Array:
        # Where each position comes from, or out of range: a gather through this map is
        # faster than a scatter on CPU and GPU.
        kept = _kept_positions(layout, keep_indices)
        source = jnp.full(layout.size, kept.size, jnp.int32)
        source = source.at[kept].set(jnp.arange(kept.size, dtype=jnp.int32))
        return _in_window(layout, source, fill=kept.size)

    return _gathered(tree, layouts, keep_indices, source_of)


def mask_channels(tree: PyTree, layouts: Layouts, masks: Masks) -> PyTree:
    """Sets the channels that are not kept to exact zeros.

    Args:
      tree: Any tree of floating leaves.
      layouts: From `groups.layouts_of`.
      masks: bool[size] per group, True where kept; may be traced.
    Returns:
      A tree of the same shapes. Dead entries are 0 even where they were not finite.
    """
    kept = _kept_entries(layouts, masks)

    def mask(path: str, leaf: jax.Array) -> jax.Array:
        alive = kept(path, leaf.ndim)
        if alive is None:
            return leaf
        return jnp.where(alive, leaf, jnp.zeros((), leaf.dtype))

    return map_with_path(mask, tree)


def _kept_entries(
    layouts: Layouts, masks: Masks
) -> Callable[[str, int], jax.Array | None]:
    """(path, axes) -> which entries of a leaf are kept, to broadcast; None for all."""
    kept = _once_per_layout(
        lambda layout: _in_window(layout, _axis_mask(layout, masks), fill=False)
    )

    def entries(path: str, ndim: int) -> jax.Array | None:
        alive = None
        for axis, layout in layouts.get(path, {}).items():
            own = kept(layout)
            shape = [1] * ndim
            shape[axis] = own.size
            own = own.reshape(shape)
            alive = own if alive is None else own & alive
        return alive

    return entries


def _once_per_layout(
    compute: Callable[[AxisLayout], jax.Array],
) -> Callable[[AxisLayout], jax.Array]:
    """Computes once for all axes that are divided alike; there are many of them."""
    known: dict[Hashable, jax.Array] = {}

    def lookup(layout: AxisLayout) -> jax.Array:
        if layout.key not in known:
            known[layout.key] = compute(layout)
        return known[layout.key]

    return lookup


def _gathered(
    tree: PyTree,
    layouts: Layouts,
    keep_indices: KeepIndices,
    source_of: Callable[[AxisLayout], jax.Array],
) -> PyTree:
    """Leaves with the entries that positions name, along axes that lose channels."""
    sources = _once_per_layout(source_of)

    def gather(path: str, leaf: jax.Array) -> jax.Array:
        own = {
            axis: sources(layout)
            for axis, layout in layouts.get(path, {}).items()
            if not _keeps_all(layout, keep_indices)
        }
        if not own:
            return leaf
        if leaf.size > _LARGEST_INDEX:
            for axis, source in own.items():
                leaf = _entries_along(leaf, axis, source)
            return leaf
        return _entries_at(leaf, tuple(own), tuple(own.values()))

    return map_with_path(gather, tree)


# Compiled into its callers; leaves of one shape are traced once.
@functools.partial(jax.jit, static_argnames="axes")
def _entries_at(
    leaf: jax.Array, axes: tuple[int, ...], sources: Sequence[jax.Array]
) -> jax.Array:
    """Takes positions along axes, int32[new size] each; zeros where out of range.

    Several axes are taken at once, from the flat array. One after the other, GPUs write
    what they have taken in another order and turn it, which takes 1.6 times as long
    (ResNet-50 on an H100), and CPUs write all in between, which takes up to 3.
    """
    by_axis = dict(zip(axes, sources, strict=True))
    shape = tuple(
        by_axis[axis].size if axis in by_axis else size
        for axis, size in enumerate(leaf.shape)
    )
    if 0 in leaf.shape:  # Nothing was kept, and nothing can be taken.
        return jnp.zeros(shape, leaf.dtype)
    if axes == (0,):
        return _entries_along(leaf, 0, sources[0])
    places = jax.lax.full(shape, 0, jnp.int32)
    is_there = jax.lax.full(shape, True)
    for axis, size in enumerate(leaf.shape):
        if axis in by_axis:
            at = jax.lax.broadcast_in_dim(by_axis[axis], shape, [axis])
            is_there &= (at >= 0) & (at < size)
        else:
            at = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        places += at * math.prod(leaf.shape[axis + 1 :])
    places = jnp.where(is_there, places, leaf.size)
    return jnp.take(leaf.ravel(), places, mode="fill", fill_value=0)


def _entries_along(leaf: jax.Array, axis: int, source: jax.Array) -> jax.Array:
    """Takes positions along one axis of a leaf that has some; zeros beyond its ends."""
    at = jnp.where(source < 0, leaf.shape[axis], source)
    return jnp.take(leaf, at, axis=axis, mode="fill", fill_value=0)


def _start_of(layout: AxisLayout) -> jax.typing.ArrayLike:
    """First position of the slice of an axis that this device has."""
    return position(layout.window) * _width_of(layout)


def _width_of(layout: AxisLayout) -> int:
    """Positions in a slice of an axis."""
    return -(-layout.size // axis_size(layout.window))


def _in_window(
    layout: AxisLayout, by_position: jax.Array, fill: bool | int
) -> jax.Array:
    """Of one entry per position of an axis, those of the slice that this device has."""
    if layout.window is None:
        return by_position
    width = _width_of(layout)
    missing = width * axis_size(layout.window) - layout.size
    filled = jnp.pad(by_position, (0, missing), constant_values=fill)
    return jax.lax.dynamic_slice_in_dim(
        vary(filled, (layout.window,)), _start_of(layout), width
    )


def _out_of_window(layout: AxisLayout, own: jax.Array) -> jax.Array:
    """Entries of the slice that this device has among zeros for all other positions."""
    if layout.window is None:
        return own
    whole = jnp.zeros(_width_of(layout) * axis_size(layout.window), own.dtype)
    start = (_start_of(layout),)
    placed = jax.lax.dynamic_update_slice(vary(whole, (layout.window,)), own, start)
    return placed[: layout.size]


def _keeps_all(layout: AxisLayout, keep_indices: KeepIndices) -> bool:
    """Whether an axis stays as it is: a whole one, of which all channels are kept."""
    counts = {name: indices.size for name, indices in keep_indices.items()}
    return layout.window is None and layout.kept_size(counts) == layout.size


def _kept_positions(layout: AxisLayout, keep_indices: KeepIndices) -> jax.Array:
    """Sorted int32 positions of one axis that stay."""
    parts = []
    for block in layout.blocks:
        left = jnp.asarray(block.positions)
        for axis, name in enumerate(block.names):
            left = left[(slice(None),) * axis + (keep_indices[name],)]
        parts.append(left.ravel())
    if layout.is_in_order:
        return parts[0]
    return jnp.sort(jnp.concatenate([*parts, jnp.asarray(layout.free)]))


def _axis_mask(layout: AxisLayout, masks: Masks) -> jax.Array:
    """bool[layout.size], True at positions that stay."""
    depth = max(len(block.names) for block in layout.blocks)
    # A position stays if its channel does in the first group of its block, and in the
    # second, and so on.
    alive = _factor_mask(layout, masks, 0)
    for factor in range(1, depth):
        alive = alive & _factor_mask(layout, masks, factor)
    return alive


def _factor_mask(layout: AxisLayout, masks: Masks, factor: int) -> jax.Array:
    """bool[layout.size], False where the channel of a factor of blocks is dead."""
    slices = []
    for block in layout.blocks:
        if factor < len(block.names):
            positions = np.moveaxis(block.positions, factor, 0)
            name = block.names[factor]
            slices.append((name, positions.reshape(len(positions), -1)))
    # Where to look up each position in all masks in a row, followed by one True.
    row = np.full(layout.size, sum(len(pos) for _, pos in slices), np.int32)
    start = 0
    for _, positions in slices:
        size, width = positions.shape
        row[positions.ravel()] = np.repeat(np.arange(start, start + size), width)
        start += size
    stored = [masks[name] for name, _ in slices]
    if np.array_equal(row, np.arange(start)):
        return jnp.concatenate(stored)
    return jnp.concatenate([*stored, jnp.ones(1, bool)])[row]


def sum_by_channel(tree: PyTree, layouts: Layouts) -> dict[str, jax.Array]:
    """Adds up, for every channel, all entries that carry it.

    Args:
      tree: Any tree of floating leaves.
      layouts: From `groups.layouts_of`.
    Returns:
      float32[size] per group that touches a leaf; of leaves in slices, the entries of
      this device.
    """
    return _sums(lambda x: x.astype(jnp.float32), layouts, tree)


def sum_squares_by_channel(tree: PyTree, layouts: Layouts) -> dict[str, jax.Array]:
    """Adds up, for every channel, the squares of all entries that carry it.

    An entry of a kernel belongs to its output channel and to its input channel, and
    counts in both.

    Args:
      tree: Any tree of floating leaves.
      layouts: From `groups.layouts_of`; every group must touch at least one leaf.
    Returns:
      float32[size] per group; of leaves in slices, the entries of this device.
    """
    return _sums(lambda x: jnp.square(x.astype(jnp.float32)), layouts, tree)


def sum_products_by_channel(
    tree: PyTree, other: PyTree, layouts: Layouts
) -> dict[str, jax.Array]:
    """Adds up, for every channel, the products of two trees in entries that carry it.

    Args:
      tree: Any tree of floating leaves.
      other: The same structure and shapes.
      layouts: As for `sum_squares_by_channel`.
    Returns:
      float32[size] per group.
    """

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) * y.astype(jnp.float32)

    return _sums(product, layouts, tree, other)


def _sums(
    of_leaves: Callable[..., jax.Array], layouts: Layouts, *trees: PyTree
) -> dict[str, jax.Array]:
    """Adds up what a function makes of leaves, over all entries of every channel."""
    totals: dict[str, jax.Array] = {}

    def add(path: str, *leaves: jax.Array) -> None:
        for axis, layout in layouts.get(path, {}).items():
            others = tuple(i for i in range(leaves[0].ndim) if i != axis)
            own = jnp.sum(of_leaves(*leaves), axis=others)
            by_position = _out_of_window(layout, own)
            for name, positions in layout.slices:
                is_plain = layout.is_in_order and positions.shape[1] == 1
                part = by_position
                if not is_plain:
                    part = jnp.sum(by_position[positions], axis=1)
                totals[name] = totals[name] + part if name in totals else part

    map_with_path(add, *trees)
    return totals
