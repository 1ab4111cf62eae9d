"""What `save_to_disk` wrote, read without a network."""

import io
import json
import os
import pickle
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prunex_jax.base.errors import UserError
from prunex_jax.data import ImageDataset, make_loader, open_dataset
from prunex_jax.data.settings import DataConfig

datasets = pytest.importorskip("datasets")

NAMES = ["ant", "bee", "cat"]


def features(image: str = "image", label: str = "label") -> Any:
    kinds = {image: datasets.Image(), label: datasets.ClassLabel(names=NAMES)}
    return datasets.Features({**kinds, "id": datasets.Value("string")})


def encoded(number: int, side: int = 8) -> bytes:
    """A PNG image whose red channel is its number."""
    pixels = np.zeros((side, side, 3), np.uint8)
    pixels[..., 0] = number
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def table(count: int, kinds: Any = None, **columns: list[Any]) -> Any:
    kinds = kinds or features()
    image, label, _ = kinds
    rows = {
        image: [{"bytes": encoded(k), "path": None} for k in range(count)],
        label: [k % 3 for k in range(count)],
        "id": [str(k) for k in range(count)],
    }
    return datasets.Dataset.from_dict({**rows, **columns}, features=kinds)


@pytest.fixture(autouse=True)
def _without_progress_bars() -> None:
    datasets.disable_progress_bars()


def saved(folder: Path, data: Any) -> Path:
    data = datasets.DatasetDict(data) if isinstance(data, dict) else data
    data.save_to_disk(folder / "set")
    return folder / "set"


def opened(folder: Path, **changes: object) -> ImageDataset:
    config = DataConfig(
        name="huggingface", dir=str(folder), validation_share=0.25, **changes
    )
    return open_dataset(config, seed=0)


