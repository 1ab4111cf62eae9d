"""Tokens of others, in files: cut into splits, refused outside of the vocabulary."""

import dataclasses
import pickle
import socket
import tracemalloc

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import EXAMPLE, make_loader, open_text, token_files, tokens
from prunex_jax.data.settings import DataConfig

STREAM = np.random.default_rng(0).integers(0, 500, 4001)


def config_of(path, **changes):
    values = {"sequence_length": 8, "batch_size": 8, **changes}
    return DataConfig(name="tokens", dir=str(path), **values)


def read(split):
    return split.evaluation_batch(np.arange(len(split)))[EXAMPLE]


def write(path, tokens=STREAM, dtype="<u2"):
    if path.suffix == ".npy":
        np.save(path, tokens.astype(dtype))
    else:
        tokens.astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize(
    ("name", "dtype", "changes"),
    [
        ("a.bin", "<u2", {}),
        ("a.bin", "<u4", {"token_dtype": "uint32"}),
        *(("a.npy", dtype, {}) for dtype in ("<u2", ">u4", "<i8")),
    ],
)
def test_a_file_is_cut_into_parts_that_follow_each_other(
    tmp_path, name, dtype, changes
):
    write(tmp_path / name, dtype=dtype)
    data = open_text(config_of(tmp_path / name, validation_share=0.2, **changes))
    splits = data.train, data.validation, data.test
    assert [len(split) for split in splits] == [388, 97, 15]
    rows = np.concatenate([read(split) for split in splits])
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows[:, :-1].ravel(), STREAM[:4000])
    np.testing.assert_array_equal(rows[:, 1:].ravel(), STREAM[1:])
    assert data.num_tokens == STREAM.max() + 1 and not data.has_bytes
    assert "1 file of 4,001 tokens" in data.described


def test_a_folder_has_splits(tmp_path):
    write(tmp_path / "train.bin")
    write(tmp_path / "val.bin", STREAM[:801])
    (tmp_path / "meta.pkl").write_bytes(b"")
    data = open_text(config_of(tmp_path, vocabulary=512))
    assert (len(data.train), len(data.validation), len(data.test)) == (500, 100, 0)
    np.testing.assert_array_equal(read(data.validation), read(data.train)[:100])
    assert data.num_tokens == 512 and "2 files of 4,802" in data.described
    (tmp_path / "val.bin").rename(tmp_path / "test.bin")
    data = open_text(config_of(tmp_path))
    assert (len(data.train), len(data.validation), len(data.test)) == (450, 50, 100)


