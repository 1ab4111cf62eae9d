"""Arrays from files: images, and whatever a network of one's own reads."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import (
    EXAMPLE,
    ImageDataset,
    make_loader,
    names_arrays,
    open_dataset,
    open_named,
)
from prunex_jax.data.npz import Entry
from prunex_jax.data.settings import DataConfig

SIZE = 40
IMAGES = np.random.default_rng(0).integers(0, 256, (SIZE, 6, 5, 3), np.uint8)
LABELS = np.arange(SIZE) % 4
FEATURES = np.arange(SIZE * 3, dtype=np.float64).reshape(SIZE, 3)


def write(folder: Path, **arrays: object) -> DataConfig:
    file = folder / "arrays.npz"
    np.savez_compressed(file, **arrays)
    return DataConfig(name="npz", dir=str(file), batch_size=8, validation_share=0.25)


def images_of(config: DataConfig) -> ImageDataset:
    return open_dataset(config, seed=0)


def refused(config: DataConfig) -> str:
    with pytest.raises(UserError) as caught:
        open_named(config, seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels")])
@pytest.mark.parametrize("shape", [(SIZE,), (SIZE, 1)])
def test_images_without_splits(
    tmp_path: Path, names: tuple[str, str], shape: tuple[int, ...]
) -> None:
    config = write(tmp_path, **{names[0]: IMAGES, names[1]: LABELS.reshape(shape)})
    assert not names_arrays(config)
    data = images_of(config)
    assert [len(x) for x in (data.train, data.validation, data.test)] == [30, 10, 0]
    assert data.image_shape == (6, 5, 3) and data.num_classes == 4
    for split in (data.train, data.validation):
        images, labels = split.read(np.arange(len(split)))
        assert np.array_equal(images, IMAGES[split.indices])
        assert np.array_equal(labels, LABELS[split.indices])
        assert labels.dtype == np.int32


def test_images_as_keras_stores_them(tmp_path: Path) -> None:
    grey = IMAGES[..., 0]
    config = write(
        tmp_path, x_train=grey, y_train=LABELS, x_test=grey[:8], y_test=LABELS[:8]
    )
    data = images_of(config)
    assert [len(x) for x in (data.train, data.validation, data.test)] == [30, 10, 8]
    assert data.image_shape == (6, 5, 1)
    assert np.array_equal(data.test.read(np.arange(8))[0][..., 0], grey[:8])
    config = write(
        tmp_path, x_train=grey, y_train=LABELS, x_val=grey[:8], y_val=LABELS[:8]
    )
    data = images_of(config)
    assert [len(x) for x in (data.train, data.validation, data.test)] == [40, 8, 0]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_grain_reads_the_same(tmp_path: Path, num_workers: int) -> None:
    config = write(tmp_path, x=IMAGES, y=LABELS)
    batches = {}
    for loader in ("memory", "grain"):
        config = dataclasses.replace(config, loader=loader, num_workers=num_workers)
        train = images_of(config).train
        make = make_loader(train, config, rows=np.arange(8), seed=1, num_hosts=1)
        with make.batches(1) as iterator:
            batches[loader] = next(iterator)
    for key in ("image", "label"):
        assert np.array_equal(batches["memory"][key], batches["grain"][key])


def test_arrays_do_not_travel_to_worker_processes(tmp_path: Path) -> None:
    train = images_of(write(tmp_path, x=IMAGES, y=LABELS)).train
    images, _ = train.read(np.arange(3))
    content = pickle.dumps(train)
    assert len(content) < 2000 < IMAGES.nbytes
    assert np.array_equal(pickle.loads(content).read(np.arange(3))[0], images)


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": FEATURES, "y": LABELS},
        {"x": IMAGES.astype(np.float32), "y": LABELS},
        {"x": IMAGES, "y": FEATURES},
        {"x": IMAGES},
        {"x": IMAGES.reshape(SIZE, -1), "y": LABELS},
        {"x": LABELS.reshape(SIZE, 1), "y": LABELS},
    ],
)
def test_other_arrays_are_examples_as_those_given_in_python(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    config = write(tmp_path, **arrays)
    assert names_arrays(config)
    data = open_named(config, seed=0)
    assert data.name == "npz"
    assert [len(x) for x in (data.train, data.validation, data.test)] == [30, 10, 0]
    batch = data.train.evaluation_batch(np.arange(4))[EXAMPLE]
    found = batch if isinstance(batch, tuple) else (batch,)
    for array, wanted in zip(found, arrays.values(), strict=True):
        np.testing.assert_array_equal(array, wanted[data.train.numbers[:4]])
    with pytest.raises(UserError, match=r"no images .* --config.model.name=package"):
        open_dataset(config, seed=0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": FEATURES, "b": LABELS}, "has the arrays a, b: name them x_train"),
        ({"x": np.array([{}, {}])}, "entry 'x' of .* has Python objects"),
        ({"x": FEATURES, "y": np.array(["a", None] * 20)}, "entry 'y' of .* unpickled"),
        ({"x": FEATURES, "y": LABELS[1:]}, r"x float64\[40,3\] and y int64\[39\]: the"),
        ({"x": np.float32(1), "y": LABELS}, r"x float32\[\] and y .* first axis"),
        ({"y": LABELS}, r"y int64\[40\] for train and no x"),
        ({"x": FEATURES[:0], "y": LABELS[:0]}, r"x float64\[0,3\], without an example"),
        (
            {"x": FEATURES, "y": LABELS, "x_test": FEATURES},
            "x_test .* beside x .* all splits a y, or none",
        ),
        (
            {"x": IMAGES, "y": LABELS + 10**6},
            "has label 1000003 among 40 examples, for",
        ),
        ({"x": IMAGES, "y": LABELS - 1}, "has label -1, outside of 0..2"),
        (
            {"x": IMAGES, "y": LABELS, "x_test": IMAGES, "y_test": LABELS + 1},
            "y_test .* has label 4, outside of 0..3",
        ),
        (
            {"x": IMAGES, "y": LABELS, "x_test": IMAGES[:, 1:], "y_test": LABELS},
            r"x_test uint8\[40,5,5,3\] beside x uint8\[40,6,5,3\]",
        ),
        ({"x": np.array(["a"] * 4), "y": LABELS[:4]}, "and networks read numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*allow_pickle:UserWarning")
def test_one_line_says_what_is_wrong(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_named(write(tmp_path, **arrays), seed=0)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    assert "needs --config.data.dir=FILE.npz" in refused(DataConfig(name="npz"))
    nowhere = DataConfig(name="npz", dir=str(tmp_path / "nowhere.npz"))
    assert "is no file; " in refused(nowhere)
    config = write(tmp_path, x=IMAGES, y=LABELS)
    data = images_of(config)
    content = bytearray(Path(config.dir).read_bytes())
    content[1000:1100] = bytes(100)
    Path(config.dir).write_bytes(content)
    with pytest.raises(UserError, match=r"entry 'x' of .* cannot be read"):
        data.train.source.make.__self__.x.read()
    Path(config.dir).write_bytes(content[:200])
    assert "cannot be read as an .npz file" in refused(config)


def test_a_pickle_in_a_file_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)

    config = write(tmp_path, x_train=FEATURES, y_train=LABELS)
    np.savez(config.dir, x_train=FEATURES, y_train=np.array([Trap()] * SIZE))
    assert "entry 'y_train'" in refused(config)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("how", ["gone", "cut", "other"])
def test_a_file_that_breaks_before_it_is_read_is_named(tmp_path, how):
    path = tmp_path / "a.npz"
    x, y = np.zeros((9, 4, 4), np.uint8), np.arange(9) % 3
    np.savez(path, x=x, y=y)
    entry = Entry(str(path), "x", x.shape, x.dtype)
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:200])
    else:
        np.savez(path, x=x[:5], y=y[:5])
    with pytest.raises(UserError, match=rf"entry 'x' of {path}"):
        entry.read()
