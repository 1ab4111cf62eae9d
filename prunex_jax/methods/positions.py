"""Which positions of a tree are sent, and whose turn it is to choose them.

What `optim.importance`, and in part the other methods that send few entries, need to
know of shapes and turns, without any gradient.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.sparsity import entry_count


def is_named(paths: Iterable[str], names: Sequence[str]) -> list[bool]:
    """Whether each path contains one of the names.

    Example:
      >>> is_named(['stem/kernel', 'stem/bias', 'head/bias'], ['stem/k', 'head'])
      [True, False, True]
    """
    return [any(name in path for name in names) for path in paths]


def chosen_counts(
    shapes: Mapping[str, Sequence[int]],
    density: float,
    num_choosers: int,
    send_whole: Sequence[str] = (),
) -> list[int]:
    """Entries that one host chooses of every leaf; 0 where it is sent whole.

    Args:
      shapes: Of the leaves, by path.
      density: See `importance`.
      num_choosers: See `importance`.
      send_whole: See `importance`.
    Example:
      >>> shapes = {'kernel': (3, 100), 'bias': (100,), 'tiny': (2, 2)}
      >>> chosen_counts(shapes, 0.01, 4)
      [3, 0, 0]
    """
    counts = []
    named = is_named(shapes, send_whole)
    for shape, is_sent_whole in zip(shapes.values(), named, strict=True):
        size = math.prod(shape)
        count = entry_count(density, size)
        is_whole = is_sent_whole or len(shape) < 2 or num_choosers * count >= size
        counts.append(0 if is_whole else count)
    return counts


def choosers_of(
    num_choices: jax.Array, num_hosts: int, num_choosers: int, seed: int = 0
) -> jax.Array:
    """Says whose turn it is: the same on every host, without asking.

    Hosts are shuffled, take their turns, and are shuffled again.

    Args:
      num_choices: int32[], turns so far.
      num_hosts: Hosts.
      num_choosers: Those of them that choose at a time.
      seed: Of the shuffling.
    Returns:
      int32[num_choosers], distinct.
    Example:
      >>> turns = [choosers_of(jnp.int32(i), 4, 2).tolist() for i in range(2)]
      >>> sorted(turns[0] + turns[1])
      [0, 1, 2, 3]
    """
    turns_per_cycle = -(-num_hosts // num_choosers)
    cycle, turn = num_choices // turns_per_cycle, num_choices % turns_per_cycle
    key = jax.random.fold_in(jax.random.key(seed), cycle)
    order = jax.random.permutation(key, num_hosts)
    places = (turn * num_choosers + jnp.arange(num_choosers)) % num_hosts
    return order[places].astype(jnp.int32)


def sums_positions(num_choosers: int, num_hosts: int) -> bool:
    """Whether a sum, to which the others add zeros, sends less than a gather."""
    return 2 * num_choosers < num_hosts


def without_twins(positions: jax.Array, nowhere: int) -> jax.Array:
    """Sorts positions; those that occur again point nowhere instead.

    Example:
      >>> without_twins(jnp.array([7, 2, 7, 3]), 9).tolist()
      [2, 3, 7, 9]
    """
    ordered = jnp.sort(positions)
    is_again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    return jnp.where(is_again, nowhere, ordered)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tree lies in a flat buffer: leaves that are chosen from, then the others.

    Attributes:
      shapes: Of the leaves, in the order of the tree.
      counts: What one host chooses of each, or 1 where all leaves compete; 0 for all
        of it.
    """

    shapes: tuple[tuple[int, ...], ...]
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
        """Takes a buffer apart again, into the types of a tree; inverse of `join`."""
        leaves, structure = jax.tree.flatten(like)
        start = 0
        for i in self.order:
            part = buffer[start : start + self.sizes[i]]
            leaves[i] = part.reshape(self.shapes[i]).astype(leaves[i].dtype)
            start += self.sizes[i]
        return jax.tree.unflatten(structure, leaves)
