"""Reads a tiny TFDS set that the test writes itself, without TensorFlow."""

import dataclasses
import io
import json
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prunex_jax.base.errors import UserError
from prunex_jax.data import evaluation_batches, make_loader, open_dataset
from prunex_jax.data.settings import DataConfig

CIFAR = Path(__file__).parents[2] / "../shared/data/tfds"
NUM_TRAIN, NUM_TEST = 23, 6


def _features(shape: tuple[int | None, ...], label: bool) -> object:
    import tensorflow_datasets as tfds

    features = {"image": tfds.features.Image(shape=shape), "id": tfds.features.Text()}
    if label:
        features["label"] = tfds.features.ClassLabel(num_classes=4)
    return tfds.features.FeaturesDict(features)


def _record(image: np.ndarray, label: int) -> bytes:
    from tensorflow_datasets.proto import tf_example_pb2

    encoded = io.BytesIO()
    Image.fromarray(image).save(encoded, "PNG")
    example = tf_example_pb2.Example()
    values = example.features.feature
    values["image"].bytes_list.value.append(encoded.getvalue())
    values["label"].int64_list.value.append(label)
    values["id"].bytes_list.value.append(b"id")
    return example.SerializeToString()


def _write_set(
    root: Path,
    name: str,
    *,
    version: str = "1.0.0",
    sizes: tuple[int, ...] = (8,),
    splits: tuple[str, ...] = ("train", "test"),
    file_format: str = "array_record",
    shape: tuple[int | None, ...] | None = None,
    label: bool = True,
    test_labels: int = 4,
) -> None:
    """Writes images whose red channel is their number, in TFDS's own layout."""
    from array_record.python import array_record_module

    folder = root / name / version
    folder.mkdir(parents=True)
    side = sizes[0] if len(sizes) == 1 else None
    _features(shape or (side, side, 3), label).save_config(folder)
    infos = []
    for split in splits:
        count = NUM_TRAIN if split == "train" else NUM_TEST
        path = folder / f"{name}-{split}.{file_format}-00000-of-00001"
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for k in range(count):
            pixels = np.zeros((sizes[k % len(sizes)], sizes[-1 - k % len(sizes)], 3))
            pixels[..., 0] = k
            writer.write(
                _record(
                    pixels.astype(np.uint8), k % (test_labels if split == "test" else 4)
                )
            )
        writer.close()
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        infos.append(
            {"name": split, "filepathTemplate": template, "shardLengths": [str(count)]}
        )
    info = {"name": name, "version": version, "fileFormat": file_format}
    (folder / "dataset_info.json").write_text(json.dumps({**info, "splits": infos}))


def _config(root: Path, name: str = "tiny", **changes: object) -> DataConfig:
    return DataConfig(name=name, dir=str(root), batch_size=8, **changes)


