"""What methods share that send the largest entries of gradients.

Entries of all leaves compete in one flat float32 buffer: `Layout` says how a tree lies
in it, `Sparsifier` sends its largest entries and keeps the rest, `EntrySizes` counts
what that sends. `topk` and `dgc` say what the tree is. What is kept are trees like the
parameters, so that they can lie in slices, too; then entries compete in every slice.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.settings import Range
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.comm import (
    FLOAT32,
    TopK,
    Wire,
    check_local,
    dense_size,
    mean_of_entries,
    mean_of_largest,
    mean_over_devices,
    mean_over_hosts,
)
from prunex_jax.comm.chunks import CHUNK
from prunex_jax.mesh import ALONE, MeshAxes, axis_size
from prunex_jax.methods.method import Recipe
from prunex_jax.sparsity import entry_count, largest_entries


def is_named(paths: Iterable[str], names: Sequence[str]) -> list[bool]:
    """Whether each path contains one of the names."""
    return [any(name in path for name in names) for path in paths]


def zeros_like(params: PyTree) -> PyTree:
    """float32 zeros in the shapes of parameters: nothing is held back yet."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


def mean_in_host(grads: PyTree, axes: MeshAxes) -> PyTree:
    """Mean gradient of the host, in float32.

    Collectives:
      As `comm.mean_over_devices`.
    """
    check_local(grads, axes)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    return mean_over_devices(wide, axes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tree lies in a buffer: leaves that are chosen from, then the others."""

    shapes: tuple[tuple[int, ...], ...]  # Of the leaves, in the order of the tree.
    # What one host chooses of each, or 1 where all leaves compete; 0 for all of it.
    counts: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Entries of every leaf, in the order of the tree."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def order(self) -> list[int]:
        """Positions of leaves in the tree, in the order of the buffer."""
        return sorted(range(len(self.counts)), key=lambda i: self.counts[i] == 0)

    @property
    def num_entries(self) -> int:
        """Entries of all leaves."""
        return sum(self.sizes)

    @property
    def num_open(self) -> int:
        """Entries that are chosen from."""
        pairs = zip(self.sizes, self.counts, strict=True)
        return sum(size for size, count in pairs if count)

    def join(self, tree: PyTree) -> jax.Array:
        """Puts the leaves of a tree into one buffer, float32[num_entries]."""
        leaves = jax.tree.leaves(tree)
        parts = [leaves[i].astype(jnp.float32).ravel() for i in self.order]
        return jnp.concatenate(parts)

    def split(self, buffer: jax.Array, like: PyTree) -> PyTree:
        """Takes a buffer apart again, into a tree like another; inverse of `join`."""
        leaves, structure = jax.tree.flatten(like)
        start = 0
        for i in self.order:
            part = buffer[start : start + self.sizes[i]]
            leaves[i] = part.reshape(self.shapes[i])
            start += self.sizes[i]
        return jax.tree.unflatten(structure, leaves)


# The parts of `Sent`, of a buffer.
_Buffers = tuple[jax.Array, jax.Array, jax.Array | None]
# Share of the entries that every host sends.
_DENSITY = Range(above=0, at_most=1)


class Sent(NamedTuple):
    """What became of a tree; three trees like it."""

    mean: PyTree  # float32, replicated: of what all hosts have sent
    held_back: PyTree  # float32, per_host: the tree less what this host has sent
    is_sent: PyTree | None  # bool, per_host: which entries; None if all were


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """Sends the largest entries of a tree."""

    density: float  # Share of the entries that every host sends.
    wire: Wire = FLOAT32  # Format of their values on the host axis.
    # Whether the largest are those of every 4,096 entries, whose positions need twelve
    # bits, or of all, whose positions are int32.
    in_chunks: bool = False
    # Leaves whose path contains one of these do not compete: they are averaged whole,
    # in float32.
    send_whole: tuple[str, ...] = ()
    axes: MeshAxes = ALONE  # Mesh axes.

    def __post_init__(self) -> None:
        """Rejects what cannot be sent."""
        _DENSITY.check("density", self.density)

    def send(self, tree: PyTree, density: float | None = None) -> Sent:
        """Averages the largest entries of a tree, float32, per_host, over hosts.

        `density` takes the place of the usual one.

        Collectives:
          As `comm.mean_of_entries`, or in chunks as `comm.mean_of_largest`, and as
          `comm.mean_over_hosts` for what is sent whole. With one host nothing is sent,
          and nothing held back: the mean is the tree.
        """
        density = self.density if density is None else density
        _DENSITY.check("density", density)
        layout = self._layout_of(tree)
        if axis_size(self.axes.host) == 1 or not layout.num_open:
            mean = mean_over_hosts(tree, self.axes)
            return Sent(mean, jax.tree.map(jnp.zeros_like, tree), None)
        buffer = layout.join(tree)
        competing, whole = buffer[: layout.num_open], buffer[layout.num_open :]
        send = self._send_of_chunks if self.in_chunks else self._send_of_all
        mean, held_back, is_sent = send(competing, density)
        if whole.size:
            mean = jnp.concatenate([mean, mean_over_hosts(whole, self.axes)])
            held_back = jnp.concatenate([held_back, jnp.zeros_like(whole)])
            if is_sent is not None:
                is_sent = jnp.concatenate([is_sent, jnp.zeros(whole.size, bool)])
        return Sent(
            layout.split(mean, tree),
            layout.split(held_back, tree),
            None if is_sent is None else layout.split(is_sent, tree),
        )

    def _layout_of(self, tree: PyTree) -> Layout:
        """How a tree lies in the buffer: what competes, then what is sent whole."""
        shapes = shapes_by_path(tree)
        is_whole = is_named(shapes, self.send_whole)
        return Layout(tuple(shapes.values()), tuple(int(not each) for each in is_whole))

    def _send_of_all(self, competing: jax.Array, density: float) -> _Buffers:
        size = competing.size
        count = entry_count(density, size)
        positions = largest_entries(competing, count)
        values = competing[positions]
        mean, sent = mean_of_entries(positions, values, size, self.axes, self.wire)
        held_back = competing.at[positions].set(values - sent, unique_indices=True)
        if count == size:
            return mean, held_back, None
        unsent = jnp.zeros_like(competing, bool)
        return mean, held_back, unsent.at[positions].set(True)

    def _send_of_chunks(self, competing: jax.Array, density: float) -> _Buffers:
        top = top_of(density)
        mean, held_back = mean_of_largest(competing, top, self.axes, self.wire)
        is_whole = top.per_chunk == CHUNK
        # What a wire has rounded to zero was not sent.
        return mean, held_back, None if is_whole else held_back != competing


def top_of(density: float) -> TopK:
    """What is sent of every chunk: an even number of entries, at least two.

    Example:
      >>> top_of(0.001).per_chunk, top_of(0.01).per_chunk, top_of(1.0).per_chunk
      (4, 40, 4096)
    """
    return TopK(min(CHUNK, max(2, 2 * round(density * CHUNK / 2))))


class EntrySizes:
    """Sizes of what competes and of what is sent whole."""

    def __init__(self, recipe: Recipe, in_chunks: bool) -> None:
        self.in_chunks = in_chunks
        shapes = recipe.own_shapes
        named = is_named(shapes, recipe.config.send_whole)
        pairs = zip(shapes.items(), named, strict=True)
        whole = {path: shape for (path, shape), is_whole in pairs if is_whole}
        self.wire = recipe.wire
        self.num_whole = dense_size(whole)
        self.num_open = dense_size(shapes) - self.num_whole

    def count(self, density: float) -> int:
        """Entries that a host sends with their positions."""
        if not self.num_open:
            return 0
        if self.in_chunks:
            return -(-self.num_open // CHUNK) * top_of(density).per_chunk
        return entry_count(density, self.num_open)

    def position_bytes(self, density: float) -> int:
        """Bytes of the positions that a host sends."""
        count = self.count(density)
        return count * 3 // 2 if self.in_chunks else count * 4
