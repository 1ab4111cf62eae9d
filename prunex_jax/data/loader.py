"""Produces batches ahead, from memory or through grain: training and evaluation.

The only place that knows grain, threads and worker processes. Batches from memory and
single examples in grain's workers come from the same functions, which is why both ways
of reading give the same bits.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import socket
import threading
import weakref
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import SupportsIndex

import jax
import numpy as np

from prunex_jax.base.errors import UserError, one_line
from prunex_jax.data.mixing import Mixing
from prunex_jax.data.order import Order, Positions
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.shards import make_order
from prunex_jax.data.splits import Batch, Split

_MAX_READ_THREADS = 16
_THREAD = "prunex-batches"
# Batches that are made before they are asked for.
_AHEAD = 2
# End of a stream without end, as far as grain is concerned.
_ENDLESS = 2**40
# Entry of evaluation batches: float32[batch], 0.0 for rows that count for nothing.
VALID = "valid"


@dataclasses.dataclass(frozen=True)
class TrainingExamples:
    """Examples of the endless, shuffled training stream."""

    split: Split  # What is read.
    order: Order  # Position -> example of the split.
    seed: int  # Seed of all that is random in an example.

    def __call__(self, positions: Positions) -> Batch:
        """Returns the examples at these positions of the stream."""
        examples = self.order(positions)
        return self.split.training_batch(examples, positions, self.seed)


@dataclasses.dataclass(frozen=True)
class _EvaluationExamples:
    """Every example of a split once, in its stored order, then padding."""

    split: Split

    def __call__(self, positions: Positions) -> Batch:
        """Returns a batch with `VALID`; padding is zero everywhere."""
        is_valid = positions < len(self.split)
        found = self.split.evaluation_batch(positions[is_valid])

        def padded(rows: np.ndarray) -> np.ndarray:
            whole = np.zeros((len(positions), *rows.shape[1:]), rows.dtype)
            whole[is_valid] = rows
            return whole

        batch: Batch = jax.tree.map(padded, found)
        return {**batch, VALID: is_valid.astype(np.float32)}


# Pure functions from positions to examples, before `Split.finished`.
Examples = TrainingExamples | _EvaluationExamples


class BatchIterator(Iterator[Batch]):
    """Iterates over host-local numpy batches that a thread makes ahead.

    `close`, the end of a `with` block, or dropping the last reference ends the thread
    and whatever it reads with.
    """

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        thread = ThreadPoolExecutor(1, _THREAD)
        # Neither may hold `self`, or it would never be dropped.
        self._make = lambda: thread.submit(_next, batches)
        self._ready = collections.deque(self._make() for _ in range(_AHEAD))
        self._close = weakref.finalize(self, _stop, thread, batches)

    def __next__(self) -> Batch:
        if not self._close.alive:
            raise StopIteration
        try:
            # Taken off after the wait, which an interrupt may end.
            found = self._ready[0].result()
        except Exception:
            self.close()
            raise
        self._ready.popleft()
        self._ready.append(self._make())
        return found

    def close(self) -> None:
        """Ends the thread; later calls of `next` find the iterator exhausted."""
        self._close()

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, eq=False)
class Loader:
    """The endless stream of training batches; made by `make_loader`."""

    examples: TrainingExamples
    batch_size: int
    rows: Positions
    num_workers: int
    mixing: Mixing | None = None

    def batches(self, start_step: int = 0) -> BatchIterator:
        """Returns an iterator whose first batch is that of `start_step`."""
        chosen = range(start_step, _ENDLESS)
        if self.mixing is None:
            return BatchIterator(self._read(self.rows, chosen))
        return BatchIterator(self._read_mixed(self.mixing, chosen))

    def _read(self, rows: Positions, chosen: range) -> Generator[Batch, None, None]:
        return _read(self.examples, self.batch_size, rows, chosen, self.num_workers)

    def _read_mixed(
        self, mixing: Mixing, chosen: range
    ) -> Generator[Batch, None, None]:
        """Reads rows and their partners, each once, and mixes them."""
        pairs = np.concatenate([self.rows, mixing.partners(self.rows)])
        rows, places = np.unique(pairs, return_inverse=True)
        own, other = np.split(places, 2)
        found = self._read(rows, chosen)
        with contextlib.closing(found):
            for step, batch in zip(chosen, found, strict=False):
                yield mixing.mixed(
                    jax.tree.map(lambda x: x[own], batch),
                    jax.tree.map(lambda x: x[other], batch),
                    step * self.batch_size + self.rows,
                    self.examples.seed,
                )


def make_loader(
    split: Split, config: DataConfig, *, rows: Positions, seed: int, num_hosts: int
) -> Loader:
    """Makes the loader of a training split.

    Row r of batch t is position t * batch_size + r of a stream that `seed` alone
    decides, so the batches are the same for every mesh, number of processes, way of
    reading and starting step. Where `data.shards` gives hosts data of their own, they
    depend on the number of hosts, and still on nothing else. Mixup and CutMix mix the
    rows of a batch with each other, as `mixing` says.

    Args:
      split: What is read; whether from memory was decided when it was opened.
      config: `batch_size`, `num_workers` and what says who has which data are used.
      rows: int64[local], rows of the global batch that this process produces, in the
        order in which it wants them.
      seed: Seed of order and augmentation.
      num_hosts: Size of the host axis, over which rows are dealt in contiguous blocks.
    Returns:
      A loader of batches of the split, host-local numpy arrays.
    Raises:
      UserError: If the split is empty, a row is outside the batch, or the split cannot
        be divided as `data.shards` says.
    """
    if not len(split):
        raise UserError(f"split {split.name!r} has no examples to train on")
    rows = np.asarray(rows, np.int64)
    if rows.min(initial=0) < 0 or rows.max(initial=0) >= config.batch_size:
        raise UserError(
            f"rows {rows.min()}..{rows.max()} are not all in a batch of "
            f"data.batch_size={config.batch_size}"
        )
    order = make_order(split, config, num_hosts, seed)
    examples = TrainingExamples(split, order, seed)
    mixing = Mixing.of(config, num_hosts)
    return Loader(examples, config.batch_size, rows, config.num_workers, mixing)


def evaluation_batches(
    split: Split, batch_size: int, rows: Positions, num_workers: int = 0
) -> BatchIterator:
    """Returns an iterator over one evaluation of a split.

    Every process gets the same number of batches, whatever the size of the split; the
    last batch is padded with zeros, where `valid` is 0.0.

    Args:
      split: What is evaluated; an empty split has no batches.
      batch_size: Rows of the global batch.
      rows: int64[local], rows that this process produces.
      num_workers: Worker processes where the split is not in memory.
    Returns:
      Batches of the split, host-local numpy arrays, with `valid`, float32[local].

    Example:
      >>> from prunex_jax.data.settings import DataConfig
      >>> from prunex_jax.data import open_dataset
      >>> digits = open_dataset(DataConfig(), seed=0)
      >>> with evaluation_batches(digits.test, 64, np.arange(64)) as batches:
      ...     counted = sum(batch["valid"].sum() for batch in batches)
      >>> int(counted) == len(digits.test)
      True
    """
    rows = np.asarray(rows, np.int64)
    chosen = range(num_evaluation_batches(split, batch_size))
    examples = _EvaluationExamples(split)
    return BatchIterator(_read(examples, batch_size, rows, chosen, num_workers))


def num_evaluation_batches(split: Split, batch_size: int) -> int:
    """Returns the number of batches of one evaluation, equal on every process."""
    return -(-len(split) // batch_size)


def _read(
    examples: Examples,
    batch_size: int,
    rows: Positions,
    chosen: range,
    num_workers: int,
) -> Generator[Batch, None, None]:
    """Yields the rows of this process of the chosen batches, from memory or grain."""
    split = examples.split
    if split.in_memory or not chosen:
        for batch in chosen:
            positions = batch * batch_size + rows
            yield split.finished(examples(positions))
        return
    source = _ElementSource(examples, batch_size, rows, chosen)
    for found in _read_with_grain(source, len(rows), num_workers):
        yield split.finished(found)


@dataclasses.dataclass(frozen=True, eq=False)
class _ElementSource:
    """Random access to single examples, row by row and batch by batch, for grain."""

    examples: Examples
    batch_size: int
    rows: Positions
    chosen: range

    def __len__(self) -> int:
        return len(self.chosen) * len(self.rows)

    def __getitem__(self, index: SupportsIndex) -> Batch:
        batch, row = divmod(index.__index__(), len(self.rows))
        first = self.chosen[batch] * self.batch_size
        example = self.examples(first + self.rows[row : row + 1])
        found: Batch = jax.tree.map(lambda x: x[0], example)
        return found


def _read_with_grain(
    source: _ElementSource, local_batch_size: int, num_workers: int
) -> Generator[Batch, None, None]:
    """Yields the batches of a source in order; closes grain when it is closed."""
    # Imported here: sets in memory need it not.
    import grain

    elements = grain.MapDataset.source(source)
    if num_workers:
        from absl import flags

        # Grain's worker processes read absl flags, which a notebook never parses.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        # Workers take whole batches in turn, so batching comes before them.
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
        batches = elements.batch(local_batch_size).to_iter_dataset(options)
        workers = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=2)
        batches = batches.mp_prefetch(workers, _end_with_parent)
    else:
        # More threads than cores fight over Python's lock.
        num_threads = min(_MAX_READ_THREADS, os.cpu_count() or 1)
        ahead = max(num_threads, 2 * local_batch_size)
        options = grain.ReadOptions(num_threads, prefetch_buffer_size=ahead)
        batches = elements.to_iter_dataset(options).batch(local_batch_size)
    iterator = iter(batches)
    try:
        yield from iterator
    finally:
        iterator.close()


def _end_with_parent(index: int, count: int) -> None:
    """Lets a worker process end when the process that reads has ended, however.

    A process that is killed cannot end its workers, and each holds hundreds of MB.
    """
    del index, count
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)  # Whatever its other threads wait for.

    threading.Thread(target=watch, name="prunex-parent", daemon=True).start()


def _named(error: Exception) -> UserError:
    """The error of reading data, with the machine that it has happened on."""
    problem = str(error)
    if not isinstance(error, UserError):
        problem = f"data cannot be read: {one_line(error)}; check the files"
    return UserError(f"{problem} (read on {socket.gethostname()})")


def _next(batches: Generator[Batch, None, None]) -> Batch:
    try:
        return next(batches)
    except (UserError, OSError, ValueError, TypeError, LookupError) as error:
        raise _named(error) from error


def _stop(thread: ThreadPoolExecutor, batches: Generator[Batch, None, None]) -> None:
    # The thread itself may drop the last reference, and cannot wait for its own end.
    is_thread = threading.current_thread().name.startswith(_THREAD)
    thread.shutdown(wait=not is_thread, cancel_futures=True)
    if not is_thread:
        batches.close()
