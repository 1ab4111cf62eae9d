"""Chooses the largest entries of a flat buffer, many of very many.

JAX has `lax.top_k`, which on CPUs and GPUs looks at or sorts the whole buffer. Here it
sees little of the buffer only. Counts are static, so shapes are.

Which of them runs, and how long 0.1 % and 1 % of 11.2 M entries take on two CPU cores
(`make benchmark-compression`, where the ways not taken are rows, too; n=15):

- few entries: `by_blocks`, 16 and 137 ms; top_k takes 75 and 216 ms.
- many entries: `by_threshold`, 0.3 s for any number of them; the others take several
  seconds for a quarter of all entries.

A threshold that is guessed from a sample, as DGC has it, is not faster, 128 and 130 ms:
what it leaves must be counted off in order.

Both are plain array programs, and give the same entries, but for ties, on every
backend. On GPUs, where nothing was measured, the same choice leaves two small sorts,
instead of one of everything.
"""

import functools
import math

import jax
import jax.numpy as jnp

# Up to this many entries, there is nothing to gain over top_k.
_SMALL = 4096
# Share of the entries from which on counting is faster than sorting.
_LARGE_SHARE = 0.02
# Slices of the buffer that are compared with each other; every one is an operation.
_MAX_SLICES = 64


def entry_count(density: float, size: int) -> int:
    """Entries that a density chooses; at least one.

    Example:
      >>> entry_count(0.01, 1000), entry_count(0.01, 10)
      (10, 1)
    """
    return min(size, max(1, round(density * size)))


def largest_entries(buffer: jax.Array, count: int) -> jax.Array:
    """Positions of the entries of largest magnitude, in the fastest way known.

    Args:
      buffer: float32[n]. What is not finite counts as large.
      count: How many, static.
    Returns:
      int32[count], without repetition, in no order that means anything.
    Example:
      >>> largest_entries(jnp.array([0.5, -3.0, 0.0, 2.0]), 2).tolist()
      [1, 3]
    """
    size = buffer.size
    if count >= size:
        return jnp.arange(size, dtype=jnp.int32)
    if size <= _SMALL:
        return jax.lax.top_k(jnp.abs(buffer), count)[1]
    if count > _LARGE_SHARE * size:
        return by_threshold(buffer, count)
    return by_blocks(buffer, count)


def by_blocks(buffer: jax.Array, count: int) -> jax.Array:
    """Positions of the largest magnitudes, looked for in the most promising blocks.

    Of all blocks of the buffer, those with the `count` largest maxima hold all of the
    `count` largest entries. Blocks of sqrt(n / count) entries make both choices equally
    large.
    """
    size = buffer.size
    num_slices = max(1, min(_MAX_SLICES, math.isqrt(size // count)))
    width = size // num_slices
    # Blocks are columns: entries `width` apart, so that maxima are those of slices.
    slices = _slices(buffer, num_slices)
    maxima = functools.reduce(jnp.maximum, [jnp.abs(part) for part in slices])
    blocks = jax.lax.top_k(maxima, min(count, width))[1]
    found = _in_columns(blocks, num_slices, width).reshape(-1)
    rest = jnp.arange(num_slices * width, size, dtype=jnp.int32)
    candidates = jnp.concatenate([found, rest])
    return candidates[jax.lax.top_k(jnp.abs(buffer[candidates]), count)[1]]


def by_threshold(buffer: jax.Array, count: int) -> jax.Array:
    """Positions of the largest magnitudes, rising, above one found by counting.

    Of floats without sign the bits are in order, so 31 halvings find the magnitude of
    the last entry that is chosen. Of those equal to it, the first are.
    """
    bits = jax.lax.bitcast_convert_type(buffer, jnp.int32) & jnp.int32(0x7FFFFFFF)

    def halve(index: jax.Array, smallest: jax.Array) -> jax.Array:
        middle = smallest + (jnp.int32(1) << (30 - index))
        is_below = jnp.sum(bits >= middle, dtype=jnp.int32) >= count
        return jnp.where(is_below, middle, smallest)

    # A zero that varies over the mesh as the buffer does, which loops insist on.
    last = jax.lax.fori_loop(0, 31, halve, bits[0] & 0)
    num_larger = jnp.sum(bits > last, dtype=jnp.int32)
    is_tie = bits == last
    is_first = jnp.cumsum(is_tie, dtype=jnp.int32) <= count - num_larger
    is_chosen = (bits > last) | (is_tie & is_first)
    place = jnp.cumsum(is_chosen, dtype=jnp.int32) - 1
    positions = jnp.arange(buffer.size, dtype=jnp.int32)
    return (
        jnp.zeros(count, jnp.int32)
        .at[jnp.where(is_chosen, place, count)]
        .set(positions, mode="drop")
    )


def _slices(buffer: jax.Array, num_slices: int) -> list[jax.Array]:
    width = buffer.size // num_slices
    return [buffer[i * width : (i + 1) * width] for i in range(num_slices)]


def _in_columns(columns: jax.Array, num_slices: int, width: int) -> jax.Array:
    """Positions of all entries of columns, int32[num_slices, columns]."""
    rows = jnp.arange(num_slices, dtype=jnp.int32)
    return rows[:, None] * width + columns[None, :]
