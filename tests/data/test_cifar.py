"""Archives of CIFAR that the test writes itself: images, and nothing else, come out."""

import os
import pickle
import tarfile

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import cifar, open_dataset
from prunex_jax.data.settings import DataConfig

SIZES = {"train": 30, "test": 6}
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sets of few examples."""
    monkeypatch.setattr(cifar, "_SIZES", SIZES)


def write(folder, name="cifar10", changes=None):
    """The files of a set; returns images and labels by split."""
    known = cifar.ARCHIVES[name]
    place = folder / known.folder
    place.mkdir(parents=True)
    found = {}
    for split, files in known.files.items():
        each = SIZES[split] // len(files)
        pixels = RNG.integers(0, 256, (SIZES[split], 3072), dtype=np.uint8)
        labels = np.arange(SIZES[split]) % known.num_classes
        for number, file in enumerate(files):
            part = slice(number * each, (number + 1) * each)
            content = {
                b"batch_label": b"batch",
                b"data": pixels[part],
                known.labels: labels[part].tolist(),
                b"filenames": [b"a.png"] * each,
            }
            # Protocol 2, as the authors have written them.
            (place / file).write_bytes(
                pickle.dumps({**content, **(changes or {})}, protocol=2)
            )
        images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        found[split] = images, labels
    return place, found


def pack(place):
    """The archive instead of the folder."""
    known = next(x for x in cifar.ARCHIVES.values() if x.folder == place.name)
    with tarfile.open(place.parent / known.archive, "w:gz") as archive:
        archive.add(place, arcname=place.name)
    for file in place.iterdir():
        file.unlink()
    place.rmdir()


def open_in(folder, name="cifar10"):
    return open_dataset(DataConfig(name=name, dir=str(folder), batch_size=8), seed=0)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_images_and_labels_are_those_of_the_files(tmp_path, name, is_packed):
    place, wanted = write(tmp_path, name)
    if is_packed:
        pack(place)
    dataset = open_in(tmp_path, name)
    images, labels = dataset.test.read(np.arange(SIZES["test"]))
    np.testing.assert_array_equal(images, wanted["test"][0])
    np.testing.assert_array_equal(labels, wanted["test"][1])
    assert dataset.image_shape == (32, 32, 3)
    assert len(dataset.train) + len(dataset.validation) == SIZES["train"]
    held_out = [dataset.train.labels(), dataset.validation.labels()]
    assert sorted(np.concatenate(held_out)) == sorted(wanted["train"][1])
    if name == "cifar10":
        assert dataset.class_names[0] == "airplane"


def test_the_folder_itself_may_be_given(tmp_path):
    place, _ = write(tmp_path)
    assert len(open_in(place).test) == SIZES["test"]


def test_a_missing_set_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(UserError, match=r"not prepared in .*cifar-10-python.tar.gz"):
        open_in(tmp_path)


class Payload:
    """Runs something when it is unpickled by a trusting reader."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_nothing_of_a_pickle_is_run(tmp_path):
    place, _ = write(tmp_path, changes={"extra": Payload(tmp_path / "made")})
    with pytest.raises(UserError, match=r"test_batch of .* asks for posix.mkdir"):
        open_in(place).test.read(np.arange(1))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({b"data": np.zeros((6, 3072), np.float32)}, "has float32.6, 3072. with 6"),
        ({b"data": np.zeros((5, 3072), np.uint8)}, "has uint8.5, 3072. with 6"),
        ({b"data": "gone"}, "test_batch of .* with 6 labels, and not images"),
        ({b"labels": [-1] * 6}, "with 6 labels, and not images of cifar10"),
        ({b"labels": [10] * 6}, "6 images for test with labels up to 10"),
    ],
)
def test_other_content_is_one_line(tmp_path, changes, said):
    place, _ = write(tmp_path, changes=changes)
    with pytest.raises(UserError, match=said) as caught:
        open_in(place).test.read(np.arange(1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"no pickle", b"\x80\x02}q\x00"])
def test_damaged_files_are_named(tmp_path, damage):
    place, _ = write(tmp_path)
    (place / "test_batch").write_bytes(damage)
    with pytest.raises(UserError, match=r"test_batch of .* get it again"):
        open_in(place).test.read(np.arange(1))
    pack(place)
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        open_in(tmp_path).test.read(np.arange(1))
