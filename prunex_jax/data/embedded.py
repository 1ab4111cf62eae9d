"""Makes the data sets that need no files: digits and synthetic."""

import functools

import numpy as np

from prunex_jax.base.settings import DataConfig, check_settings
from prunex_jax.data.images import Pixels, resize_box
from prunex_jax.data.order import permutation
from prunex_jax.data.splits import ArraySource, StoredSet, StoredSplit

_TEST_SHARE = 0.2
_SYNTHETIC_SIDE = 32
# Cells per side of a class prototype: coarse enough to survive a shift by pixels.
_PROTOTYPE_CELLS = 4
_NOISE = 40.0


def open_digits() -> StoredSet:
    """Opens the 1,797 handwritten digits (8 x 8, grey) that scikit-learn contains.

    A fifth of every class is the test split; which fifth is fixed for all runs.

    References:
      Alpaydin and Kaynak, Optical recognition of handwritten digits, 1998,
      https://doi.org/10.24432/C50P49 (scikit-learn holds its test part).
    """
    # Imported here: it takes a second, and only this set needs it.
    from sklearn.datasets import load_digits

    values, targets = load_digits(return_X_y=True)
    images = np.rint(values.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    labels = targets.astype(np.int32)
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        members = np.flatnonzero(labels == label)
        num_test = round(_TEST_SHARE * len(members))
        is_test[members[permutation(len(members), label)[:num_test]]] = True
    return StoredSet(
        name="digits",
        train=_stored(ArraySource(images[~is_test], labels[~is_test])),
        test=_stored(ArraySource(images[is_test], labels[is_test])),
        num_classes=10,
        image_shape=(8, 8, 1),
        class_names=tuple(map(str, range(10))),
    )


def open_synthetic(config: DataConfig, seed: int) -> StoredSet:
    """Makes a learnable set: one smooth prototype per class, plus noise per pixel.

    Args:
      config: Uses `synthetic_examples` (training split; the test split has a quarter
        of it), `synthetic_classes` and `image_size` (0 means 32).
      seed: Decides prototypes and noise.
    Returns:
      RGB images; class k has every num_classes-th example.
    Raises:
      UserError: If a number is not positive.
    """
    check_settings(config, "data")
    side = config.image_size or _SYNTHETIC_SIDE
    num_test = max(config.synthetic_examples // 4, 1)
    make = functools.partial(_synthetic_source, seed, side, config.synthetic_classes)
    return StoredSet(
        name="synthetic",
        train=StoredSplit(
            functools.partial(make, 0, config.synthetic_examples),
            config.synthetic_examples,
        ),
        test=StoredSplit(functools.partial(make, 1, num_test), num_test),
        num_classes=config.synthetic_classes,
        image_shape=(side, side, 3),
    )


def _stored(source: ArraySource) -> StoredSplit:
    # A partial instead of a lambda, because worker processes pickle it.
    return StoredSplit(functools.partial(_same, source), len(source))


def _same(source: ArraySource) -> ArraySource:
    return source


def _synthetic_source(
    seed: int, side: int, num_classes: int, part: int, size: int
) -> ArraySource:
    labels = (np.arange(size) % num_classes).astype(np.int32)
    prototypes = _prototypes(np.random.default_rng([seed, 2]), num_classes, side)
    noise = np.random.default_rng([seed, part])
    images = np.empty((size, side, side, 3), np.uint8)
    # In blocks, because the noise is eight times as large as the images.
    for start in range(0, size, 256):
        clean = prototypes[labels[start : start + 256]]
        noisy = clean + noise.normal(0.0, _NOISE, clean.shape)
        images[start : start + 256] = np.clip(np.rint(noisy), 0, 255)
    return ArraySource(images, labels)


def _prototypes(rng: np.random.Generator, num_classes: int, side: int) -> Pixels:
    cells = (num_classes, _PROTOTYPE_CELLS, _PROTOTYPE_CELLS, 3)
    coarse = rng.integers(0, 256, cells, dtype=np.uint8)
    box = (0, 0, _PROTOTYPE_CELLS, _PROTOTYPE_CELLS)
    return np.stack([resize_box(image, box, (side, side)) for image in coarse])
