"""Text of any origin: whole files are held out, nothing is lost, bytes are counted."""

import dataclasses

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import (
    BYTES,
    EXAMPLE,
    encoded,
    is_text,
    open_text,
    text,
    text_files,
)
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.text import open_stdlib
from prunex_jax.data.tokenizer import open_tokenizer
from prunex_jax.data.tokens import Sequences
from tests.helpers.texts import (
    make_text,
    write_files,
    write_text_set,
    write_tokenizer,
)

CONFIG = DataConfig(name="stdlib", sequence_length=64)


@pytest.fixture(scope="module")
def dataset():
    return open_stdlib(CONFIG)


def files_of(split):
    return bytes(split.source.tokens).split(b"\0")[:-1]


def test_files_are_in_one_split_each(dataset):
    splits = (dataset.train, dataset.validation, dataset.test)
    files = [files_of(split) for split in splits]
    assert f"from {sum(map(len, files))} files" in dataset.described
    assert sum(map(len, files)) > 100
    sizes = [len(split.source.tokens) for split in splits]
    assert f"of {sum(sizes):,} bytes" in dataset.described and sum(sizes) > 10**6
    assert sizes[0] > 0.85 * sum(sizes) and min(sizes) > 10**4
    unlike = [{content for content in part if len(content) > 200} for part in files]
    assert len(unlike[0] & unlike[2]) <= 2, "copies of a file apart"


def test_sequences_go_through_a_text_once():
    text = np.random.default_rng(0).integers(1, 255, 1000).astype(np.uint8)
    sequences = Sequences(text, 64)
    assert len(sequences) == 15
    read = sequences.read(np.arange(15))
    np.testing.assert_array_equal(read[:, :-1].ravel(), text[: 15 * 64])
    np.testing.assert_array_equal(read[:, 1:].ravel(), text[1 : 15 * 64 + 1])
    assert len(Sequences(text[:65], 64)) == 1 and not len(Sequences(text[:64], 64))
    assert sequences.read(np.arange(0)).shape == (0, 65)


def test_it_is_the_same_every_time(dataset):
    again = open_stdlib(CONFIG)
    assert again.digest == dataset.digest and dataset.digest in dataset.described
    rows = np.array([5, 900, 17])
    for split in ("train", "validation", "test"):
        one, other = (
            getattr(d, split).evaluation_batch(rows) for d in (dataset, again)
        )
        np.testing.assert_array_equal(one[EXAMPLE], other[EXAMPLE])


@pytest.mark.slow
def test_without_validation_all_of_it_trains(dataset):
    whole = open_stdlib(DataConfig(name="stdlib", validation_share=0.0))
    held = len(dataset.validation.source.tokens)
    assert not len(whole.validation)
    assert len(whole.train.source.tokens) == len(dataset.train.source.tokens) + held
    with pytest.raises(UserError, match="is longer than"):
        open_stdlib(DataConfig(name="stdlib", sequence_length=10**9))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def config_of(folder, tokenizer=None, **changes):
    values = {"name": "text", "dir": str(folder), "sequence_length": 16, **changes}
    if tokenizer:
        values |= {"tokenizer": str(tokenizer), "cache_dir": f"{folder}/.cache"}
    return DataConfig(**values)


def splits_of(dataset):
    return {name: getattr(dataset, name) for name in ("train", "validation", "test")}