def test_a_prepared_set_is_read_exactly(tmp_path: Path) -> None:
    _write_set(tmp_path, "tiny")
    data = open_dataset(_config(tmp_path, validation_share=0.2), seed=0)
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 5, 6)
    assert data.image_shape == (8, 8, 3) and data.num_classes == 4
    for split in (data.train, data.validation, data.test):
        images, labels = split.read(np.arange(len(split)))
        assert np.array_equal(images[:, 0, 0, 0], split.indices)
        assert np.array_equal(labels, split.indices % 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("augment", ["crop_flip", "random_resized_crop"])
def test_memory_and_grain_give_the_same_bits(
    tmp_path: Path, augment: str, num_workers: int
) -> None:
    _write_set(tmp_path, "tiny")
    rows = np.array([5, 0, 3])
    batches = {}
    for loader in ("memory", "grain"):
        config = _config(
            tmp_path, augment=augment, loader=loader, num_workers=num_workers
        )
        data = open_dataset(config, seed=0)
        make = make_loader(data.train, config, rows=rows, seed=11, num_hosts=1)
        with make.batches(2) as iterator:
            batches[loader] = [next(iterator) for _ in range(5)]
    for memory, grain in zip(batches["memory"], batches["grain"], strict=True):
        assert memory.keys() == grain.keys() == {"image", "label"}
        for key in memory:
            assert memory[key].dtype == grain[key].dtype
            assert np.array_equal(memory[key], grain[key]), f"{key} differs"


def test_images_of_different_sizes_become_batches(tmp_path: Path) -> None:
    _write_set(tmp_path, "tiny", sizes=(9, 14, 30))
    config = _config(tmp_path, augment="random_resized_crop", image_size=6)
    data = open_dataset(config, seed=0)
    assert not data.train.in_memory
    loader = make_loader(data.train, config, rows=np.arange(8), seed=0, num_hosts=1)
    with loader.batches() as batches:
        assert next(batches)["image"].shape == (8, 6, 6, 3)
    with evaluation_batches(data.test, 4, np.arange(4)) as batches:
        collected = list(batches)
    valid = np.concatenate([batch["valid"] for batch in collected])
    labels = np.concatenate([batch["label"] for batch in collected])
    assert valid.tolist() == [1] * 6 + [0] * 2
    assert labels[:6].tolist() == [k % 4 for k in range(6)]


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    _write_set(tmp_path, "tiny", sizes=(9, 14, 30))
    with pytest.raises(UserError, match=r"differ in size: set data.image_size"):
        open_dataset(_config(tmp_path), seed=0)
    config = _config(tmp_path, image_size=6, augment="random_resized_crop")
    with pytest.raises(UserError, match="cannot hold images of different sizes"):
        open_dataset(dataclasses.replace(config, loader="memory"), seed=0)
    config = dataclasses.replace(config, loader="memory", augment="none")
    assert open_dataset(config, seed=0).train.in_memory


def test_an_older_prepared_version_is_read(tmp_path: Path) -> None:
    _write_set(tmp_path, "cifar10", version="3.0.0")
    assert len(open_dataset(_config(tmp_path, "cifar10"), seed=0).test) == NUM_TEST


def test_imagenet_is_tested_on_its_labelled_validation_split(tmp_path: Path) -> None:
    splits = ("train", "validation", "test")
    _write_set(tmp_path, "imagenet2012", version="5.1.0", splits=splits)
    data = open_dataset(_config(tmp_path, "imagenet2012", image_size=6), seed=0)
    assert data.test.source.split == "validation"
    assert data.normalization.mean == (0.485, 0.456, 0.406)


def test_an_unlabelled_example_is_refused(tmp_path: Path) -> None:
    _write_set(tmp_path, "tiny", test_labels=6)
    data = open_dataset(_config(tmp_path, validation_share=0.0), seed=0)
    with pytest.raises(UserError, match=r"example 4 of split 'test'.*label in 0\.\.3"):
        data.test.read(np.arange(NUM_TEST))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"file_format": "tfrecord"}, "tfrecord, which only TensorFlow reads: prepare"),
        ({"splits": ("train",)}, "has the splits train: .*'train' and 'test' or 'vali"),
        ({"splits": ("test",)}, "has the splits test: training needs 'train'"),
        ({"shape": (8, 8, 4)}, "only uint8 images of 1 or 3 channels"),
        ({"label": False}, "not a set of images with one class each: .*id, image"),
    ],
)
def test_unsuitable_sets_are_refused(
    tmp_path: Path, written: dict[str, object], message: str
) -> None:
    _write_set(tmp_path, "tiny", **written)
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(_config(tmp_path), seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cifar100",
            "'cifar100' is not prepared in .*: .*tfds build cifar100 --data_d",
        ),
        ("cifar_10", "'cifar_10' is unknown to TFDS .*, did you mean 'cifar10'"),
        ("digit", "did you mean 'digits'"),
        ("zzzzzzzz", "'zzzzzzzz' is unknown .*; check data.name and data.dir"),
        ("CIFAR 10", "data.name='CIFAR 10' is not a TFDS name"),
        ("coco", "'coco' needs a package .*No module named 'tensorflow'.*: install it"),
    ],
)
def test_missing_sets_are_one_clear_line(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(_config(tmp_path, name), seed=0)
    assert "\n" not in str(caught.value)
    if name in ("cifar100", "cifar_10"):
        assert str(tmp_path) in str(caught.value), "where it was looked for is missing"


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR.exists(), reason="no prepared CIFAR-10 beside the code")
def test_cifar10_through_tfds() -> None:
    config = DataConfig(name="cifar10", dir=str(CIFAR), augment="crop_flip")
    data = open_dataset(config, seed=0)
    sizes = (len(data.train), len(data.validation), len(data.test))
    assert sizes == (45_000, 5_000, 10_000) and data.image_shape == (32, 32, 3)
    with evaluation_batches(data.validation, 500, np.arange(500)) as batches:
        values = [next(batches) for _ in range(2)]
    images = np.concatenate([batch["image"] for batch in values])
    labels = np.concatenate([batch["label"] for batch in values])
    assert sorted(set(labels.tolist())) == list(range(10))
    np.testing.assert_allclose(images.mean(axis=(0, 1, 2)), 0, atol=0.1)
    np.testing.assert_allclose(images.std(axis=(0, 1, 2)), 1, atol=0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_breaks_while_it_is_read_is_named(
    tmp_path: Path, num_workers: int
) -> None:
    _write_set(tmp_path, "tiny")
    reading = {"loader": "grain", "num_workers": num_workers}
    # Nothing is measured, so that the file is opened after it breaks.
    config = _config(tmp_path, normalization="half", **reading)
    train = open_dataset(config, seed=0).train
    (path,) = tmp_path.rglob("tiny-train*")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(400)
    path.write_bytes(content)
    loader = make_loader(train, config, rows=np.arange(8), seed=0, num_hosts=1)
    with pytest.raises(UserError, match=r"example \d+ of split 'train'") as caught:
        with loader.batches() as batches:
            for _ in range(4):
                next(batches)
    message = str(caught.value)
    assert f"of {path}) cannot be read" in message and "\n" not in message
    assert message.endswith(f"(read on {socket.gethostname()})")


def test_an_image_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _record(np.zeros((8, 8, 3), np.uint8), 1)
    monkeypatch.setitem(
        globals(), "_record", lambda *_: whole.replace(b"IHDR", b"xxxx")
    )
    _write_set(tmp_path, "tiny")
    (path,) = tmp_path.rglob("tiny-train*")
    with pytest.raises(UserError, match=rf"\(record 0 of {path}\) cannot be read"):
        open_dataset(_config(tmp_path), seed=0)
