"""Trees in slices: every device of a host has an equal part of every array.

An array is cut along its longest axis, filled up with zeros to a multiple of the
devices. Work on single entries is the same on slices; sums over whole arrays also need
`sum_over_slices`, and channels that lie along the axis that is cut are put together
from what every device keeps of them. Nothing here crosses hosts.
"""

import dataclasses
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from prunex_jax.base.trees import (
    PyTree,
    flatten_by_path,
    map_with_path,
    named_by,
    shapes_by_path,
)
from prunex_jax.channels import (
    AxisLayout,
    KeepIndices,
    Layouts,
    kept_shape,
    put_channels,
    take_channels,
    windowed,
)
from prunex_jax.comm import collectives
from prunex_jax.mesh import DEVICE_AXIS, MeshAxes, position, vary
from prunex_jax.mesh.ordering import after

Shape = tuple[int, ...]
# Arrays of fewer elements travel together: a message for each would not pay.
_SMALL = 2**16


@dataclasses.dataclass(frozen=True, eq=False)
class Slicing:
    """How the parameters of a network, and trees like them, lie in slices.

    Attributes:
      shapes: Shape of every whole array by path.
      parts: Devices of a host, P.
      axis: Their mesh axis.
    Example:
      >>> Slicing({'kernel': (3, 10), 'scale': ()}, 4).own_shapes
      {'kernel': (3, 3), 'scale': ()}
    """

    shapes: Mapping[str, Shape]
    parts: int
    axis: str = DEVICE_AXIS

    @property
    def dims(self) -> dict[str, int]:
        """The axis along which every array is cut; 0 for single numbers."""
        return {path: _longest(shape) for path, shape in self.shapes.items()}

    @property
    def own_shapes(self) -> dict[str, Shape]:
        """Shape of every slice. Of a single number, the first device has it."""
        return {
            path: part_shape(shape, self.parts) for path, shape in self.shapes.items()
        }

    def own_kept_shapes(
        self, layouts: Layouts, keep_counts: Mapping[str, int]
    ) -> dict[str, Shape]:
        """Shape of every slice of what is left of the arrays; see `take_kept`."""
        dims = self.dims
        left = {
            path: kept_shape(shape, layouts.get(path), keep_counts)
            for path, shape in self.shapes.items()
        }
        return {p: part_shape(shape, self.parts, dims[p]) for p, shape in left.items()}

    def layouts(self, whole: Layouts) -> Layouts:
        """Layouts of the slices from those of the whole arrays."""
        return windowed(whole, self.dims, self.axis)

    def take(self, tree: PyTree) -> PyTree:
        """The slices of this device, of a tree that every device of a host has whole.

        Args:
          tree: Arrays of `shapes`, the same on all devices of a host.
        Returns:
          Arrays of `own_shapes`. Nothing moves.
        """
        dims = self.dims
        return map_with_path(lambda path, x: self.part_of(x, dims[path]), tree)

    def part_of(self, whole: jax.Array, dim: int) -> jax.Array:
        """The slice of this device of an array that is cut along an axis."""
        filled = vary(_filled(whole, dim, self.parts), (self.axis,))
        width = filled.shape[dim] // self.parts
        start = position(self.axis) * width
        found = jax.lax.dynamic_slice_in_dim(filled, start, width, dim)
        return _like(found, whole.ndim)

    def among_zeros(self, own: jax.Array, dim: int, size: int) -> jax.Array:
        """An array that is zero but in the slice of this device, which is given.

        The sum of what all devices get is the array of that size along its axis.
        """
        width = own.shape[dim]
        shape = (*own.shape[:dim], width * self.parts, *own.shape[dim + 1 :])
        zeros = vary(jnp.zeros(shape, own.dtype), (self.axis,))
        start = position(self.axis) * width
        placed = jax.lax.dynamic_update_slice_in_dim(zeros, own, start, dim)
        return jax.lax.slice_in_dim(placed, 0, size, axis=dim)

    def join(self, slices: PyTree) -> PyTree:
        """Puts slices together; inverse of `take`.

        Args:
          slices: Arrays of `own_shapes`.
        Returns:
          Arrays of `shapes`, the same on all devices of a host.
        Collectives:
          As `joining` lists: gathers over the device axis.
        """
        return self._joined(slices, self.shapes)

    def take_all(self, tree: PyTree) -> PyTree:
        """As `take`, of a tree that holds trees of parameters, as an optimizer does."""
        owners = self.owners(tree, self.shapes)
        own = self._for(owners).take(_some(tree, owners))
        return map_with_path(lambda path, leaf: own.get(path, leaf), tree)

    def join_all(self, tree: PyTree) -> PyTree:
        """As `join`, of a tree that holds trees of slices; others stay.

        Collectives:
          As `join` for each of these trees.
        """
        owners = self.owners(tree, self.own_shapes)
        whole = self._for(owners).join(_some(tree, owners))
        return map_with_path(lambda path, leaf: whole.get(path, leaf), tree)

    def owners(self, tree: PyTree, shapes: Mapping[str, Shape]) -> dict[str, str]:
        """Path of every leaf that is named and shaped as a parameter, and whose."""
        return {
            path: name
            for path, shape in shapes_by_path(tree).items()
            if (name := named_by(path, shapes)) is not None and shape == shapes[name]
        }

    def _for(self, owners: Mapping[str, str]) -> "Slicing":
        """The same for leaves that belong to parameters."""
        shapes = {path: self.shapes[name] for path, name in owners.items()}
        return dataclasses.replace(self, shapes=shapes)

    def mean_of(self, tree: PyTree) -> PyTree:
        """Averages a tree over the devices of a host; each keeps its slice of the mean.

        Args:
          tree: Arrays of `shapes`, per_device.
        Returns:
          Arrays of `own_shapes`.
        Collectives:
          As `averaging` lists: scattered sums over the device axis. With `join` after
          it, it sends what a sum over the devices sends.
        """
        return self._scattered(jax.tree.map(lambda x: x / self.parts, tree), self.dims)

    def value_and_grad(
        self,
        loss: Callable[..., tuple[jax.Array, PyTree]],
        dtype: str | None = None,
    ) -> Callable[..., tuple[tuple[jax.Array, PyTree], PyTree]]:
        """As `jax.value_and_grad` with `has_aux`, for whole parameters from slices.

        Parameters are gathered for the forward pass and, those of them that the
        backward pass reads, once more for that: no device keeps them in between.

        Args:
          loss: (whole parameters, ...) -> (loss, more).
          dtype: Type in which they are gathered; None takes that of the slices.
        Returns:
          (slices, ...) -> ((loss, more), gradients in slices, the mean over the devices
          of a host). Slices are typed as different everywhere; see `mesh.vary`.
        Collectives:
          As `join`, as `join` for some of the parameters, and as `mean_of`: at most one
          and a half times what a sum over the devices sends.
        """

        def joined(slicing: Slicing, own: PyTree) -> PyTree:
            narrow = jax.tree.map(lambda x: x.astype(dtype or x.dtype), own)
            whole = vary(slicing.join(narrow), (self.axis,))
            return jax.tree.map(lambda x, like: x.astype(like.dtype), whole, own)

        def run(slices: PyTree, *rest: Any) -> tuple[tuple[jax.Array, PyTree], PyTree]:
            whole = joined(self, slices)
            value, pull_back, more = jax.vjp(
                lambda params: loss(params, *rest), whole, has_aux=True
            )
            # What the backward pass has kept: parameters among it are gathered again.
            kept, structure = jax.tree.flatten(pull_back)
            paths = {id(leaf): path for path, leaf in flatten_by_path(whole).items()}
            needed = {paths[id(leaf)] for leaf in kept if id(leaf) in paths}
            # Compilers would take a second gather for the first, and keep what that has
            # made: it waits for the forward pass.
            again = joined(
                self._for({path: path for path in needed}),
                after([value], _some(slices, needed)),
            )
            pull_back = jax.tree.unflatten(
                structure,
                [again.get(paths.get(id(leaf), ""), leaf) for leaf in kept],
            )
            (grads,) = pull_back(jax.lax.full_like(value, 1))
            return (value, more), self.mean_of(grads)

        return run

    def take_kept(
        self, slices: PyTree, layouts: Layouts, keep_indices: KeepIndices
    ) -> PyTree:
        """Keeps only the given channels: slices of what is left of the whole arrays.

        Args:
          slices: Arrays of `own_shapes`.
          layouts: As `layouts` returns them.
          keep_indices: int32[keep_count] per group, sorted, the same on all devices.
        Returns:
          Arrays of `own_kept_shapes`.
        Collectives:
          As `taking` lists: scattered sums of the arrays that are cut along an axis
          of which some channels go, as they are left.
        """
        layouts = self._that_lose(layouts, _sizes_of(keep_indices))
        kept = take_channels(slices, layouts, keep_indices)
        dims = self.dims
        return self._scattered(
            kept, {path: dims[path] for path in self._mixed(layouts)}
        )

    def put_kept(
        self, kept: PyTree, layouts: Layouts, keep_indices: KeepIndices
    ) -> PyTree:
        """Puts kept channels back, zeros elsewhere; inverse of `take_kept`.

        Collectives:
          As `putting` lists: gathers of the same arrays.
        """
        counts = _sizes_of(keep_indices)
        layouts = self._that_lose(layouts, counts)
        shapes = {
            path: kept_shape(self.shapes[path], layouts[path], counts)
            for path in self._mixed(layouts)
        }
        return put_channels(self._joined(kept, shapes), layouts, keep_indices)

    def _that_lose(self, layouts: Layouts, counts: Mapping[str, int]) -> Layouts:
        """Layouts without the cut axes that keep all their channels.

        Slices of such an array are slices of what is left of it.
        """

        def lose(path: str, axes: Mapping[int, AxisLayout]) -> dict[int, AxisLayout]:
            shape, cut = self.shapes[path], self.dims.get(path)
            left = kept_shape(shape, axes, counts)
            return {
                d: axis for d, axis in axes.items() if (d, left[d]) != (cut, shape[d])
            }

        return {path: lose(path, axes) for path, axes in layouts.items()}

    def _mixed(self, layouts: Layouts) -> list[str]:
        """Arrays that are cut along an axis with channels; devices keep some each."""
        dims = self.dims.items()
        return [path for path, dim in dims if dim in layouts.get(path, {})]

    def _scattered(self, tree: PyTree, dims: Mapping[str, int]) -> PyTree:
        """Sums arrays over devices, of which each keeps a slice; the others stay."""
        leaves = flatten_by_path(tree)
        filled = [_filled(leaves[path], dim, self.parts) for path, dim in dims.items()]
        slices = _in_messages(
            filled,
            list(dims.values()),
            lambda array, dim: collectives.scatter_sum(array, self.axis, dim),
            (self.parts, 1),
        )
        found = dict(zip(dims, slices, strict=True))

        def own(path: str, leaf: jax.Array) -> jax.Array:
            return _like(found[path], leaf.ndim) if path in found else leaf

        return map_with_path(own, tree)

    def _joined(self, slices: PyTree, shapes: Mapping[str, Shape]) -> PyTree:
        """Puts the slices of arrays of these shapes together; the others stay."""
        leaves, dims = flatten_by_path(slices), self.dims
        own = [jnp.atleast_1d(leaves[path]) for path in shapes]
        filled = _in_messages(
            own,
            [dims[path] for path in shapes],
            lambda array, dim: collectives.join_shares(array, self.axis, dim),
            (1, self.parts),
        )
        joined = dict(zip(shapes, filled, strict=True))

        def whole(path: str, leaf: jax.Array) -> jax.Array:
            if path not in shapes:
                return leaf
            sizes = [slice(size) for size in shapes[path] or (1,)]
            return joined[path][tuple(sizes)].reshape(shapes[path])

        return map_with_path(whole, slices)


