"""Image files in one folder per class, with everything that folders have in them."""

import errno
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prunex_jax.base.errors import UserError
from prunex_jax.data import (
    ImageDataset,
    evaluation_batches,
    image_files,
    make_loader,
    open_dataset,
)
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.splits import Split
from tests.helpers.image_folders import CLASSES, break_file, write_images


def config_of(folder: Path, **changes: object) -> DataConfig:
    return DataConfig(name="folder", dir=str(folder), batch_size=8, **changes)


def opened(folder: Path, **changes: object) -> ImageDataset:
    return open_dataset(config_of(folder, **changes), seed=0)


def files_of(split: Split) -> list[str]:
    return [split.source.files[index] for index in split.indices]


def refused(folder: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        opened(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_labels_are_numbers_of_sorted_folders(tmp_path: Path) -> None:
    data = opened(write_images(tmp_path / "photos"))
    assert data.class_names == CLASSES and data.num_classes == 3
    assert "classes ant, bee, cat" in data.described
    assert data.image_shape == (8, 8, 3) and not len(data.test)
    for split in (data.train, data.validation):
        images, labels = split.read(np.arange(len(split)))
        brightest = np.stack(list(images)).mean((1, 2)).argmax(-1)
        assert np.array_equal(brightest, labels), "a class has the colour of another"
        folders = [CLASSES.index(Path(file).parts[0]) for file in files_of(split)]
        assert folders == labels.tolist()


def test_a_share_of_every_class_is_held_out_by_hash(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", count=20)
    data = opened(folder, validation_share=0.2)
    held_out = files_of(data.validation)
    assert [sum(x.startswith(name) for x in held_out) for name in CLASSES] == [4] * 3
    assert not set(held_out) & set(files_of(data.train))
    assert len(data.train) + len(data.validation) == 60
    other = opened(folder, validation_share=0.2, shuffle_seed=1)
    assert files_of(other.validation) != held_out
    shutil.copytree(folder, tmp_path / "moved")
    assert files_of(opened(tmp_path / "moved", validation_share=0.2).validation) == (
        held_out
    )
    assert not len(opened(folder, validation_share=0.0).validation)


def test_nearly_all_files_stay_held_out_when_one_is_added(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", count=20)
    before = set(files_of(opened(folder, validation_share=0.2).validation))
    shutil.copy(folder / "ant" / "0.png", folder / "ant" / "00.png")
    after = set(files_of(opened(folder, validation_share=0.2).validation))
    assert len(before ^ after) <= 2


@pytest.mark.parametrize("name", ["validation", "val", "Valid"])
def test_folders_of_splits(tmp_path: Path, name: str) -> None:
    for split, count in (("train", 6), (name, 2), ("test", 3)):
        write_images(tmp_path / split, count=count)
    data = opened(tmp_path, validation_share=0.5)
    sizes = [len(split) for split in (data.train, data.validation, data.test)]
    assert sizes == [18, 6, 9], "nothing more is held out where validation is given"
    for split, folder in ((data.train, "train"), (data.validation, name)):
        assert {Path(file).parts[0] for file in files_of(split)} == {folder}
    shutil.rmtree(tmp_path / name)
    data = opened(tmp_path, validation_share=0.5)
    assert [len(x) for x in (data.train, data.validation, data.test)] == [9, 9, 9]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", classes=("bus", "train"))
    assert opened(folder).class_names == ("bus", "train")


def test_files_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos")
    (folder / "ant" / "Thumbs.db").write_bytes(b"x")
    (folder / "ant" / "._0.png").write_bytes(b"x")
    (folder / ".git").mkdir()
    (folder / "readme.txt").write_text("x")
    (folder / "ant" / "deeper").mkdir()
    shutil.move(folder / "ant" / "0.png", folder / "ant" / "deeper" / "0.PNG")
    data = opened(folder, validation_share=0.0)
    assert len(data.train) == 30 and "ant/deeper/0.PNG" in files_of(data.train)
    first = folder / "ant" / "Thumbs.db"
    assert f"1 files of other kinds left out, first {first}" in data.described


def test_grey_images_stay_grey_unless_some_have_colours(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos")
    for file in folder.rglob("*.*"):
        with Image.open(file) as image:
            grey = image.convert("L")
        file.unlink()
        grey.save(file.with_suffix(".png"))
    data = opened(folder)
    assert data.image_shape == (8, 8, 1)
    assert data.train.read(np.arange(5))[0].shape == (5, 8, 8, 1)
    Image.new("RGBA", (8, 8)).save(folder / "bee" / "colour.png")
    assert opened(folder).image_shape == (8, 8, 3)


def test_images_of_different_sizes(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", sizes=((9, 14), (30, 8)))
    assert "differ in size: set data.image_size" in refused(folder)
    config = config_of(folder, augment="random_resized_crop", image_size=6)
    data = open_dataset(config, seed=0)
    assert not data.train.in_memory
    loader = make_loader(data.train, config, rows=np.arange(8), seed=0, num_hosts=1)
    with loader.batches() as batches:
        assert next(batches)["image"].shape == (8, 6, 6, 3)
    assert opened(folder, image_size=6).train.in_memory


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_memory_and_grain_give_the_same_bits(tmp_path: Path, num_workers: int) -> None:
    folder, batches = write_images(tmp_path / "photos"), {}
    for loader in ("memory", "grain"):
        config = config_of(
            folder, augment="crop_flip", loader=loader, num_workers=num_workers
        )
        data = open_dataset(config, seed=0)
        rows = np.array([5, 0, 3])
        make = make_loader(data.train, config, rows=rows, seed=11, num_hosts=1)
        with make.batches(2) as iterator:
            batches[loader] = [next(iterator) for _ in range(3)]
    for memory, grain in zip(batches["memory"], batches["grain"], strict=True):
        for key in ("image", "label"):
            assert np.array_equal(memory[key], grain[key]), f"{key} differs"


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif"])
def test_a_broken_file_is_named(tmp_path: Path, suffix: str) -> None:
    folder = write_images(tmp_path / "photos", sizes=((40, 40),))
    file = break_file(next((folder / "bee").glob(f"*.{suffix}")))
    message = refused(folder)
    assert str(file) in message and "broken" in message
    assert "data.broken_files=skip" in message


def test_broken_files_are_skipped(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos")
    whole = opened(folder, validation_share=0.2)
    (folder / "bee" / "0.png").write_bytes(b"")
    (folder / "cat" / "1.jpg").write_text("not found")
    data = opened(folder, validation_share=0.2, broken_files="skip")
    assert len(data.train) + len(data.validation) == 28
    assert f"2 broken files skipped, first {folder / 'bee' / '0.png'}" in data.described
    assert "skipped" not in whole.described
    with evaluation_batches(data.train, 8, np.arange(8)) as batches:
        assert sum(batch["valid"].sum() for batch in batches) == len(data.train)
    for file in (folder / "bee").iterdir():
        file.write_bytes(b"")
    assert "class 'bee' has no image" in refused(folder, broken_files="skip")


def test_large_sets_are_checked_by_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "photos", sizes=((40, 40),))
    file = break_file(folder / "bee" / "0.png")
    monkeypatch.setattr(image_files, "DECODED_BYTES", 1000)
    data = opened(folder, loader="grain", augment="shift", image_size=4)
    assert "only the headers of 30 files were checked" in data.described
    with pytest.raises(UserError, match=f"{file} is broken"):
        data.train.read(np.arange(len(data.train)))
        data.validation.read(np.arange(len(data.validation)))
    data = opened(folder, broken_files="skip")
    assert "1 broken files skipped" in data.described
    file.write_bytes(b"x")
    assert str(file) in refused(folder), "a header is broken"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_breaks_while_training_is_named(
    tmp_path: Path, num_workers: int
) -> None:
    folder = write_images(tmp_path / "photos")
    config = config_of(folder, loader="grain", num_workers=num_workers)
    data = open_dataset(config, seed=0)
    file = folder / files_of(data.train)[3]
    file.write_bytes(b"x")
    loader = make_loader(data.train, config, rows=np.arange(8), seed=0, num_hosts=1)
    with pytest.raises(UserError, match=f"{file} is broken"):
        with loader.batches() as batches:
            for _ in range(8):
                next(batches)


def test_a_split_travels_to_a_worker_process(tmp_path: Path) -> None:
    train = opened(write_images(tmp_path / "photos"), loader="grain").train
    images, _ = train.read(np.arange(3))
    copy = pickle.loads(pickle.dumps(train))
    assert np.array_equal(copy.read(np.arange(3))[0], images)


def test_one_line_says_what_a_folder_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs --config.data.dir=FOLDER"):
        open_dataset(DataConfig(name="folder"), seed=0)
    assert "is no folder" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "is no folder" in refused(tmp_path / "file")
    bare = tmp_path / "bare"
    bare.mkdir()
    Image.new("RGB", (8, 8)).save(bare / "0.png")
    assert f"{bare} has no folders" in refused(bare)
    assert "only the folder 'ant'" in refused(write_images(tmp_path / "a", 2, ["ant"]))
    folder = write_images(tmp_path / "photos")
    (folder / "dog").mkdir()
    (folder / "dog" / "notes.txt").write_text("x")
    message = refused(folder)
    assert "class 'dog' is empty" in message and str(folder / "dog") in message


def test_splits_must_have_the_same_classes(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 2)
    write_images(tmp_path / "val", 2, ("ant", "bee"))
    message = refused(tmp_path)
    assert (
        "class 'cat' is in" in message and "not in " + str(tmp_path / "val") in message
    )
    write_images(tmp_path / "more" / "x", 2, ("cat", "dog"))
    shutil.move(tmp_path / "more" / "x" / "cat", tmp_path / "val" / "cat")
    shutil.move(tmp_path / "more" / "x" / "dog", tmp_path / "val" / "dog")
    shutil.rmtree(tmp_path / "more")
    assert "class 'dog' is in " + str(tmp_path / "val") in refused(tmp_path)
    shutil.rmtree(tmp_path / "val" / "dog")
    assert len(opened(tmp_path).validation) == 6
    (tmp_path / "extra").mkdir()
    assert "'extra' is none of them" in refused(tmp_path)
    (tmp_path / "extra").rename(tmp_path / "valid")
    assert "a second one of validation" in refused(tmp_path)
    shutil.rmtree(tmp_path / "valid")
    shutil.rmtree(tmp_path / "train")
    assert "has folders of splits, val, and no 'train'" in refused(tmp_path)


def test_a_class_that_is_held_out_whole_is_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", 3)
    shutil.copytree(folder / "ant", folder / "big")
    (folder / "big" / "0.png").unlink()
    (folder / "big" / "1.jpg").unlink()
    message = refused(folder, validation_share=0.6)
    assert "class 'big' has no image to train on" in message
    assert "data.validation_share=0.6" in message


def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "photos")
    (folder / "ant" / "link.png").symlink_to(tmp_path / "nowhere.png")
    assert f"{folder / 'ant' / 'link.png'} is broken (No such file" in refused(folder)

    def scandir(path: str) -> object:
        if str(path) == str(folder / "bee"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return original(path)

    original = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)  # Root may read everything.
    assert f"{folder / 'bee'} cannot be read: Permission" in refused(folder)
