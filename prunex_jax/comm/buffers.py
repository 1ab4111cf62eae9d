"""Trees as flat buffers: all leaves in one, or in several of a limited size.

Knows nothing of the mesh: what is done with a buffer is up to the caller.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh.ordering import after

# What a buffer holds: (leaf, start, stop), one after the other.
_Pieces = list[tuple[int, int, int]]


def in_one_buffer(tree: PyTree, fn: Callable[[jax.Array], jax.Array]) -> PyTree:
    """Applies `fn` to all leaves in one flat buffer; to nothing, if there are none."""
    return in_buffers(tree, lambda buffer, _: fn(buffer))


# One buffer is one message per stage, which is best for small trees and slow starts.
# A limit pays for large ones: messages need only the leaves that are in them, so the
# first may travel while later gradients are computed, numbers of one bucket are
# encoded while those of another are on their way, and buffers of the size of the
# model are never alive at once. Whether a backend makes use of that is up to its
# scheduler; some join small sums again.
def in_buffers(
    tree: PyTree,
    fn: Callable[[jax.Array, int], Any],
    max_elements: int = 0,
    in_turn: bool = False,
) -> Any:
    """Applies a function of flat buffers to all leaves; to nothing, if there are none.

    Args:
      tree: Arrays.
      fn: (buffer [n], number of elements before it) -> buffer [n], or several.
      max_elements: Largest n, for which leaves are cut; 0 takes all leaves at once.
      in_turn: Whether a buffer also waits for the results of the one before the last,
        so that few of them are in memory at one time.
    Returns:
      As many trees as `fn` returns buffers, in the types of the tree; buffers have the
      widest of them.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    sizes = [jnp.size(leaf) for leaf in leaves]
    if not max_elements or sum(sizes) <= max_elements:
        buffer, split = ravel_pytree(tree)
        return jax.tree.map(split, fn(buffer, 0))
    dtype = jnp.result_type(*leaves)
    flat = [jnp.ravel(leaf).astype(dtype) for leaf in leaves]
    results: list[Any] = []
    offset, plan = 0, list(_plan(sizes, max_elements))
    for pieces in plan:
        parts = [flat[i][start:stop] for i, start, stop in pieces]
        if in_turn and len(results) > 1:
            parts = after(jax.tree.leaves(results[-2]), parts)
        buffer = jnp.concatenate(parts)
        results.append(fn(buffer, offset))
        offset += buffer.size

    def whole(*buffers: jax.Array) -> PyTree:
        return jax.tree.unflatten(structure, _put_together(buffers, plan, leaves))

    return jax.tree.map(whole, *results)


def _put_together(
    buffers: Sequence[jax.Array], plan: Iterable[_Pieces], leaves: Sequence[jax.Array]
) -> list[jax.Array]:
    """Cuts buffers into their pieces again, and makes leaves of these."""
    parts: list[list[jax.Array]] = [[] for _ in leaves]
    for buffer, pieces in zip(buffers, plan, strict=True):
        begin = 0
        for i, start, stop in pieces:
            parts[i].append(buffer[begin : begin + stop - start])
            begin += stop - start
    return [
        jnp.concatenate(own or [jnp.zeros(0)])
        .reshape(jnp.shape(leaf))
        .astype(jnp.result_type(leaf))
        for own, leaf in zip(parts, leaves, strict=True)
    ]


def _plan(sizes: list[int], max_elements: int) -> Iterator[_Pieces]:
    """Pieces of every bucket; all are full but the last."""
    pieces, room = [], max_elements
    for leaf, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            pieces.append((leaf, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], max_elements
    if pieces:
        yield pieces
