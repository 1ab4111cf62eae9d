"""RandAugment: every operation does what it says, as strongly as it says."""

import dataclasses

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.data import open_dataset
from prunex_jax.data.images import Recipe
from prunex_jax.data.rand_augment import _OPERATIONS, rand_augment
from prunex_jax.data.settings import DataConfig

NAMES = (
    "same shear_x shear_y translate_x translate_y rotate brightness color contrast "
    "sharpness posterize solarize autocontrast equalize"
).split()


def image_of(channels=3, side=20):
    rng = np.random.default_rng(1)
    return rng.integers(30, 200, (side, side, channels), dtype=np.uint8)


def done(name, image, magnitude=30.0, sign=0.9):
    which = (NAMES.index(name) + 0.5) / len(NAMES)
    return rand_augment(image, np.array([which, sign]), magnitude)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_strength_zero_changes_nothing_that_has_a_strength(name, channels):
    image = image_of(channels)
    for sign in (0.1, 0.9):
        strong = done(name, image, 30.0, sign)
        assert strong.shape == image.shape and strong.dtype == np.uint8
        is_grey = channels == 1 and name == "color"
        assert np.array_equal(strong, image) == (name == "same" or is_grey)
        if name not in ("autocontrast", "equalize"):
            assert np.array_equal(done(name, image, 0.0, sign), image)


def test_operations_by_their_effect():
    image = image_of()
    # Brightness 0.1 and 1.9, as far as pixels go.
    assert np.abs(done("brightness", image, sign=0.1) - 0.1 * image).max() <= 1
    assert np.abs(done("brightness", image) - np.minimum(1.9 * image, 255)).max() <= 1
    assert np.array_equal(done("solarize", image), 255 - image)
    assert np.array_equal(done("posterize", image), image & 0xF0)
    moved = done("translate_x", image)  # by 9 of 20 pixels
    assert np.array_equal(moved[:, :11], image[:, 9:]) and not moved[:, 11:].any()
    back = done("translate_y", image, sign=0.1)
    assert np.array_equal(back[9:], image[:11]) and not back[:9].any()
    stretched = done("autocontrast", image)
    assert (stretched.min((0, 1)) == 0).all() and (stretched.max((0, 1)) >= 254).all()
    grey = done("color", image, sign=0.1).astype(int)
    assert np.ptp(grey, axis=-1).max() < 0.2 * np.ptp(image.astype(int), axis=-1).max()


def test_shears_and_rotations_keep_the_centre():
    image = np.zeros((21, 21, 3), np.uint8)
    image[10, 10] = 255
    for name in ("shear_x", "shear_y", "rotate"):
        assert done(name, image)[10, 10].tolist() == [255, 255, 255]


def test_all_are_drawn_alike():
    assert len(_OPERATIONS) == len(NAMES) == 14


def test_an_image_depends_on_its_own_numbers():
    recipe = Recipe("crop_flip", (20, 20, 3), num_operations=2, magnitude=9)
    assert recipe.num_draws == 7
    images = np.stack([image_of()] * 6)
    draws = np.random.default_rng(0).uniform(size=(6, 7))
    whole = recipe.training_images(images, draws)
    parts = [
        recipe.training_images(images[k : k + 1], draws[k : k + 1])[0] for k in range(6)
    ]
    assert np.array_equal(whole, np.stack(parts))
    assert len(np.unique(whole.reshape(6, -1), axis=0)) == 6
    plain = dataclasses.replace(recipe, num_operations=0)
    cropped = plain.training_images(images, draws[:, :3])
    # The crop is the same, whatever comes after it.
    wanted = [
        rand_augment(x, row[3:], 9) for x, row in zip(cropped, draws, strict=True)
    ]
    assert np.array_equal(whole, np.stack(wanted))


def test_a_strength_of_no_operations_is_refused():
    with pytest.raises(UserError, match=r"rand_augment_magnitude=5\.0 has no effect"):
        open_dataset(DataConfig(rand_augment_magnitude=5.0), seed=0)
