"""Says which example comes when, and which random numbers belong to it.

Everything here is a pure function of (seed, position). There is no state to save, so
resuming needs the step and nothing else, and batches do not depend on the number of
processes, devices or threads; on that of hosts only where each has a shard of its own.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
# Positions of the endless stream, int64[size] -> examples of the set, int64[size].
Order = Callable[[Positions], Positions]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Separate the uses of one seed, so that order and augmentation are independent.
_ORDER_STREAM = 1
_AUGMENT_STREAM = 2
_SUBSET_STREAM = 3
SHARD_STREAM = 4
MIXING_STREAM = 5


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambles 64-bit words one to one, so that close inputs look unrelated.

    References:
      Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014,
      https://doi.org/10.1145/2660193.2660195, with the constants of SplitMix64.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _key(*numbers: int) -> npt.NDArray[np.uint64]:
    """Returns uint64[1], a key that depends on every number and on their order."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = _mix((key ^ np.uint64(number & _WORD)) + np.uint64(_GOLDEN))
    return key


def _hashes(key: npt.NDArray[np.uint64], counters: Positions) -> npt.NDArray[np.uint64]:
    """Returns one independent word per counter under a key, uint64[size]."""
    return _mix(key + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))


def permutation(num_examples: int, *key: int) -> Positions:
    """Returns the positions 0 .. num_examples-1 in an order that the key decides.

    Sorting hashed positions gives the same order on every machine and with every numpy
    version, which a random generator's own permutation does not promise.
    """
    counters = np.arange(num_examples, dtype=np.int64)
    return np.argsort(_hashes(_key(*key), counters), kind="stable")


def split_positions(
    num_examples: int, num_taken: int, seed: int
) -> tuple[Positions, Positions]:
    """Divides positions at random into those left and those taken, each sorted."""
    order = permutation(num_examples, _SUBSET_STREAM, seed)
    return np.sort(order[num_taken:]), np.sort(order[:num_taken])


def uniforms(
    seed: int, positions: Positions, num_draws: int, stream: int = _AUGMENT_STREAM
) -> npt.NDArray[np.float64]:
    """Returns the random numbers that belong to positions of the stream.

    They are float64[size, num_draws] in [0, 1). Row k depends on `seed`, `stream` and
    `positions[k]` only, and its first columns do not depend on `num_draws`.
    """
    rows = _hashes(_key(stream, seed), positions)
    draws = (np.arange(num_draws, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    words = _mix(rows[:, None] + draws)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class ShuffledOrder:
    """Maps positions of the endless training stream to examples of the set.

    Position i belongs to epoch i // num_examples and holds example
    permutation(epoch)[i mod num_examples]: every example comes exactly once per epoch,
    a batch may span two epochs, and no remainder is dropped.

    Args:
      num_examples: Length of an epoch.
      seed: Decides the order.
      *stream: Integers that tell this stream from others of the same seed.

    Example:
      >>> order = ShuffledOrder(num_examples=3, seed=0)
      >>> two_epochs = order(np.arange(6))
      >>> sorted(two_epochs[:3].tolist()), sorted(two_epochs[3:].tolist())
      ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, num_examples: int, seed: int, *stream: int) -> None:
        self.num_examples = num_examples
        self._key = (_ORDER_STREAM, seed, *stream)
        # The last two epochs' permutations: a value computed once, not a position.
        # Threads may replace it at any time, so it is read and written as a whole.
        self._recent: dict[int, Positions] = {}

    def __call__(self, positions: Positions) -> Positions:
        """Returns the example at each position, int64[size] for int64[size]."""
        epochs, offsets = np.divmod(positions, self.num_examples)
        examples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            examples[here] = self._epoch_permutation(int(epoch))[offsets[here]]
        return examples

    def _epoch_permutation(self, epoch: int) -> Positions:
        recent = self._recent
        if epoch not in recent:
            fresh = permutation(self.num_examples, *self._key, epoch)
            kept = {key: recent[key] for key in sorted(recent)[-1:]}
            recent = {**kept, epoch: fresh}
            self._recent = recent
        return recent[epoch]


class ShardedOrder:
    """Maps positions of the endless training stream to examples, host by host.

    A batch is dealt to hosts in contiguous blocks, so position i is row
    r = i mod batch_size of batch t = i // batch_size and belongs to host
    r // rows_per_host. There it is position t * rows_per_host + r mod rows_per_host of
    the host's own `ShuffledOrder`, which goes through its shard once per epoch.

    Args:
      shards: int64[num_hosts, size], the examples of every host.
      batch_size: Rows of the global batch, a multiple of the number of hosts.
      seed: Decides the order, which is another for every host.

    Example:
      >>> order = ShardedOrder(np.array([[0, 1], [2, 3]]), batch_size=4, seed=0)
      >>> batch = order(np.arange(4))
      >>> sorted(batch[:2].tolist()), sorted(batch[2:].tolist())
      ([0, 1], [2, 3])
    """

    def __init__(self, shards: Positions, batch_size: int, seed: int) -> None:
        num_hosts, size = shards.shape
        self._shards = shards
        self._batch_size = batch_size
        self._rows_per_host = batch_size // num_hosts
        self._orders = [ShuffledOrder(size, seed, host) for host in range(num_hosts)]

    def __call__(self, positions: Positions) -> Positions:
        """Returns the example at each position, int64[size] for int64[size]."""
        steps, rows = np.divmod(positions, self._batch_size)
        hosts, rows = np.divmod(rows, self._rows_per_host)
        own = steps * self._rows_per_host + rows
        examples = np.empty_like(positions)
        for host in np.unique(hosts):
            here = hosts == host
            examples[here] = self._shards[host][self._orders[host](own[here])]
        return examples
