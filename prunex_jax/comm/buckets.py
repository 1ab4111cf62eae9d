"""Trees as flat buffers: one for all leaves, or several of limited size.

One buffer is one message per stage, which is best for small trees and slow starts. A
limit on its size pays for large ones. Messages then need only the leaves that are in
them, so that the first may travel while later gradients are still being computed, and
the numbers of one bucket are encoded while those of another are on their way; and
buffers of the size of the model, several of them, are never alive at once. Whether a
backend makes use of that is up to its scheduler; some join small sums again.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from prunex_jax.base.trees import PyTree


def apply_fused(
    tree: PyTree, fn: Callable[[jax.Array, int], jax.Array], max_elements: int = 0
) -> PyTree:
    """Applies a function of flat buffers to all leaves.

    Args:
      tree: Arrays; without any, nothing happens.
      fn: (buffer [n], number of elements before it) -> buffer [n].
      max_elements: Largest n; 0 takes all leaves at once. Leaves are cut where that is
        needed, and a buffer depends on those leaves only that it holds.
    Returns:
      The tree of the results, in its own types; buffers have the widest of them.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    sizes = [jnp.size(leaf) for leaf in leaves]
    if not max_elements or sum(sizes) <= max_elements:
        buffer, split = ravel_pytree(tree)
        return split(fn(buffer, 0))
    dtype = jnp.result_type(*leaves)
    flat = [jnp.ravel(leaf).astype(dtype) for leaf in leaves]
    found: list[list[jax.Array]] = [[] for _ in leaves]
    offset = 0
    for pieces in _plan(sizes, max_elements):
        buffer = jnp.concatenate([flat[i][start:stop] for i, start, stop in pieces])
        result, begin = fn(buffer, offset), 0
        for i, start, stop in pieces:
            found[i].append(result[begin : begin + stop - start])
            begin += stop - start
        offset += buffer.size
    whole = [
        jnp.concatenate(parts or [jnp.zeros(0)])
        .reshape(jnp.shape(leaf))
        .astype(jnp.result_type(leaf))
        for parts, leaf in zip(found, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, whole)


def _plan(sizes: list[int], max_elements: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces (leaf, start, stop) of every bucket; all are full but the last."""
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
