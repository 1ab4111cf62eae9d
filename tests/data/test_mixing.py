"""Mixup and CutMix: laws of the shares, and the same batches whoever reads them."""

import dataclasses

import numpy as np
import pytest

from prunex_jax.data import LABEL_SHARE, OTHER_LABEL, make_loader, open_dataset
from prunex_jax.data.mixing import Mixing
from prunex_jax.data.settings import DataConfig

SIZE = 12
PLAIN = DataConfig(
    name="synthetic",
    synthetic_examples=50,
    image_size=8,
    batch_size=SIZE,
    augment="crop_flip",
    rand_augment_operations=2,
)
BOTH = dataclasses.replace(PLAIN, mixup=0.8, cutmix=1.0)
ALL = np.arange(SIZE)


def batches(config, rows=ALL, start=0, count=3, seed=0, num_hosts=1):
    data = open_dataset(config, seed=0)
    loader = make_loader(data.train, config, rows=rows, seed=seed, num_hosts=num_hosts)
    with loader.batches(start) as iterator:
        return [next(iterator) for _ in range(count)]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys() >= {OTHER_LABEL, LABEL_SHARE}
        for key in a:
            assert a[key].dtype == b[key].dtype and np.array_equal(a[key], b[key]), key


def rows_of(found, rows):
    return [{key: value[rows] for key, value in batch.items()} for batch in found]


def test_resuming_continues_exactly():
    assert_equal(batches(BOTH, start=4), batches(BOTH, count=7)[4:])


@pytest.mark.parametrize("rows", [ALL, np.arange(3, 8), np.array([9, 2, 2])])
def test_memory_and_grain_mix_alike(rows):
    memory, grain = (
        batches(dataclasses.replace(BOTH, loader=loader), rows)
        for loader in ("memory", "grain")
    )
    assert_equal(memory, grain)


@pytest.mark.parametrize("size", [12, 11])
def test_any_division_among_processes_gives_the_same_batch(size):
    """Also where the two of a pair are read by different processes."""
    config = dataclasses.replace(BOTH, batch_size=size)
    whole = batches(config, np.arange(size))
    for rows in np.array_split(np.arange(size), 4):
        assert_equal(batches(config, rows), rows_of(whole, rows))
    assert_equal(batches(config, np.arange(size), num_hosts=4), whole)


def test_pairs_are_of_one_host_where_hosts_have_their_own():
    config = dataclasses.replace(BOTH, shards="label_sorted", loader="memory")
    for batch in batches(config, num_hosts=4):
        for host in range(4):
            own = slice(3 * host, 3 * host + 3)
            assert set(batch[OTHER_LABEL][own]) <= set(batch["label"][own])


def test_mixup_is_the_weighted_mean():
    plain = batches(PLAIN)
    mixed = batches(dataclasses.replace(PLAIN, mixup=0.4))
    partners = Mixing(0.4, 0.0, SIZE).partners(ALL)
    for before, after in zip(plain, mixed, strict=True):
        share = after[LABEL_SHARE].reshape(-1, 1, 1, 1)
        wanted = share * before["image"] + (1 - share) * before["image"][partners]
        assert np.allclose(after["image"], wanted, atol=1e-5)
        assert np.array_equal(after["label"], before["label"])
        assert np.array_equal(after[OTHER_LABEL], before["label"][partners])
        assert len(np.unique(after[LABEL_SHARE])) == SIZE


def test_cutmix_shares_are_areas():
    """Each pixel is of one of the two, and the share is that of the own ones."""
    config = dataclasses.replace(PLAIN, cutmix=1.0, image_size=16)
    plain = batches(dataclasses.replace(config, cutmix=0.0), count=8)
    partners = Mixing(0.0, 1.0, SIZE).partners(ALL)
    for before, after in zip(plain, batches(config, count=8), strict=True):
        own = (after["image"] == before["image"]).all(-1)
        other = (after["image"] == before["image"][partners]).all(-1)
        assert (own | other).all()
        both = (before["image"] == before["image"][partners]).all(-1)
        area = own.mean((1, 2))
        doubtful = both.mean((1, 2))
        share = after[LABEL_SHARE]
        assert (area - doubtful - 1e-6 <= share).all() and (share <= area + 1e-6).all()
        for row in (~own).astype(int):
            # What came from the other image is one rectangle, but for equal pixels.
            ys, xs = np.nonzero(row)
            if len(ys):
                box = (np.ptp(ys) + 1) * (np.ptp(xs) + 1)
                assert box >= len(ys) > 0.3 * box


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_shares_have_the_mean_and_spread_of_the_beta_distribution(alpha):
    positions = np.arange(4000)
    batch = {
        "image": np.zeros((4000, 1, 1, 1), np.float32),
        "label": np.zeros(4000, np.int32),
    }
    mixing = Mixing(alpha, 0.0, 4000)
    share = mixing.mixed(batch, batch, positions, 3)[LABEL_SHARE]
    assert share.mean() == pytest.approx(0.5, abs=0.02)
    assert share.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.1)
    other = mixing.mixed(batch, batch, positions, 4)[LABEL_SHARE]
    assert not np.array_equal(share, other)


def test_half_of_the_rows_take_each():
    cuts = Mixing(1.0, 1.0, 4)._cuts(np.random.default_rng(0).uniform(size=2000))
    assert cuts.mean() == pytest.approx(0.5, abs=0.05)


def test_evaluation_sees_images_as_they_are():
    data = open_dataset(BOTH, seed=0)
    found = data.test.finished(data.test.evaluation_batch(np.arange(4)))
    assert found.keys() == {"image", "label"}
