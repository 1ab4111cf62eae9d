import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn import datasets

from prunex_jax.base.errors import UserError
from prunex_jax.data import Normalization, open_dataset, sources
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.splits import Split

SYNTHETIC = DataConfig(name="synthetic", synthetic_examples=200, image_size=8)


def _all(split: Split) -> tuple[np.ndarray, np.ndarray]:
    images, labels = split.read(np.arange(len(split)))
    return np.stack(list(images)), labels


def test_digits_are_stratified_and_complete() -> None:
    digits = open_dataset(DataConfig(), seed=0)
    sizes = [len(split) for split in (digits.train, digits.validation, digits.test)]
    assert sum(sizes) == 1797 and sizes[2] == 359 and sizes[1] == round(0.1 * 1438)
    assert digits.image_shape == (8, 8, 1) and digits.num_classes == 10
    counts = np.bincount(_all(digits.test)[1])
    assert counts.min() >= 35 and counts.max() <= 37, "a class is over-represented"
    images = np.concatenate([_all(s)[0] for s in (digits.train, digits.test)])
    assert images.dtype == np.uint8 and images.max() == 255 and images.min() == 0


def test_digits_are_those_of_scikit_learn() -> None:
    values, labels = datasets.load_digits(return_X_y=True)
    with np.load(Path(sources.__file__).parent / "digits.npz") as stored:
        assert np.array_equal(stored["grey"], values)
        assert np.array_equal(stored["digit"], labels)


def test_test_split_is_the_same_for_all_runs() -> None:
    first = open_dataset(DataConfig(shuffle_seed=0), seed=0)
    second = open_dataset(DataConfig(shuffle_seed=9, validation_share=0.3), seed=5)
    for ours, theirs in zip(_all(first.test), _all(second.test), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_validation_is_disjoint_and_of_the_stated_size(share: float) -> None:
    config = dataclasses.replace(SYNTHETIC, validation_share=share)
    data = open_dataset(config, seed=0)
    assert len(data.validation) == round(share * 200)
    both = np.concatenate([data.train.indices, data.validation.indices])
    assert sorted(both.tolist()) == list(range(200))


def test_shuffle_seed_alone_chooses_the_validation_split() -> None:
    held_out = [
        open_dataset(dataclasses.replace(SYNTHETIC, shuffle_seed=shuffle), seed=seed)
        for shuffle, seed in [(0, 0), (0, 1), (1, 0)]
    ]
    first, other_run, other_shuffle = [data.validation.indices for data in held_out]
    assert np.array_equal(first, other_run)
    assert not np.array_equal(first, other_shuffle)


def test_synthetic_is_deterministic_and_learnable() -> None:
    data = open_dataset(SYNTHETIC, seed=3)
    again = open_dataset(SYNTHETIC, seed=3)
    images, labels = _all(data.train)
    assert np.array_equal(images, _all(again.train)[0])
    assert not np.array_equal(images, _all(open_dataset(SYNTHETIC, 4).train)[0])
    means = np.stack([images[labels == k].mean(axis=0) for k in range(10)])
    test_images, test_labels = _all(data.test)
    distances = ((test_images[:, None] - means) ** 2.0).sum(axis=(2, 3, 4))
    accuracy = (distances.argmin(axis=1) == test_labels).mean()
    assert accuracy > 0.95, "nearest class mean does not solve the synthetic set"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_measured_normalisation_centres_the_training_split(name: str) -> None:
    data = open_dataset(dataclasses.replace(SYNTHETIC, name=name), seed=0)
    values = data.normalization.apply(_all(data.train)[0])
    np.testing.assert_allclose(values.mean(axis=(0, 1, 2)), 0, atol=1e-2)
    np.testing.assert_allclose(values.std(axis=(0, 1, 2)), 1, atol=1e-2)


def test_a_constant_channel_is_normalised_to_finite_values() -> None:
    config = dataclasses.replace(SYNTHETIC, synthetic_examples=1, image_size=1)
    data = open_dataset(dataclasses.replace(config, validation_share=0.0), seed=0)
    values = data.normalization.apply(_all(data.train)[0])
    assert np.isfinite(values).all()


def test_image_size_resizes_every_split() -> None:
    data = open_dataset(DataConfig(image_size=12), seed=0)
    assert data.image_shape == (12, 12, 1)
    assert _all(data.test)[0].shape == (359, 12, 12, 1)


def test_nothing_is_opened_before_it_is_read() -> None:
    test = open_dataset(SYNTHETIC, seed=0).test
    opened = []

    def spy() -> object:
        opened.append(1)
        return original.make()

    original = test.source
    test = dataclasses.replace(test, source=dataclasses.replace(original, make=spy))
    assert len(test) == 50 and not opened
    test.read(np.arange(2))
    test.read(np.arange(4))
    assert len(opened) == 1, "the split is opened again at every read"


def test_a_split_travels_to_a_worker_process_unread() -> None:
    train = open_dataset(SYNTHETIC, seed=0).train
    before = len(pickle.dumps(train))
    images, _ = train.read(np.arange(3))
    assert len(pickle.dumps(train)) == before
    copy = pickle.loads(pickle.dumps(train))
    assert np.array_equal(copy.read(np.arange(3))[0], images)


@pytest.mark.parametrize("loader", ["auto", "memory", "grain"])
def test_loader_decides_what_is_kept_in_memory(
    loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Splits hold 180 x 192, 20 x 192 and 50 x 192 bytes.
    monkeypatch.setattr("prunex_jax.data.sources.MEMORY_LIMIT_BYTES", 50 * 192)
    data = open_dataset(dataclasses.replace(SYNTHETIC, loader=loader), seed=0)
    kept = [s.in_memory for s in (data.train, data.validation, data.test)]
    expected = {"auto": [False, True, True], "memory": [True] * 3, "grain": [False] * 3}
    assert kept == expected[loader]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_share": 1.0}, r"validation_share=1.0 must lie in \[0, 1\)"),
        ({"validation_share": -0.1}, r"validation_share=-0.1 must lie in \[0, 1\)"),
        ({"validation_share": 0.999}, "leaves none of the 200 examples"),
        ({"loader": "fast"}, "data.loader='fast' is not one of auto, memory"),
        ({"image_size": -1}, "data.image_size=-1 must lie in"),
        ({"num_workers": -1}, "data.num_workers=-1 must lie in"),
        ({"synthetic_examples": 0}, "synthetic_examples=0 must lie in"),
        ({"synthetic_classes": 0}, "synthetic_classes=0 must lie in"),
        ({"augment": "mixup"}, "data.augment='mixup' is not one of none, shift"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_dataset(dataclasses.replace(SYNTHETIC, **changes), seed=0)


def test_pixels_are_normalised_as_trained_networks_expect() -> None:
    def of(name: str, data: DataConfig = SYNTHETIC) -> Normalization:
        config = dataclasses.replace(data, normalization=name)
        return open_dataset(config, seed=0).train.normalization

    assert of("imagenet").mean == (0.485, 0.456, 0.406)
    assert of("imagenet").std == (0.229, 0.224, 0.225)
    assert of("half") == Normalization((0.5,) * 3, (0.5,) * 3)
    assert of("half", DataConfig()) == Normalization((0.5,), (0.5,))
    assert of("auto") not in (of("imagenet"), of("half"))
    with pytest.raises(UserError, match="is for images of 3 channels, and those of"):
        of("imagenet", DataConfig())
