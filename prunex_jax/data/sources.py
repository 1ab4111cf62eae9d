"""Opens a data set by name and cuts its validation split."""

import functools
import math

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import DataConfig, check_settings
from prunex_jax.data.augment import Normalization, Recipe
from prunex_jax.data.embedded import open_digits, open_synthetic
from prunex_jax.data.order import Positions, split_positions
from prunex_jax.data.splits import Dataset, Split, StoredSet
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


def open_dataset(config: DataConfig, seed: int) -> Dataset:
    """Opens a data set: embedded, synthetic, or prepared by TFDS.

    The examples themselves are read at the first use of a split; the test split is not
    touched before that. Mean and standard deviation come from a table for CIFAR and
    ImageNet, and otherwise from up to 2,048 evenly spaced training examples.

    Args:
      config: What to read. `shuffle_seed` decides which examples are held out.
      seed: Decides the images of the synthetic set; nothing else depends on it.
    Returns:
      Train, validation (disjoint from train, empty for share 0) and test splits.
    Raises:
      UserError: If the set is unknown or not prepared, or a setting does not fit it.
    """
    check_settings(config, "data")
    stored = _open_stored(config, seed)
    recipe = Recipe(config.augment, _image_shape(config, stored))
    train, held_out = _cut_validation(config, stored.train.num_examples)
    normalization = _normalization(stored, recipe, train)
    make = functools.partial(Split, recipe=recipe, normalization=normalization)
    return Dataset(
        name=config.name,
        num_classes=stored.num_classes,
        image_shape=recipe.image_shape,
        train=make(
            name="train",
            stored=stored.train,
            indices=train,
            in_memory=_fits_memory(config, stored, recipe, len(train)),
        ),
        validation=make(
            name="validation",
            stored=stored.train,
            indices=held_out,
            in_memory=_fits_memory(config, stored, recipe, len(held_out)),
        ),
        test=make(
            name="test",
            stored=stored.test,
            indices=np.arange(stored.test.num_examples, dtype=np.int64),
            in_memory=_fits_memory(config, stored, recipe, stored.test.num_examples),
        ),
        normalization=normalization,
        class_names=stored.class_names,
    )


def _open_stored(config: DataConfig, seed: int) -> StoredSet:
    if config.name == "digits":
        return open_digits()
    if config.name == "synthetic":
        return open_synthetic(config, seed)
    return open_tfds(config.name, config.dir)


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


def _cut_validation(
    config: DataConfig, num_examples: int
) -> tuple[Positions, Positions]:
    num_held_out = round(config.validation_share * num_examples)
    if num_held_out == num_examples:
        raise UserError(
            f"data.validation_share={config.validation_share} leaves none of the "
            f"{num_examples} examples of {config.name!r} for training: lower it"
        )
    return split_positions(num_examples, num_held_out, config.shuffle_seed)


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
    stored: StoredSet, recipe: Recipe, train: Positions
) -> Normalization:
    base = stored.name.split("/")[0].split(":")[0]
    known = _NORMALIZATIONS.get(base)
    if known and len(known.mean) == recipe.image_shape[-1]:
        return known
    num_read = min(len(train), _SAMPLE_SIZE)
    sample = train[np.arange(num_read) * len(train) // num_read]
    images, _ = stored.train.open().read(sample)
    views = recipe.evaluation_images([recipe.stored(image) for image in images])
    values = views.reshape(-1, recipe.image_shape[-1]) / 255.0
    # A constant channel has no spread to divide by; one grey level stands in.
    std = np.maximum(values.std(axis=0), 1 / 255)
    return Normalization(tuple(values.mean(axis=0).tolist()), tuple(std.tolist()))
