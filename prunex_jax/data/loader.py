"""Produces batches one ahead, from memory or through grain.

Owns: threads and worker processes of reading, grain, and `BatchIterator`.
Leaves to others: what a position holds (examples), which rows this process makes and
where arrays go (placement).
Flow: splits + config -> here -> place_batch -> step.
"""

import os
import queue
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Protocol, SupportsIndex

import grain
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import DataConfig
from prunex_jax.data.examples import Batch, Examples, TrainingExamples, normalized
from prunex_jax.data.order import Positions
from prunex_jax.data.shards import make_order
from prunex_jax.data.splits import Split

_MAX_READ_THREADS = 16
# Batches of a stream without end, as far as grain is concerned.
_ENDLESS = 2**40


class Loader(Protocol):
    """Makes the batches of an endless training stream from any step on."""

    def batches(self, start_step: int = 0) -> "BatchIterator":
        """Returns an iterator whose first batch is that of `start_step`."""
        ...


class BatchIterator(Iterator[Batch]):
    """Iterates over host-local numpy batches that a thread makes one ahead.

    `close`, the end of a `with` block, or dropping the last reference ends the thread
    and whatever it reads with.
    """

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=1)
        stop = threading.Event()
        # The thread must not hold `self`, or it would never be dropped.
        thread = threading.Thread(
            target=_produce,
            args=(batches, self._ready, stop),
            name="prunex-batches",
            daemon=True,
        )
        self._close = weakref.finalize(self, _stop, thread, self._ready, stop)
        thread.start()

    def __next__(self) -> Batch:
        if not self._close.alive:
            raise StopIteration
        result = self._ready.get()
        if isinstance(result, BaseException):
            self.close()
            raise result
        return result

    def close(self) -> None:
        """Ends the thread; later calls of `next` find the iterator exhausted."""
        self._close()

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_loader(
    split: Split, config: DataConfig, *, rows: Positions, seed: int, num_hosts: int
) -> Loader:
    """Makes the loader of a training split.

    Row r of batch t is position t * batch_size + r of a stream that `seed` alone
    decides, so the batches are the same for every mesh, number of processes, way of
    reading and starting step. Where `data.shards` gives hosts data of their own, they
    depend on the number of hosts, and still on nothing else.

    Args:
      split: What is read; whether from memory was decided when it was opened.
      config: `batch_size`, `num_workers` and what says who has which data are used.
      rows: int64[local], rows of the global batch that this process produces, in the
        order in which it wants them.
      seed: Seed of order and augmentation.
      num_hosts: Size of the host axis, over which rows are dealt in contiguous blocks.
    Returns:
      A loader of dicts with `image` float32[local, h, w, c] and `label` int32[local].
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
    if split.in_memory:
        return MemoryLoader(examples, config.batch_size, rows)
    return GrainLoader(examples, config.batch_size, rows, config.num_workers)


class MemoryLoader:
    """Reads a split once and augments whole batches with array operations."""

    def __init__(
        self, examples: TrainingExamples, batch_size: int, rows: Positions
    ) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._rows = rows

    def batches(self, start_step: int = 0) -> BatchIterator:
        """Returns an iterator whose first batch is that of `start_step`."""
        return BatchIterator(self._generate(start_step))

    def _generate(self, start_step: int) -> Generator[Batch, None, None]:
        normalization = self._examples.split.normalization
        step = start_step
        while True:
            positions = step * self._batch_size + self._rows
            yield normalized(self._examples(positions), normalization)
            step += 1


class GrainLoader:
    """Reads, decodes and augments single examples in threads or worker processes."""

    def __init__(
        self,
        examples: TrainingExamples,
        batch_size: int,
        rows: Positions,
        num_workers: int,
    ) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._rows = rows
        self._num_workers = num_workers

    def batches(self, start_step: int = 0) -> BatchIterator:
        """Returns an iterator whose first batch is that of `start_step`."""
        source = ElementSource(
            self._examples, self._batch_size, self._rows, start_step, _ENDLESS
        )
        normalization = self._examples.split.normalization
        batches = read_with_grain(source, len(self._rows), self._num_workers)
        return BatchIterator(normalized(batch, normalization) for batch in batches)


class ElementSource:
    """Random access to single examples, row by row and batch by batch, for grain.

    Args:
      examples: From positions to examples.
      batch_size: Rows of the global batch.
      rows: int64[local], rows that this process produces.
      start_batch: Batch that element 0 belongs to.
      num_batches: Batches after which the source ends.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        rows: Positions,
        start_batch: int,
        num_batches: int,
    ) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._rows = rows
        self._start_batch = start_batch
        self._num_batches = num_batches

    def __len__(self) -> int:
        return self._num_batches * len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> Batch:
        batch, row = divmod(index.__index__(), len(self._rows))
        first = (self._start_batch + batch) * self._batch_size
        example = self._examples(first + self._rows[row : row + 1])
        return {key: value[0] for key, value in example.items()}


def read_with_grain(
    source: ElementSource, local_batch_size: int, num_workers: int
) -> Generator[Batch, None, None]:
    """Yields the batches of a source in order, and closes grain when it is closed.

    Args:
      source: Single examples.
      local_batch_size: Elements per batch.
      num_workers: Worker processes; 0 reads in threads of this process.
    """
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
        batches = batches.mp_prefetch(workers)
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


def _produce(
    batches: Generator[Batch, None, None],
    ready: "queue.Queue[Batch | BaseException]",
    stop: threading.Event,
) -> None:
    end: BaseException = StopIteration()
    try:
        for batch in batches:
            ready.put(batch)
            if stop.is_set():
                break
    except BaseException as error:  # Raised again where the batch is asked for.
        end = error
    finally:
        batches.close()
    if not stop.is_set():
        ready.put(end)


def _stop(
    thread: threading.Thread,
    ready: "queue.Queue[Batch | BaseException]",
    stop: threading.Event,
) -> None:
    stop.set()
    # The thread may be waiting for room, once per item it still puts.
    while thread.is_alive() and thread is not threading.current_thread():
        try:
            ready.get_nowait()
        except queue.Empty:
            thread.join(0.01)