def part_shape(shape: Shape, parts: int, dim: int | None = None) -> Shape:
    """Shape of one of so many slices of an array.

    Args:
      shape: Of the array, perhaps of what is left of it.
      parts: How many.
      dim: Axis along which it is cut; None takes the longest.
    Example:
      >>> part_shape((3, 10), 4), part_shape((), 4)
      ((3, 3), ())
    """
    if not shape:
        return ()
    cut = _longest(shape) if dim is None else dim
    return (*shape[:cut], -(-shape[cut] // parts), *shape[cut + 1 :])


def slices_of(whole: np.ndarray, parts: int) -> np.ndarray:
    """All slices of an array: [parts, ...].

    Example:
      >>> slices_of(np.arange(5), 2).tolist()
      [[0, 1, 2], [3, 4, 0]]
    """
    dim, own = _longest(whole.shape), np.atleast_1d(whole)
    widths = [(0, 0)] * own.ndim
    widths[dim] = (0, -own.shape[dim] % parts)
    rows = np.stack(np.split(np.pad(own, widths), parts, axis=dim))
    return rows if whole.ndim else rows.reshape(parts)


def whole_of(slices: np.ndarray, shape: Shape) -> np.ndarray:
    """The array of some shape of which these are all slices; inverts `slices_of`.

    Example:
      >>> whole_of(np.array([[0, 1, 2], [3, 4, 0]]), (5,)).tolist()
      [0, 1, 2, 3, 4]
    """
    rows = list(slices) if shape else [row.reshape(1) for row in slices]
    filled = np.concatenate(rows, axis=_longest(shape))
    found: np.ndarray = filled[tuple(slice(size) for size in shape or (1,))]
    return found.reshape(shape)


def _sizes_of(keep_indices: KeepIndices) -> dict[str, int]:
    return {name: indices.size for name, indices in keep_indices.items()}


def _some(tree: PyTree, paths: Container[str]) -> dict[str, jax.Array]:
    """Leaves by path, those that are among some."""
    return {path: x for path, x in flatten_by_path(tree).items() if path in paths}


def sum_over_slices(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Adds up what the devices of a host found in their slices.

    Args:
      tree: Floating leaves; few numbers, as all devices get all of the sum.
      axes: Mesh axes; without `slices`, the tree stays as it is.
    Collectives:
      One sum over the axis of the slices, of all leaves together.
    """
    axis, leaves = axes.slices, jax.tree.leaves(tree)
    if axis is None or not leaves:
        return tree
    fused, split = ravel_pytree(tree)
    return split(collectives.sum_at_once(fused, axis))


def key_of_slice(key: jax.Array, axes: MeshAxes) -> jax.Array:
    """The random key of this device's slice, from one that all devices have."""
    if axes.slices is None:
        return key
    return jax.random.fold_in(key, position(axes.slices))


def _in_messages(
    arrays: Sequence[jax.Array],
    dims: Sequence[int],
    send: Callable[[jax.Array, int], jax.Array],
    parts: tuple[int, int],
) -> list[jax.Array]:
    """Sends large arrays as they are, and all small ones as one.

    `send` takes an array and the axis along which it is shared out, or put together;
    `parts` says how many parts of a whole array go in, and come out.
    """
    before, after = parts
    is_large = [_is_large(array.size * after) for array in arrays]
    # Small arrays lie side by side in rows, one for each part.
    rows = [
        jnp.moveaxis(array, dim, 0)
        for array, dim, large in zip(arrays, dims, is_large, strict=True)
        if not large
    ]
    columns: list[jax.Array] = []
    if rows:
        flat = [row.reshape(before, row.size // before) for row in rows]
        dtype = jnp.result_type(*flat)
        fused = jnp.concatenate([part.astype(dtype) for part in flat], axis=1)
        sent = send(fused.ravel(), 0).reshape(after, fused.shape[1])
        stops = itertools.accumulate(part.shape[1] for part in flat)
        columns = jnp.split(sent, list(stops)[:-1], axis=1)
    small = iter(zip(rows, columns, strict=True))

    def received(array: jax.Array, dim: int, large: bool) -> jax.Array:
        if large:
            return send(array, dim)
        row, column = next(small)
        shape = (row.shape[0] * after // before, *row.shape[1:])
        return jnp.moveaxis(column.reshape(shape), 0, dim).astype(array.dtype)

    return [received(*each) for each in zip(arrays, dims, is_large, strict=True)]


def _is_large(num_elements: int) -> bool:
    """Whether an array of so many elements is a message of its own."""
    return num_elements >= _SMALL


def _longest(shape: Shape) -> int:
    """The first of the longest axes; 0 for single numbers."""
    return shape.index(max(shape)) if shape else 0


def _filled(leaf: jax.Array, dim: int, parts: int) -> jax.Array:
    """The array, of one axis at least, with zeros up to a multiple of the parts."""
    leaf = jnp.atleast_1d(leaf)
    missing = -leaf.shape[dim] % parts
    if not missing:
        return leaf
    widths = [(0, missing if axis == dim else 0) for axis in range(leaf.ndim)]
    return jnp.pad(leaf, widths)


def _like(leaf: jax.Array, ndim: int) -> jax.Array:
    """The array as it was before `_filled` gave a single number an axis."""
    return leaf.reshape(()) if ndim == 0 else leaf
