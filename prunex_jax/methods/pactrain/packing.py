"""What of a tree is kept, and its way into smaller arrays and back.

A packing says how large what is kept is, statically; a pattern, an array or a dict of
arrays, says where it is. Both kinds offer the same: choose a pattern by scores, put
dead entries to zero, take what is kept, put it back. `pactrain.method` sends it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path, map_with_path
from prunex_jax.channels import (
    ChannelGroup,
    Layouts,
    layouts_of,
    mask_channels,
    put_channels,
    sum_by_channel,
    take_channels,
)
from prunex_jax.comm import Slicing, compact_size, dense_size, sum_over_slices
from prunex_jax.mesh import ALONE, MeshAxes
from prunex_jax.sparsity import choose_keep_indices, entry_count, masks_of

Pattern = Any
Shapes = Mapping[str, tuple[int, ...]]


class Packing(Protocol):
    """How a tree is packed; implementations are static and know shapes only."""

    @property
    def num_kept(self) -> int:
        """Entries of a packed tree."""

    def scores(self, entries: PyTree) -> Any:
        """Adds up the scores of entries that live or die together; linear."""

    def choose(self, scores: Any) -> Pattern:
        """The pattern that keeps what scores highest, the same for the same scores."""

    def mask(self, tree: PyTree, pattern: Pattern) -> PyTree:
        """Puts what is not kept to exact zeros."""

    def pack(self, tree: PyTree, pattern: Pattern) -> PyTree:
        """Takes what is kept."""

    def unpack(self, packed: PyTree, pattern: Pattern, like: PyTree) -> PyTree:
        """Puts it back, zeros elsewhere; `like` has the structure and types."""

    def masks(self, pattern: Pattern) -> dict[str, jax.Array]:
        """Channel masks, bool[size] per group; {} if whole channels are not dead."""


class ChannelPacking:
    """Whole channels; what is kept is smaller along every axis that a group touches.

    A pattern is int32[keep_count] per group, sorted.

    Args:
      groups: Channel groups.
      keep_counts: Static number of channels that each of them keeps.
      shapes: Shape of every parameter by path.
      slicing: How trees lie in slices; None if they are whole. A packed tree are slices
        of what is kept, then; scores and patterns are those of whole trees.
    """

    def __init__(
        self,
        groups: Sequence[ChannelGroup],
        keep_counts: Mapping[str, int],
        shapes: Shapes,
        slicing: Slicing | None = None,
    ) -> None:
        self.sizes = {group.name: group.size for group in groups}
        self.keep_counts = {name: keep_counts[name] for name in self.sizes}
        self.layouts: Layouts = layouts_of(groups, shapes)
        self.slicing = slicing
        self.axes = ALONE
        self.num_kept = compact_size(shapes, self.layouts, self.keep_counts)
        if slicing is not None:
            left = slicing.own_kept_shapes(self.layouts, self.keep_counts)
            self.num_kept = dense_size(left)
            self.layouts = slicing.layouts(self.layouts)
            self.axes = MeshAxes(None, None, slicing.axis)

    def scores(self, entries: PyTree) -> dict[str, jax.Array]:
        """Sums over all entries that carry a channel, float32[size] per group.

        Collectives:
          Of slices, as `comm.sum_over_slices` for one number per channel.
        """
        totals = {name: jnp.zeros(size) for name, size in self.sizes.items()}
        totals |= sum_by_channel(entries, self.layouts)
        found: dict[str, jax.Array] = sum_over_slices(totals, self.axes)
        return found

    def choose(self, scores: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """See `Packing.choose`; each group keeps its count."""
        return choose_keep_indices(scores, self.keep_counts)

    def mask(self, tree: PyTree, pattern: Pattern) -> PyTree:
        """See `Packing.mask`."""
        return mask_channels(tree, self.layouts, self.masks(pattern))

    def pack(self, tree: PyTree, pattern: Pattern) -> PyTree:
        """See `Packing.pack`.

        Collectives:
          Of slices, as `Slicing.take_kept`.
        """
        take = take_channels if self.slicing is None else self.slicing.take_kept
        return take(tree, self.layouts, pattern)

    def unpack(self, packed: PyTree, pattern: Pattern, like: PyTree) -> PyTree:
        """See `Packing.unpack`.

        Collectives:
          Of slices, as `Slicing.put_kept`.
        """
        del like
        put = put_channels if self.slicing is None else self.slicing.put_kept
        return put(packed, self.layouts, pattern)

    def masks(self, pattern: Pattern) -> dict[str, jax.Array]:
        """See `Packing.masks`."""
        return masks_of(pattern, self.sizes)


@dataclasses.dataclass(frozen=True)
class WeightPacking:
    """Single entries of kernels; vectors are kept whole.

    A pattern is int32[number of kept entries of kernels], sorted: positions in all
    kernels one after the other. Kernels compete with each other.
    """

    density: float  # Share of the entries of kernels that is kept, in (0, 1].
    shapes: Shapes  # Shape of every parameter by path.

    def __post_init__(self) -> None:
        """Rejects a density that means nothing."""
        if not 0.0 < self.density <= 1.0:
            raise UserError(f"density {self.density:g} is outside (0, 1]")

    @property
    def starts(self) -> dict[str, int]:
        """Position of the first entry of every kernel."""
        starts, start = {}, 0
        for path, shape in self.shapes.items():
            if len(shape) > 1:
                starts[path] = start
                start += math.prod(shape)
        return starts

    @property
    def _num_weights(self) -> int:
        """Entries of all kernels."""
        return sum(math.prod(shape) for shape in self.shapes.values() if len(shape) > 1)

    @property
    def _num_kept_weights(self) -> int:
        """Those of them that are kept."""
        return entry_count(self.density, self._num_weights) if self._num_weights else 0

    @property
    def num_kept(self) -> int:
        """Entries of a packed tree."""
        total = sum(math.prod(shape) for shape in self.shapes.values())
        return total - self._num_weights + self._num_kept_weights

    def scores(self, entries: PyTree) -> jax.Array:
        """The entries of all kernels, float32[weights]."""
        return self._join(entries).astype(jnp.float32)

    def choose(self, scores: jax.Array) -> jax.Array:
        """See `Packing.choose`; the first of equals are kept, numbers before NaN."""
        numbers = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        kept = jax.lax.top_k(numbers, self._num_kept_weights)[1]
        return jnp.sort(kept).astype(jnp.int32)

    def mask(self, tree: PyTree, pattern: Pattern) -> PyTree:
        """See `Packing.mask`."""
        alive = jnp.zeros(self._num_weights, bool).at[pattern].set(True)

        def mask(path: str, leaf: jax.Array) -> jax.Array:
            if path not in self.starts:
                return leaf
            own = self._part(alive, path)
            return jnp.where(own, leaf, jnp.zeros((), leaf.dtype))

        return map_with_path(mask, tree)

    def pack(self, tree: PyTree, pattern: Pattern) -> PyTree:
        """See `Packing.pack`."""
        leaves = flatten_by_path(tree)
        whole = [leaf for path, leaf in leaves.items() if path not in self.starts]
        return self._join(tree)[pattern], whole

    def unpack(self, packed: PyTree, pattern: Pattern, like: PyTree) -> PyTree:
        """See `Packing.unpack`."""
        kept, whole = packed
        weights = jnp.zeros(self._num_weights, kept.dtype).at[pattern].set(kept)
        rest = iter(whole)

        def unpack(path: str, leaf: jax.Array) -> jax.Array:
            if path not in self.starts:
                return next(rest).astype(leaf.dtype)
            return self._part(weights, path).astype(leaf.dtype)

        return map_with_path(unpack, like)

    def masks(self, pattern: Pattern) -> dict[str, jax.Array]:
        """See `Packing.masks`: there are none."""
        del pattern
        return {}

    def _join(self, tree: PyTree) -> jax.Array:
        leaves = flatten_by_path(tree)
        parts = [leaves[path].ravel() for path in self.starts]
        return jnp.concatenate(parts) if parts else jnp.zeros(0)

    def _part(self, buffer: jax.Array, path: str) -> jax.Array:
        start, shape = self.starts[path], self.shapes[path]
        return buffer[start : start + math.prod(shape)].reshape(shape)
