"""Data as people have them: one set of three splits, whatever they are in."""

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.data import EXAMPLE, evaluation_batches, make_loader, open_own
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.shards import check_shards, make_order

SIZE = 30
X = np.arange(SIZE * 4, dtype=np.float64).reshape(SIZE, 4)
Y = np.arange(SIZE) % 3
CONFIG = DataConfig(batch_size=8, validation_share=0.2)


class Source:
    """What Grain calls a random access data source."""

    def __len__(self):
        return SIZE

    def __getitem__(self, number):
        return X[number], Y[number]


class Sized:
    """Examples one after the other, of which the number is known."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        return zip(X, Y, strict=True)


GIVEN = {
    "arrays": (X, Y),
    "jax arrays": (jax.numpy.asarray(X), jax.numpy.asarray(Y)),
    "source": Source(),
    "iterable": Sized(),
    "list": list(zip(X, Y, strict=True)),
    "lists": (X.tolist(), Y.tolist()),
    "list of lists": list(zip(X.tolist(), Y.tolist(), strict=True)),
}


def first_batch(dataset, step=0):
    split = dataset.train
    loader = make_loader(split, CONFIG, rows=np.arange(8), seed=1, num_hosts=1)
    with loader.batches(step) as batches:
        return next(batches)


@pytest.mark.parametrize("name", GIVEN)
def test_all_forms_give_the_same_batches(name):
    dataset, wanted = open_own(GIVEN[name], CONFIG), open_own((X, Y), CONFIG)
    sizes = [len(s) for s in (dataset.train, dataset.validation, dataset.test)]
    assert sizes == [24, 6, 0]
    for step in (0, 5):
        found = flatten_by_path(first_batch(dataset, step))
        expected = flatten_by_path(first_batch(wanted, step))
        assert found.keys() == expected.keys() == {"example/0", "example/1"}
        for path, rows in expected.items():
            np.testing.assert_array_equal(found[path], rows)
    x, y = first_batch(dataset)[EXAMPLE]
    assert (x.dtype, y.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("name", ["arrays", "source"])
def test_evaluation_sees_every_example_once(name):
    dataset = open_own(GIVEN[name], CONFIG)
    seen = []
    with evaluation_batches(dataset.validation, 4, np.arange(4)) as batches:
        for batch in batches:
            is_valid = batch["valid"] == 1
            assert not batch[EXAMPLE][0][~is_valid].any(), "padding is zero"
            seen += batch[EXAMPLE][0][is_valid, 0].tolist()
    assert len(seen) == len(set(seen)) == 6
    train = {
        row for step in range(3) for row in first_batch(dataset, step)[EXAMPLE][0][:, 0]
    }
    assert not train & set(seen)


def test_splits_may_be_given():
    parts = {
        "train": {"a": X[:20]},
        "validation": {"a": X[20:25]},
        "test": {"a": X[25:]},
    }
    dataset = open_own(parts, CONFIG)
    sizes = [len(s) for s in (dataset.train, dataset.validation, dataset.test)]
    assert sizes == [20, 5, 5]
    batch = dataset.test.evaluation_batch(np.arange(5))
    np.testing.assert_array_equal(batch[EXAMPLE]["a"], X[25:])


def test_labels_deal_examples_to_hosts():
    config = DataConfig(batch_size=8, shards="label_sorted", validation_share=0.2)
    dataset = open_own((X, Y), config)
    order = make_order(dataset.train, config, 2, seed=0)
    hosts = dataset.train.labels()[order(np.arange(8))].reshape(2, 4)
    assert not set(hosts[0].tolist()) & set(hosts[1].tolist()) - {1}
    with pytest.raises(UserError, match="have none: give arrays"):
        check_shards(open_own({"x": X}, config).train, config, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:-1]), r"as many in each; there are 0 \[30\], 1 \[29\]"),
        ((X, np.array(["a"] * SIZE)), "data: 1 is <U1, and networks read numbers"),
        ((X[:0], Y[:0]), "split 'train' has no examples"),
        ([], "split 'train' has no examples"),
        ([X[0], X[1, :2]], "differ in shape"),
        (iter([1, 2]), "whose length is not known"),
        (
            {"train": (X, Y), "test": (X,)},
            "entry '1' .* in test is absent",
        ),
        (
            {"train": X, "test": X[:, :3]},
            r"float32\[3\], and .*\[4\]; make",
        ),
        (([[1.0], [2.0, 3.0]], [0, 1]), "a list of 2 has parts of different lengths"),
        ([[[1.0], [2.0, 3.0]]], "a list of 2 has parts of different lengths"),
        (np.float32(3), "as many in each"),
    ],
)
def test_what_cannot_be_read_is_refused(data, message):
    with pytest.raises(UserError, match=message):
        open_own(data, CONFIG)


def test_messages_are_short_however_many_parts_there_are():
    many = {str(number): X[: SIZE - number] for number in range(20)}
    with pytest.raises(UserError, match="as many in each") as caught:
        open_own(many, CONFIG)
    assert len(str(caught.value)) < 400