@pytest.mark.parametrize(
    "changes",
    [
        {"loader": "memory"},
        {"loader": "grain"},
        pytest.param({"loader": "grain", "num_workers": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_ways_of_reading_give_the_same_bits(tmp_path, changes):
    path = write(tmp_path / "a.bin")
    found = []
    for each in ({}, changes):
        config = config_of(path, **each)
        split = open_text(config).train
        loader = make_loader(split, config, rows=np.arange(3, 6), seed=1, num_hosts=1)
        with loader.batches(5) as batches:
            found.append([next(batches)[EXAMPLE] for _ in range(4)])
    assert split.in_memory == (config.loader != "grain")
    np.testing.assert_array_equal(*found)


def test_a_large_file_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "LOOKED_AT", 2**22)
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2**31)
        file.seek(2**30)
        file.write(np.arange(4, dtype="<u2").tobytes())
    config = config_of(tmp_path / "a.bin", vocabulary=4, sequence_length=2**18)
    tracemalloc.start()
    train = open_text(config).train
    batch = train.evaluation_batch(np.array([2**11 - 1, 2**11]))[EXAMPLE]
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    assert batch[1, :4].tolist() == [0, 1, 2, 3] and batch.sum() == 6
    assert len(pickle.dumps(train)) < 2**19


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path, monkeypatch):
    """Before training where they are looked at, and later when they are read."""
    path = write(tmp_path / "a.bin")
    config = config_of(path, vocabulary=499)
    with pytest.raises(UserError, match=r"a.bin: token 499 is none of the 499 .*0 to "):
        open_text(config)
    write(path, np.where(np.arange(4001) == 1500, 700, STREAM % 499))
    monkeypatch.setattr(token_files, "_BLOCK", 1000)
    monkeypatch.setattr(token_files, "LOOKED_AT", 2000)
    data = open_text(config)
    loader = make_loader(data.train, config, rows=np.arange(8), seed=0, num_hosts=1)
    with (
        loader.batches() as batches,
        pytest.raises(UserError, match="token 700 is none of the 499"),
    ):
        for _ in range(len(data.train) // 8 + 1):
            next(batches)
    write(tmp_path / "b.npy", STREAM - 1, "<i4")
    with pytest.raises(UserError, match="token -1 is none of the 500"):
        open_text(config_of(tmp_path / "b.npy", vocabulary=500))


def test_the_digest_is_of_the_tokens(tmp_path):
    path = write(tmp_path / "a.bin")
    config = config_of(path, vocabulary=500)
    digest = open_text(config).digest
    assert open_text(dataclasses.replace(config, sequence_length=16)).digest == digest
    write(path, STREAM[::-1])
    assert open_text(config).digest != digest


@pytest.mark.parametrize(
    ("written", "where", "changes", "message"),
    [
        ((), "", {}, "dir='' is no folder or file"),
        ((), "{}/a", {}, "a' is no folder or file"),
        (("val.bin",), "{}", {}, "has no train.bin or train.npy"),
        (("train.bin", "train.npy"), "{}", {}, "train.bin and train.npy for train"),
        (("train.bin", "val.bin", "dev.npy"), "{}", {}, "for validation; keep one"),
        (("a.txt",), "{}/a.txt", {}, "is none of .bin, .npy"),
        (("odd.bin",), "{}/odd.bin", {"token_dtype": "uint32"}, "2 bytes are left"),
        (("a.npy",), "{}/a.npy", {"token_dtype": "uint32"}, "no effect on .npy files"),
        (("table.npy",), "{}/table.npy", {}, r"is uint16\[2, 3\]; tokens are integers"),
        (("float.npy",), "{}/float.npy", {}, "is float32"),
        (("broken.npy",), "{}/broken.npy", {}, "is no array that numpy can map"),
        (("a.bin",), "{}/a.bin", {"sequence_length": 5000}, "is longer than the 4001"),
    ],
)
def test_unsuitable_files_are_one_line(tmp_path, written, where, changes, message):
    for name in written:
        write(tmp_path / name)
    for name, array in (
        ("table.npy", np.zeros((2, 3), "u2")),
        ("float.npy", np.zeros(9, "f4")),
    ):
        if name in written:
            np.save(tmp_path / name, array)
    if "broken.npy" in written:
        (tmp_path / "broken.npy").write_bytes(b"no")
    with pytest.raises(UserError, match=message) as caught:
        open_text(config_of(where.format(tmp_path), **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["cut", "gone", "cut before it is read"])
def test_a_file_that_breaks_while_it_is_read_is_named(tmp_path, how):
    """Who reads a mapped file beyond its end would be killed; these are not mapped."""
    path = write(tmp_path / "a.bin")
    config = config_of(path)
    train = open_text(config).train
    loader = make_loader(train, config, rows=np.arange(8), seed=0, num_hosts=1)
    with loader.batches() as batches:
        if how != "cut before it is read":
            next(batches)
        if how == "gone":
            path.unlink()
        else:
            with open(path, "r+b") as file:
                file.truncate(100)
        with pytest.raises(UserError) as caught:
            for _ in range(4):  # Some were read before.
                next(batches)
    message = str(caught.value)
    assert str(path) in message and f"(read on {socket.gethostname()})" in message


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_breaks_after_it_was_checked_is_named(tmp_path, monkeypatch, how):
    path = write(tmp_path / "a.bin")
    file = tokens.TokenFile(path, "<u2", len(STREAM))
    np.testing.assert_array_equal(file[90:120], STREAM[90:120])

    def break_it(*_):
        path.unlink()
        if how == "cut":
            write(path, STREAM[:100])

    monkeypatch.setattr(tokens, "check_whole", break_it)
    with pytest.raises(UserError, match=rf"{path} (was cut|cannot be read)"):
        _ = file[90:120]


def test_a_token_outside_of_the_vocabulary_is_named_with_its_sequence(tmp_path):
    path = write(tmp_path / "a.bin")
    train = open_text(config_of(path)).train
    write(path, np.where(np.arange(len(STREAM)) == 83, 60_000, STREAM))
    with pytest.raises(UserError, match=rf"sequence 10 of {path}: token 60000"):
        train.evaluation_batch(np.arange(20))
