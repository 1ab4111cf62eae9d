"""Opens a data set by name, embedded or prepared, and cuts its validation split."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import check_defaults, check_settings
from prunex_jax.data.cifar import (
    ARCHIVES,
    find_archive,
    open_archive,
    where_archives_are_looked_for,
)
from prunex_jax.data.folder import open_folder
from prunex_jax.data.huggingface import HUGGINGFACE, open_huggingface
from prunex_jax.data.images import Normalization, Pixels, Recipe, resize_box
from prunex_jax.data.mixing import MIXING
from prunex_jax.data.npz import NPZ, open_npz
from prunex_jax.data.order import Positions, permutation, split_positions
from prunex_jax.data.settings import DataConfig
from prunex_jax.data.splits import (
    ArraySource,
    ImageDataset,
    ImageSplit,
    Labels,
    LateArrays,
    StoredSet,
)
from prunex_jax.data.tfds_source import open_tfds

# Largest training split, in bytes of uint8 images, that `loader=auto` keeps in memory.
MEMORY_LIMIT_BYTES = 2**30
_SAMPLE_SIZE = 2048
# Mean and standard deviation per channel, as commonly used for these sets; every other
# set is measured. A TFDS configuration such as cifar10/x shares its set's constants.
_NORMALIZATIONS = {
    "cifar10": Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet2012": Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_IMAGENET = "imagenet2012"
# Grey levels from 0 to 16, uint8[1797, 64], and which digits they are, uint8[1797].
_DIGITS_FILE = "digits.npz"
_TEST_SHARE = 0.2
_SYNTHETIC_SIDE = 32
# Cells per side of a class prototype: coarse enough to survive a shift by pixels.
_PROTOTYPE_CELLS = 4
_NOISE = 40.0
# Settings that say how images become batches, and nothing of other examples.
OF_IMAGES = (
    *("augment", "image_size", "normalization", "broken_files"),
    *("rand_augment_operations", "rand_augment_magnitude", *MIXING),
)


def open_dataset(config: DataConfig, seed: int) -> ImageDataset:
    """Opens a data set: embedded, synthetic, of files, or prepared by TFDS.

    The examples themselves are read at the first use of a split; the test split is not
    touched before that. Mean and standard deviation come from a table for CIFAR and
    ImageNet, and otherwise from up to 2,048 evenly spaced training examples, unless
    `config.normalization` names others.

    Args:
      config: What to read. `shuffle_seed` decides which examples are held out.
      seed: Decides the images of the synthetic set; nothing else depends on it.
    Returns:
      Train, validation (disjoint from train) and test splits; the last two may be
      empty.
    Raises:
      UserError: If the set is unknown or not prepared, or a setting does not fit it.
    """
    check_settings(config, "data")
    if not config.rand_augment_operations:
        check_defaults(
            "data",
            config,
            ("rand_augment_magnitude",),
            "images with config.data.rand_augment_operations=0",
        )
    stored = _open_stored(config, seed)
    recipe = Recipe(
        config.augment,
        _image_shape(config, stored),
        config.rand_augment_operations,
        config.rand_augment_magnitude,
    )
    sources, train = stored.sources, stored.sources["train"]
    sizes = {"test": 0, **{split: len(source) for split, source in sources.items()}}
    numbers = split_numbers(config, config.name, sizes)
    normalization = _normalization(config, stored, recipe, numbers["train"])
    splits = {
        split: ImageSplit(
            name=split,
            source=sources.get(split, train),
            indices=own,
            recipe=recipe,
            normalization=normalization,
            in_memory=_fits_memory(config, stored, recipe, len(own)),
        )
        for split, own in numbers.items()
    }
    return ImageDataset(
        name=config.name,
        **splits,
        num_classes=stored.num_classes,
        image_shape=recipe.image_shape,
        normalization=normalization,
        evaluation_share=recipe.evaluation_share,
        class_names=stored.class_names,
        remarks=stored.remarks,
    )


def _open_stored(config: DataConfig, seed: int) -> StoredSet:
    if config.name == "digits":
        return _open_digits()
    if config.name == "synthetic":
        return _open_synthetic(config, seed)
    if config.name == "folder":
        return open_folder(config)
    if config.name == HUGGINGFACE:
        return open_huggingface(config)
    if config.name == NPZ:
        return open_npz(config)
    return _open_prepared(config.name, config.dir)


def _open_prepared(name: str, data_dir: str) -> StoredSet:
    """A set that TFDS has prepared, or the archive of its authors."""
    if name not in ARCHIVES:
        return open_tfds(name, data_dir)
    try:
        return open_tfds(name, data_dir)
    except UserError as error:
        place = find_archive(name, data_dir)
        if place is None:
            looked = where_archives_are_looked_for(name, data_dir)
            raise UserError(f"{error}; {looked}") from None
        return open_archive(name, place)


def _image_shape(config: DataConfig, stored: StoredSet) -> tuple[int, int, int]:
    height, width, channels = stored.image_shape
    if config.image_size:
        return config.image_size, config.image_size, channels
    if height is None or width is None:
        raise UserError(
            f"images of data set {config.name!r} differ in size: set data.image_size, "
            "for instance to 224"
        )
    return height, width, channels


def split_numbers(
    config: DataConfig, name: str, sizes: Mapping[str, int]
) -> dict[str, Positions]:
    """Numbers of the examples of every split, int64[size], sorted.

    Without a split for validation, some of those of training are held out for it.

    Args:
      config: `validation_share` and `shuffle_seed`.
      name: What to call the data.
      sizes: Number of examples of every split that there is.
    Example:
      >>> config = DataConfig(validation_share=0.25)
      >>> numbers = split_numbers(config, 'mine', {'train': 8, 'test': 3})
      >>> {split: len(own) for split, own in numbers.items()}
      {'train': 6, 'test': 3, 'validation': 2}
    """
    numbers = {split: np.arange(size) for split, size in sizes.items()}
    if "validation" in sizes:
        return numbers
    num_examples = sizes["train"]
    num_held_out = round(config.validation_share * num_examples)
    if num_held_out == num_examples:
        raise UserError(
            f"data.validation_share={config.validation_share} leaves none of the "
            f"{num_examples} examples of {name!r} for training: lower it"
        )
    train, held_out = split_positions(num_examples, num_held_out, config.shuffle_seed)
    return {**numbers, "train": train, "validation": held_out}


def _fits_memory(
    config: DataConfig, stored: StoredSet, recipe: Recipe, size: int
) -> bool:
    """Decides by the size of the split, unless the user has decided."""
    shape = stored.image_shape if recipe.keeps_original_size else recipe.image_shape
    lengths = [length for length in shape if length is not None]
    if len(lengths) < len(shape):
        if config.loader == "memory":
            raise UserError(
                f"data.loader='memory' cannot hold images of different sizes, as "
                f"data.augment={config.augment!r} on {config.name!r} needs: set "
                "data.loader to auto or grain"
            )
        return False
    if config.loader == "auto":
        return size * math.prod(lengths) <= MEMORY_LIMIT_BYTES
    return config.loader == "memory"


def _normalization(
    config: DataConfig, stored: StoredSet, recipe: Recipe, train: Positions
) -> Normalization:
    channels = recipe.image_shape[-1]
    if config.normalization == "half":
        return Normalization((0.5,) * channels, (0.5,) * channels)
    if config.normalization == "imagenet":
        if channels != len(_NORMALIZATIONS[_IMAGENET].mean):
            raise UserError(
                f"config.data.normalization='imagenet' is for images of 3 channels, "
                f"and those of {stored.name!r} have {channels}; set it to 'auto'"
            )
        return _NORMALIZATIONS[_IMAGENET]
    base = stored.name.split("/")[0].split(":")[0]
    known = _NORMALIZATIONS.get(base)
    if known and len(known.mean) == recipe.image_shape[-1]:
        return known
    num_read = min(len(train), _SAMPLE_SIZE)
    sample = train[np.arange(num_read) * len(train) // num_read]
    images, _ = stored.sources["train"].read(sample)
    views = recipe.evaluation_images([recipe.stored(image) for image in images])
    values = views.reshape(-1, recipe.image_shape[-1]) / 255.0
    # A constant channel has no spread to divide by; one grey level stands in.
    std = np.maximum(values.std(axis=0), 1 / 255)
    return Normalization(tuple(values.mean(axis=0).tolist()), tuple(std.tolist()))


def _open_digits() -> StoredSet:
    """Opens 1,797 handwritten digits, 8 x 8, grey, which are part of the package.

    A fifth of every class is the test split; which fifth is fixed for all runs.

    References:
      Alpaydin and Kaynak, Optical recognition of handwritten digits, 1998,
      https://doi.org/10.24432/C50P49, CC BY 4.0: its test part, as in scikit-learn.
    """
    with np.load(Path(__file__).parent / _DIGITS_FILE) as stored:
        grey, labels = stored["grey"], stored["digit"].astype(np.int32)
    images = np.rint(grey.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        num_test = round(_TEST_SHARE * len(members))
        is_test[members[permutation(len(members), label)[:num_test]]] = True
    return StoredSet(
        name="digits",
        sources={
            "train": ArraySource((images[~is_test], labels[~is_test])),
            "test": ArraySource((images[is_test], labels[is_test])),
        },
        num_classes=10,
        image_shape=(8, 8, 1),
        class_names=tuple(map(str, range(10))),
    )


def _open_synthetic(config: DataConfig, seed: int) -> StoredSet:
    """Makes a learnable set: one smooth prototype per class, plus noise per pixel.

    The test split has a quarter of the examples of the training split. Images are RGB,
    and class k has every num_classes-th example.
    """
    side = config.image_size or _SYNTHETIC_SIDE
    num_train = config.synthetic_examples
    sizes = {"train": num_train, "test": max(num_train // 4, 1)}
    make = functools.partial(_synthetic_images, seed, side, config.synthetic_classes)
    return StoredSet(
        name="synthetic",
        sources={
            split: LateArrays(functools.partial(make, part, size), size)
            for part, (split, size) in enumerate(sizes.items())
        },
        num_classes=config.synthetic_classes,
        image_shape=(side, side, 3),
    )


def _synthetic_images(
    seed: int, side: int, num_classes: int, part: int, size: int
) -> tuple[Pixels, Labels]:
    labels = (np.arange(size) % num_classes).astype(np.int32)
    prototypes = _prototypes(np.random.default_rng([seed, 2]), num_classes, side)
    noise = np.random.default_rng([seed, part])
    images = np.empty((size, side, side, 3), np.uint8)
    # In blocks, because the noise is eight times as large as the images.
    for start in range(0, size, 256):
        clean = prototypes[labels[start : start + 256]]
        noisy = clean + noise.normal(0.0, _NOISE, clean.shape)
        images[start : start + 256] = np.clip(np.rint(noisy), 0, 255)
    return images, labels


def _prototypes(rng: np.random.Generator, num_classes: int, side: int) -> Pixels:
    cells = (num_classes, _PROTOTYPE_CELLS, _PROTOTYPE_CELLS, 3)
    coarse = rng.integers(0, 256, cells, dtype=np.uint8)
    box = (0, 0, _PROTOTYPE_CELLS, _PROTOTYPE_CELLS)
    return np.stack([resize_box(image, box, (side, side)) for image in coarse])