def refused(folder: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        opened(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sizes_of(data: ImageDataset) -> list[int]:
    return [len(split) for split in (data.train, data.validation, data.test)]


def test_a_set_without_splits(tmp_path: Path) -> None:
    data = opened(saved(tmp_path, table(20, features("photo", "kind"))))
    assert sizes_of(data) == [15, 5, 0]
    assert data.image_shape == (8, 8, 3) and data.class_names == tuple(NAMES)
    assert "columns photo and kind" in data.described
    for split in (data.train, data.validation):
        images, labels = split.read(np.arange(len(split)))
        assert np.array_equal(np.stack(list(images))[:, 0, 0, 0], split.indices)
        assert np.array_equal(labels, split.indices % 3)


def test_splits(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"train": table(20), "test": table(6), "extra": table(3)})
    assert sizes_of(opened(folder)) == [15, 5, 6]
    folder = saved(tmp_path / "2", {"train": table(20), "validation": table(3)})
    assert sizes_of(opened(folder)) == [20, 3, 0]


def test_a_shuffled_set_in_another_format(tmp_path: Path) -> None:
    shuffled = table(20).shuffle(seed=1).with_format("arrow")
    data = opened(saved(tmp_path, shuffled), loader="grain")
    images, labels = data.train.read(np.arange(15))
    assert np.array_equal(np.stack(list(images))[:, 0, 0, 0] % 3, labels)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_grain_reads_the_same(tmp_path: Path, num_workers: int) -> None:
    folder, batches = saved(tmp_path, table(20)), {}
    for loader in ("memory", "grain"):
        config = DataConfig(
            name="huggingface",
            dir=str(folder),
            batch_size=8,
            loader=loader,
            num_workers=num_workers,
        )
        train = open_dataset(config, seed=0).train
        make = make_loader(train, config, rows=np.arange(8), seed=1, num_hosts=1)
        with make.batches(1) as iterator:
            batches[loader] = next(iterator)
    for key in ("image", "label"):
        assert np.array_equal(batches["memory"][key], batches["grain"][key])


def test_a_split_travels_to_a_worker_process(tmp_path: Path) -> None:
    train = opened(saved(tmp_path, table(20)), loader="grain").train
    images, _ = train.read(np.arange(3))
    content = pickle.dumps(train)
    assert len(content) < 3000, "the open table travels"
    assert np.array_equal(pickle.loads(content).read(np.arange(3))[0], images)


def test_broken_images(tmp_path: Path) -> None:
    images = [{"bytes": encoded(k), "path": None} for k in range(20)]
    images[7] = {"bytes": encoded(7)[:50], "path": None}
    images[9] = None
    folder = saved(tmp_path, {"train": table(20, image=images), "test": table(3)})
    message = refused(folder)
    assert f"image 7 of split 'train' of {folder} is broken" in message
    data = opened(folder, broken_files="skip")
    assert sizes_of(data) == [14, 4, 3]
    assert "2 broken files skipped, first image 7 of" in data.described
    images, labels = data.train.read(np.arange(14))
    assert np.array_equal(np.stack(list(images))[:, 0, 0, 0] % 3, labels)


def test_images_outside_of_the_set_are_not_read(tmp_path: Path) -> None:
    """Old versions of `save_to_disk` left them where they were."""
    parts = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    kinds = datasets.Features(features() | {"image": parts})
    images = [{"bytes": None, "path": "elsewhere.png"}] * 6
    folder = saved(tmp_path, table(6, kinds, image=images))
    info = json.loads((folder / "dataset_info.json").read_text())
    info["features"]["image"] = {"_type": "Image"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    message = refused(folder)
    assert "image 0 of" in message and "in file elsewhere.png, outside of" in message


def test_images_of_different_sizes(tmp_path: Path) -> None:
    images = [{"bytes": encoded(k, 8 + k % 2), "path": None} for k in range(20)]
    folder = saved(tmp_path, table(20, image=images))
    assert "differ in size: set data.image_size" in refused(folder)
    assert opened(folder, image_size=4).image_shape == (4, 4, 3)


def test_unsuitable_sets_are_refused(tmp_path: Path) -> None:
    assert "needs --config.data.dir=FOLDER" in refused("")
    assert "is no folder" in refused(tmp_path / "nowhere")
    assert "cannot be read" in refused(tmp_path)
    assert "cannot be read" in refused(saved(tmp_path / "0", table(0)))
    unlabelled = table(6, label=[0, 1, 2, -1, None, 0])
    folder = saved(tmp_path / "1", {"train": table(6), "test": unlabelled})
    assert "image 3 of split 'test'" in refused(folder)
    folder = saved(tmp_path / "2", {"test": table(6)})
    assert "has the splits test: training needs 'train'" in refused(folder)
    folder = saved(
        tmp_path / "3", {"train": table(6), "val": table(2), "valid": table(2)}
    )
    assert "two splits of validation" in refused(folder)
    names = datasets.ClassLabel(names=["x", "y", "z"])
    other = datasets.Features(features() | {"label": names})
    folder = saved(tmp_path / "4", {"train": table(6), "test": table(6, other)})
    assert "differ in columns or classes" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"label": "int64"},
            r"label \(Value\), id \(Value\), and needs one .*ClassLab",
        ),
        ({"image": "string"}, r"image \(Value\), .* needs one of type Image, or"),
    ],
)
def test_columns_of_other_types(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    kinds = features() | {k: datasets.Value(v) for k, v in changes.items()}
    columns = {"image": ["x"] * 6} if "image" in changes else {}
    with pytest.raises(UserError, match=message):
        opened(saved(tmp_path, table(6, datasets.Features(kinds), **columns)))


def test_two_columns_of_a_type(tmp_path: Path) -> None:
    twice = table(6).add_column("coarse", [0, 1] * 3)
    twice = twice.cast_column("coarse", datasets.ClassLabel(names=["a", "b"]))
    assert opened(saved(tmp_path / "1", twice)).num_classes == 3
    renamed = twice.rename_column("label", "fine")
    assert "one of them called 'label'" in refused(saved(tmp_path / "2", renamed))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, table(6))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'prunex-jax[huggingface]'" in refused(folder)


def test_rows_that_break_while_they_are_read_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"train": table(20), "test": table(3)})
    train = opened(folder, loader="grain").train
    shutil.rmtree(folder / "train")
    train = pickle.loads(pickle.dumps(train))  # As in a worker, or after a restart.
    config = DataConfig(batch_size=4, loader="grain")
    loader = make_loader(train, config, rows=np.arange(4), seed=0, num_hosts=1)
    with loader.batches() as batches, pytest.raises(UserError) as caught:
        next(batches)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    assert f"(read on {socket.gethostname()})" in message


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    """Whose missing part would end the process by a signal."""
    folder = saved(tmp_path, table(20))
    source = opened(folder).train.source
    (file,) = folder.glob("*.arrow")
    whole = file.stat().st_size
    os.truncate(file, 100)
    with pytest.raises(UserError, match=f"{file} has 100 bytes and had {whole} when"):
        source.read(np.array([4, 3]))


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    source = opened(saved(tmp_path, table(20))).train.source
    source.__dict__["_table"] = {}  # Which raises whatever is asked of it.
    with pytest.raises(UserError, match=r"image 3 of .* or a later one cannot be read"):
        source.read(np.array([4, 3]))
