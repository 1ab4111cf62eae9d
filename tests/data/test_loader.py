import dataclasses
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import (
    evaluation_batches,
    make_loader,
    open_dataset,
)
from prunex_jax.data.loader import BatchIterator, num_evaluation_batches
from prunex_jax.data.settings import DataConfig

ROOT = Path(__file__).parents[2]
CONFIG = DataConfig(
    name="synthetic",
    synthetic_examples=50,
    image_size=8,
    batch_size=16,
    augment="crop_flip",
)


def _batches(config: DataConfig, rows: np.ndarray, start: int, count: int, seed=0):
    data = open_dataset(config, seed=0)
    loader = make_loader(data.train, config, rows=rows, seed=seed, num_hosts=1)
    with loader.batches(start) as iterator:
        return [next(iterator) for _ in range(count)]


def _reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prunex")]


def _assert_equal(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype and np.array_equal(a[key], b[key]), key


@pytest.mark.parametrize("loader", ["memory", "grain"])
@pytest.mark.parametrize("augment", ["none", "shift", "random_resized_crop"])
def test_resuming_continues_exactly(loader: str, augment: str) -> None:
    config = dataclasses.replace(CONFIG, loader=loader, augment=augment)
    whole = _batches(config, np.arange(16), 0, 9)
    _assert_equal(_batches(config, np.arange(16), 5, 4), whole[5:])
    assert whole[0]["image"].shape == (16, 8, 8, 3)
    assert whole[0]["image"].dtype == np.float32
    assert whole[0]["label"].dtype == np.int32


@pytest.mark.parametrize("augment", ["none", "shift", "crop_flip"])
def test_memory_and_grain_give_the_same_bits(augment: str) -> None:
    config = dataclasses.replace(CONFIG, augment=augment)
    rows = np.array([7, 2, 15])
    both = [
        _batches(dataclasses.replace(config, loader=loader), rows, 1, 6)
        for loader in ("memory", "grain")
    ]
    _assert_equal(*both)


@pytest.mark.parametrize("loader", ["memory", "grain"])
def test_processes_together_make_the_global_batch(loader: str) -> None:
    config = dataclasses.replace(CONFIG, loader=loader)
    whole = _batches(config, np.arange(16), 0, 5)
    parts = [_batches(config, np.arange(k, 16, 3), 0, 5) for k in range(3)]
    for step in range(5):
        for k in range(3):
            for key, value in whole[step].items():
                assert np.array_equal(value[k::3], parts[k][step][key])


def test_an_epoch_holds_every_example_once() -> None:
    # 45 training examples in batches of 16: 45 batches are exactly 16 epochs.
    config = dataclasses.replace(CONFIG, augment="none")
    train = open_dataset(config, seed=0).train
    batches = _batches(config, np.arange(16), 0, 45)
    stored = train.normalization.apply(train.read(np.arange(45))[0])
    known = {image.tobytes(): k for k, image in enumerate(stored)}
    stream = [known[image.tobytes()] for batch in batches for image in batch["image"]]
    for epoch in range(16):
        assert sorted(stream[45 * epoch : 45 * epoch + 45]) == list(range(45))


def test_seed_changes_order_and_augmentation() -> None:
    rows = np.arange(16)
    first, second = _batches(CONFIG, rows, 0, 2), _batches(CONFIG, rows, 0, 2, seed=1)
    assert not np.array_equal(first[0]["label"], second[0]["label"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loader", ["memory", "grain"])
@pytest.mark.parametrize("ended_by", ["close", "drop"])
def test_no_thread_is_left_behind(loader: str, ended_by: str) -> None:
    config = dataclasses.replace(CONFIG, loader=loader)
    train = open_dataset(config, seed=0).train
    before = threading.active_count()
    rows = np.arange(4)
    iterator = make_loader(train, config, rows=rows, seed=0, num_hosts=1).batches()
    next(iterator)
    assert _reader_threads() == ["prunex-batches_0"]
    if ended_by == "close":
        iterator.close()
        iterator.close()
        with pytest.raises(StopIteration):
            next(iterator)
    del iterator
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before, threading.enumerate()


def test_errors_of_the_reading_thread_arrive() -> None:
    def broken():
        yield {"image": np.zeros(1)}
        raise UserError("the disk is gone")

    iterator = BatchIterator(broken())
    next(iterator)
    with pytest.raises(UserError, match="the disk is gone"):
        next(iterator)
    assert not _reader_threads()


def test_batches_are_not_written_to_again() -> None:
    # Devices may use the memory of a batch, so every batch needs its own.
    data = open_dataset(CONFIG, seed=0)
    loader = make_loader(data.train, CONFIG, rows=np.arange(16), seed=0, num_hosts=1)
    with loader.batches() as iterator:
        batches = [next(iterator) for _ in range(4)]
        copies = [{k: v.copy() for k, v in batch.items()} for batch in batches]
        next(iterator)
    _assert_equal(batches, copies)


@pytest.mark.parametrize(
    ("rows", "share", "message"),
    [
        ([0, 16], 0.1, "rows 0..16 are not all in a batch of data.batch_size=16"),
        ([-1, 3], 0.1, "rows -1..3 are not all in a batch"),
    ],
)
def test_impossible_rows_are_refused(rows: list, share: float, message: str) -> None:
    data = open_dataset(CONFIG, seed=0)
    with pytest.raises(UserError, match=message):
        make_loader(data.train, CONFIG, rows=np.array(rows), seed=0, num_hosts=1)


def test_an_empty_split_is_refused_for_training() -> None:
    config = dataclasses.replace(CONFIG, validation_share=0.0)
    data = open_dataset(config, seed=0)
    with pytest.raises(UserError, match="split 'validation' has no examples"):
        make_loader(data.validation, config, rows=np.arange(4), seed=0, num_hosts=1)


@pytest.mark.parametrize("loader", ["memory", "grain"])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [4, 20, 64])
def test_evaluation_counts_every_example_once(
    loader: str, num_processes: int, batch_size: int
) -> None:
    config = dataclasses.replace(CONFIG, loader=loader, validation_share=0.5)
    split = open_dataset(config, seed=0).validation
    images, labels = split.read(np.arange(25))
    expected = split.normalization.apply(np.stack(list(images)))
    local = batch_size // num_processes
    per_process = []
    for process in range(num_processes):
        rows = np.arange(process * local, (process + 1) * local)
        with evaluation_batches(split, batch_size, rows) as batches:
            per_process.append(list(batches))
    lengths = {len(batches) for batches in per_process}
    assert lengths == {num_evaluation_batches(split, batch_size)}, (
        "processes would hang"
    )
    merged = [
        {key: np.concatenate([b[key] for b in parts]) for key in parts[0]}
        for parts in zip(*per_process, strict=True)
    ]
    stream = {key: np.concatenate([b[key] for b in merged]) for key in merged[0]}
    valid = stream["valid"]
    assert valid.dtype == np.float32 and valid.sum() == 25
    assert np.array_equal(stream["image"][valid == 1], expected)
    assert np.array_equal(stream["label"][valid == 1], labels)
    assert np.isfinite(stream["image"]).all()


def test_an_empty_split_has_no_evaluation_batches() -> None:
    config = dataclasses.replace(CONFIG, validation_share=0.0)
    data = open_dataset(config, seed=0)
    with evaluation_batches(data.validation, 8, np.arange(8)) as batches:
        assert list(batches) == []


# Reads with two worker processes, says which, and waits to be killed.
_READER = """
import multiprocessing, sys, time
import numpy as np
from prunex_jax.data.settings import DataConfig
from prunex_jax.data import make_loader, open_dataset

if __name__ == "__main__":
    config = DataConfig(name="synthetic", synthetic_examples=50, image_size=8,
                        batch_size=16, loader="grain", num_workers=2)
    train = open_dataset(config, seed=0).train
    loader = make_loader(train, config, rows=np.arange(16), seed=0, num_hosts=1)
    batches = loader.batches()
    next(batches)
    pids = [child.pid for child in multiprocessing.active_children()]
    print(*pids, flush=True)
    time.sleep(600)
"""


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_worker_processes_die_with_a_killed_process(tmp_path: Path) -> None:
    script = tmp_path / "reader.py"
    script.write_text(_READER)
    command = [sys.executable, str(script)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environ
    ) as reader:
        assert reader.stdout is not None
        try:
            workers = [int(pid) for pid in reader.stdout.readline().split()]
            assert len(workers) == 2 and all(map(_is_alive, workers))
        finally:
            reader.kill()
    try:
        deadline = time.monotonic() + 10
        while any(map(_is_alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_is_alive, workers)), "they outlive kill -9"
    finally:
        for pid in filter(_is_alive, workers):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("error", [OSError("gone"), TypeError("x"), UserError("bad")])
def test_errors_of_reading_name_the_host(error: Exception) -> None:
    def broken():
        raise error
        yield

    with BatchIterator(broken()) as batches:
        with pytest.raises(UserError, match=str(error)) as raised:
            next(batches)
    assert f"(read on {socket.gethostname()})" in str(raised.value)
