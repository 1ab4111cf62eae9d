"""The text that every machine has: whole files are held out, and nothing is lost."""

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import DataConfig
from prunex_jax.data import EXAMPLE, open_stdlib
from prunex_jax.data.tokens import Sequences

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


def test_without_validation_all_of_it_trains(dataset):
    whole = open_stdlib(DataConfig(name="stdlib", validation_share=0.0))
    held = len(dataset.validation.source.tokens)
    assert not len(whole.validation)
    assert len(whole.train.source.tokens) == len(dataset.train.source.tokens) + held
    with pytest.raises(UserError, match="is longer than"):
        open_stdlib(DataConfig(name="stdlib", sequence_length=10**9))
