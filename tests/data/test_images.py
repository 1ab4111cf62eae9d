import io

import numpy as np
import pytest
from PIL import Image

from prunex_jax.data.images import (
    NUM_DRAWS,
    Normalization,
    Recipe,
    centre_view,
    decode_image,
    resize_box,
)
from prunex_jax.data.order import uniforms


@pytest.fixture
def images() -> np.ndarray:
    shape = (64, 10, 12, 3)
    return np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)


def _windows(image: np.ndarray, padding: int) -> list[np.ndarray]:
    height, width = image.shape[:2]
    frame = ((padding, padding), (padding, padding), (0, 0))
    padded = np.pad(image, frame)
    steps = range(2 * padding + 1)
    return [padded[y : y + height, x : x + width] for y in steps for x in steps]


@pytest.mark.parametrize(
    ("augment", "padding", "flips"), [("shift", 1, False), ("crop_flip", 4, True)]
)
def test_crops_are_windows_of_the_padded_image(
    augment: str, padding: int, flips: bool, images: np.ndarray
) -> None:
    recipe = Recipe(augment, (10, 12, 3))
    draws = uniforms(0, np.arange(len(images)), recipe.num_draws)
    seen = set()
    for image, moved in zip(images, recipe.training_images(images, draws), strict=True):
        windows = _windows(image, padding)
        windows += [window[:, ::-1] for window in windows] if flips else []
        matches = [k for k, window in enumerate(windows) if (window == moved).all()]
        assert len(matches) == 1, "an augmented image is no window of its original"
        seen.add(matches[0])
    assert seen <= set(range((2 * padding + 1) ** 2 * (1 + flips)))
    assert len(seen) > (6 if augment == "shift" else 40), "few of the windows occur"


def test_extreme_draws_reach_both_ends(images: np.ndarray) -> None:
    recipe = Recipe("shift", (10, 12, 3))
    lowest = recipe.training_images(images[:1], np.zeros((1, 2)))[0]
    highest = recipe.training_images(images[:1], np.full((1, 2), 1 - 2**-53))[0]
    assert np.array_equal(lowest[1:, 1:], images[0, :-1, :-1]) and not lowest[0].any()
    assert np.array_equal(highest[:-1, :-1], images[0, 1:, 1:])


@pytest.mark.parametrize("augment", NUM_DRAWS)
def test_an_image_does_not_depend_on_its_batch(
    augment: str, images: np.ndarray
) -> None:
    recipe = Recipe(augment, (8, 8, 3))
    stored = [recipe.stored(image) for image in images[:5]]
    draws = uniforms(0, np.arange(5), recipe.num_draws)
    batch = recipe.training_images(stored, draws)
    alone = [
        recipe.training_images(stored[k : k + 1], draws[k : k + 1]) for k in (3, 0)
    ]
    assert batch.shape == (5, 8, 8, 3) and batch.dtype == np.uint8
    assert np.array_equal(batch[[3, 0]], np.concatenate(alone))


def test_training_leaves_the_stored_images_alone(images: np.ndarray) -> None:
    before = images.copy()
    for augment, num_draws in NUM_DRAWS.items():
        recipe = Recipe(augment, (10, 12, 3))
        recipe.training_images(images, uniforms(0, np.arange(64), num_draws))
        assert np.array_equal(images, before), f"{augment} wrote to its input"


def test_random_crop_covers_the_stated_areas_and_aspects() -> None:
    # Pixels that hold their own place reveal the rectangle that was cut out.
    side = 200
    ramp = np.linspace(0, 255, side).astype(np.uint8)
    image = np.zeros((side, side, 3), np.uint8)
    image[..., 0], image[..., 1] = ramp[:, None], ramp[None, :]
    recipe = Recipe("random_resized_crop", (32, 32, 3))
    draws = uniforms(0, np.arange(400), recipe.num_draws)
    crops = recipe.training_images([image] * 400, draws).astype(float)
    heights = (crops[:, -1, 0, 0] - crops[:, 0, 0, 0]) / 255 * 32 / 31
    widths = (crops[:, 0, -1, 1] - crops[:, 0, 0, 1]) / 255 * 32 / 31
    share_flipped = (widths < 0).mean()
    areas, aspects = heights * abs(widths), abs(widths) / heights
    assert 0.4 < share_flipped < 0.6
    # A grey level is 0.4 % of the side, and the small crops have few of them.
    assert 0.06 < areas.min() < 0.15 and 0.85 < areas.max() < 1.02
    assert 0.7 < aspects.min() < 0.85 and 1.2 < aspects.max() < 1.42
    assert 0.45 < areas.mean() < 0.55


def test_random_crop_of_an_extreme_shape_is_the_centre() -> None:
    image = np.zeros((2, 300, 3), np.uint8)
    image[:, 148:152] = 200
    recipe = Recipe("random_resized_crop", (4, 4, 3))
    draws = np.full((1, recipe.num_draws), 1 - 2**-53)
    assert (recipe.training_images([image], draws) == 200).all()


def test_evaluation_view_is_the_centre() -> None:
    image = np.zeros((64, 128, 3), np.uint8)
    image[4:60, 36:92] = 90
    view = Recipe("random_resized_crop", (28, 28, 3)).evaluation_images([image])
    # The outermost pixels are filtered with their neighbours outside the crop.
    assert view.shape == (1, 28, 28, 3) and (view[:, 1:-1, 1:-1] == 90).all()
    assert (view > 60).all()
    whole = centre_view(image, (64, 64), 1.0)
    assert np.array_equal(whole, image[:, 32:96])


def test_stored_image_of_the_right_size_is_untouched(images: np.ndarray) -> None:
    first = images[0]
    assert Recipe("none", (10, 12, 3)).stored(first) is first
    assert Recipe("none", (5, 5, 3)).stored(images[0]).shape == (5, 5, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_resize_keeps_channels_apart(channels: int) -> None:
    image = np.zeros((6, 6, channels), np.uint8)
    image[..., -1] = 77
    resized = resize_box(image, (0, 0, 6, 6), (3, 4))
    assert resized.shape == (3, 4, channels)
    assert (resized[..., -1] == 77).all() and not resized[..., :-1].any()


@pytest.mark.parametrize(
    ("mode", "channels"), [("RGB", 3), ("L", 3), ("L", 1), ("CMYK", 3), ("RGBA", 3)]
)
def test_decoding_gives_the_wanted_channels(mode: str, channels: int) -> None:
    encoded = io.BytesIO()
    picture = Image.new("RGB", (5, 3), (255, 255, 255)).convert(mode)
    picture.save(encoded, "TIFF" if mode == "CMYK" else "PNG")
    pixels = decode_image(encoded.getvalue(), channels)
    assert pixels.shape == (3, 5, channels) and (pixels == 255).all()


def test_normalization_follows_its_formula(images: np.ndarray) -> None:
    mean, std = (0.2, 0.5, 0.7), (0.1, 0.3, 0.9)
    values = Normalization(mean, std).apply(images)
    expected = (images / 255 - np.array(mean)) / np.array(std)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    alone = Normalization(mean, std).apply(images[7:8])
    assert np.array_equal(values[7:8], alone)