def text_of(split, config):
    """Documents of a split, by what their tokens decode to."""
    tokens = np.asarray(split.source.tokens[:])
    if not config.tokenizer:
        return bytes(tokens).decode()
    encoder = open_tokenizer(config).encoder
    return encoder.decode(tokens.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_splits_hold_all_text_in_order(tmp_path, tokenizer, has_tokenizer):
    written = write_files(tmp_path, 120, num_words=40)
    config = config_of(tmp_path, tokenizer if has_tokenizer else None)
    dataset = open_text(config)
    end = "<|endoftext|>" if has_tokenizer else "\0"
    found = [text_of(split, config) for split in splits_of(dataset).values()]
    documents = [x for text in found for x in text.removesuffix(end).split(end)]
    assert sorted(documents) == sorted(x.decode() for x in written.values())
    assert "from 120 files" in dataset.described
    assert dataset.digest == open_text(config).digest in dataset.described
    assert dataset.num_tokens == (300 if has_tokenizer else 256)


def test_bytes_are_those_of_each_split_for_every_tokenizer(tmp_path, tokenizer):
    """A token stands for other numbers of bytes in other splits; their sum is one."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text(make_text(4000))
    (tmp_path / "valid.txt").write_text("x1 " * 3000)
    (tmp_path / "test.txt").write_text("🙂?" * 2000)
    in_bytes = splits_of(open_text(config_of(tmp_path)))
    in_tokens = splits_of(open_text(config_of(tmp_path, tokenizer)))
    ratios = set()
    for name, split in in_tokens.items():
        size = len(split.source.tokens)
        assert split.bytes_per_token * size == len(in_bytes[name].source.tokens)
        batch = split.evaluation_batch(np.arange(3))
        np.testing.assert_allclose(batch[BYTES], 16 * split.bytes_per_token)
        assert BYTES not in in_bytes[name].evaluation_batch(np.arange(3))
        ratios.add(round(split.bytes_per_token, 1))
    assert len(ratios) == 3


def test_a_tokenizer_reads_text_once(tmp_path, tokenizer, monkeypatch):
    write_files(tmp_path, 3)
    config = config_of(tmp_path, tokenizer)
    first = open_text(config).train.evaluation_batch(np.arange(5))
    with monkeypatch.context() as patch:
        patch.delattr(encoded, "_write")
        again = open_text(dataclasses.replace(config, sequence_length=8))
    shorter = again.train.evaluation_batch(np.arange(1))[EXAMPLE]
    np.testing.assert_array_equal(shorter[0], first[EXAMPLE][0, :9])
    (tmp_path / "part0" / "000.txt").write_text("other")
    changed = open_text(config).train.evaluation_batch(np.arange(5))
    assert (changed[EXAMPLE] != first[EXAMPLE]).any()


def test_the_library_is_read_by_a_tokenizer(tmp_path, tokenizer, monkeypatch):
    """Also files of it that are no UTF-8."""
    names = ("abc.py", "bisect.py", "test/tokenizedata/badsyntax_pep3120.py")
    files = [x for x in text_files.stdlib_parts(CONFIG) if x.name in names]
    monkeypatch.setattr(text, "stdlib_parts", lambda config: files)
    config = config_of(tmp_path, tokenizer, name="stdlib")
    dataset = open_stdlib(config)
    found = "".join(text_of(split, config) for split in splits_of(dataset).values())
    assert found.count("<|endoftext|>") == len(files) >= 2
    wanted = {x.name: x.read().decode(errors="replace") for x in files}
    assert all(found.count(content) == 1 for content in wanted.values())


@pytest.mark.parametrize(
    ("content", "has_tokenizer", "message"),
    [
        (b"a" * 400 + b"\xe9" + b"a" * 80, True, "a.txt is no UTF-8 at byte 400, and"),
        (b"PNG\0", True, "a.txt has a byte 0, which no text has"),
        (b"a" * 300 + b"\0", False, "a.txt has a byte 0, which no text has"),
        (b"too short", True, r"sequence_length=16 is longer than the \d tokens"),
        (b"", False, "sequence_length=16 is longer than the 1 tokens"),
    ],
)
def test_what_is_no_text_is_one_line(
    tmp_path, tokenizer, content, has_tokenizer, message
):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        open_text(config_of(tmp_path, tokenizer if has_tokenizer else None))
    assert "\n" not in str(caught.value)


def test_bytes_need_no_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xe9" * 400)
    assert (
        open_text(config_of(tmp_path))
        .train.evaluation_batch(np.arange(2))[EXAMPLE]
        .tolist()
        == [[0xE9] * 17] * 2
    )


DOCUMENTS = {
    "train": [make_text(20, k) for k in range(40)],
    # As many in both, which must not make one be taken for the other.
    "validation": [make_text(20, k) for k in range(40, 45)],
    "test": [make_text(20, k) for k in range(45, 50)],
}


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("with_validation", [False, True])
def test_text_of_tfds(tmp_path, tokenizer, has_tokenizer, with_validation):
    given = {k: x for k, x in DOCUMENTS.items() if k != "validation" or with_validation}
    write_text_set(tmp_path, given, keys=("text", "id"))
    config = config_of(
        tmp_path,
        tokenizer if has_tokenizer else None,
        **{"name": "tiny", "validation_share": 0.25},
    )
    config = dataclasses.replace(config, cache_dir=f"{tmp_path}/.cache")
    assert is_text(config)
    dataset = open_text(config)
    end = "<|endoftext|>" if has_tokenizer else "\0"
    found = {
        name: text_of(split, config).removesuffix(end).split(end)
        for name, split in splits_of(dataset).items()
    }
    if with_validation:
        assert found == given
    else:
        assert sorted(found["train"] + found["validation"]) == sorted(given["train"])
        assert len(found["validation"]) == 10 and found["test"] == given["test"]
    total = sum(len(x.encode()) + 1 for texts in given.values() for x in texts)
    assert f"documents of {total:,} bytes" in dataset.described


@pytest.mark.parametrize(
    ("splits", "keys", "message"),
    [
        (("test",), ("text",), "has the splits test: training needs 'train'"),
        (("train",), ("a", "b"), "has no feature 'text', and a, b are text"),
    ],
)
def test_unsuitable_sets_of_tfds_are_one_line(tmp_path, splits, keys, message):
    write_text_set(tmp_path, {split: ["some text"] for split in splits}, keys)
    with pytest.raises(UserError, match=message):
        open_text(config_of(tmp_path, name="tiny"))
