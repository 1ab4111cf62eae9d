"""Images: decoded and resized with Pillow, augmented, normalised.

Every image that needs it goes through here, so that pixels do not depend on which other
image libraries happen to be installed.
"""

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from prunex_jax.data.rand_augment import DRAWS_PER_OPERATION, rand_augment

Pixels = npt.NDArray[np.uint8]
# One array where all images have one size and lie in memory, else one array each.
Images = Pixels | Sequence[Pixels]
_Uniforms = npt.NDArray[np.float64]

# Name of each augmentation -> random numbers it needs per image.
NUM_DRAWS = {"none": 0, "shift": 2, "crop_flip": 3, "random_resized_crop": 23}
_SHIFT_PIXELS = 1
_CROP_PIXELS = 4
_CROP_TRIES = 10
_CROP_AREA = (0.08, 1.0)
_CROP_ASPECT = (3 / 4, 4 / 3)
# What files of images may be: Pillow knows others, some of which are programs.
_FILE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Side of the evaluation crop relative to the resized image, as in 224 of 256.
_EVALUATION_SHARE = 224 / 256


class BrokenImageError(ValueError):
    """Raised when bytes are no image, or none that can be read."""


def image_shape(file: IO[bytes], whole: bool) -> tuple[int, int, int]:
    """Reads height, width and channels of an image from its header.

    There is 1 channel of grey images, and otherwise 3. With `whole`, the image is
    decoded as well, which finds what is broken behind its header.

    Example:
      >>> file = io.BytesIO()
      >>> Image.new("L", (3, 2)).save(file, "PNG")
      >>> image_shape(file, whole=True)
      (2, 3, 1)
    """
    with _decoding(), Image.open(file, formats=_FILE_FORMATS) as image:
        (width, height), mode = image.size, image.mode
        if whole:
            # Decoded at an eighth of its size where the format can: the bytes are
            # gone through all the same.
            image.draft(None, (max(width // 8, 1), max(height // 8, 1)))
            image.load()
    if mode.startswith(("I", "F")):
        raise BrokenImageError(f"its pixels are of mode {mode}, not of 8 bits")
    return height, width, 1 if mode in ("1", "L", "LA") else 3


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except UnidentifiedImageError as error:
        raise BrokenImageError("no image of a known format") from error
    except Exception as error:  # Decoders raise nearly everything at broken bytes.
        raise BrokenImageError(str(error) or type(error).__name__) from error


def decode_image(encoded: bytes, num_channels: int) -> Pixels:
    """Decodes what Pillow knows, to uint8[height, width, num_channels]."""
    with _decoding(), Image.open(io.BytesIO(encoded)) as image:
        pixels = np.asarray(image.convert("L" if num_channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], num_channels)


def resize_box(image: Pixels, box: Sequence[float], size: tuple[int, int]) -> Pixels:
    """Resizes a rectangle of an image, with antialiasing (Pillow's bilinear filter).

    At its edges the filter sees the pixels next to the rectangle, as if the whole image
    had been resized and then cropped.

    Args:
      image: uint8[height, width, channels] with 1 or 3 channels.
      box: Left, top, right and bottom of the rectangle, in pixels.
      size: Height and width wanted.
    """
    channels = image.shape[-1]
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    left, top, right, bottom = box
    resized = picture.resize(
        (size[1], size[0]), Image.Resampling.BILINEAR, (left, top, right, bottom)
    )
    return np.asarray(resized).reshape(*size, channels)


def centre_view(image: Pixels, size: tuple[int, int], share: float) -> Pixels:
    """Resizes the largest centred rectangle of the wanted shape, scaled by a share.

    With share 0.875 and size 224 x 224 this is the usual ImageNet evaluation: shorter
    side to 256, centre crop of 224, in one step. An image where nothing has to change
    is returned as it is.
    """
    height, width = image.shape[:2]
    if (height, width) == size and share == 1.0:
        return image
    scale = min(height / size[0], width / size[1]) * share
    box_height, box_width = scale * size[0], scale * size[1]
    top, left = (height - box_height) / 2, (width - box_width) / 2
    return resize_box(image, (left, top, left + box_width, top + box_height), size)


@dataclasses.dataclass(frozen=True)
class Normalization:
    """Maps pixels 0..255 to float32 (x / 255 - mean) / std, channel by channel.

    Example:
      >>> normalization = Normalization(mean=(0.5,), std=(0.25,))
      >>> normalization.apply(np.array([[[[0], [255]]]], np.uint8)).ravel().tolist()
      [-2.0, 2.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Pixels) -> npt.NDArray[np.float32]:
        """Returns float32[batch, height, width, channels] for uint8 of that shape."""
        pixels = math.prod(images.shape[1:-1])
        std = np.asarray(self.std)
        # One scale per value of an image: numpy's inner loop is then an image long,
        # not a pixel long, which is many times faster.
        scale = np.tile((1 / (255 * std)).astype(np.float32), pixels)
        offset = np.tile((-np.asarray(self.mean) / std).astype(np.float32), pixels)
        values = images.reshape(len(images), -1).astype(np.float32)
        values *= scale
        values += offset
        return values.reshape(images.shape)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What happens to an image between the data set and the batch.

    An image is `stored` once (that is what stays in memory), and then viewed for
    training, with random numbers, or for evaluation, without.
    """

    augment: str  # none, shift, crop_flip or random_resized_crop.
    # Height, width and channels of the images in a batch.
    image_shape: tuple[int, int, int]
    # Operations of RandAugment after that, and how strong they are.
    num_operations: int = 0
    magnitude: float = 0.0

    @property
    def num_draws(self) -> int:
        """Random numbers that `training_images` needs per image."""
        return NUM_DRAWS[self.augment] + DRAWS_PER_OPERATION * self.num_operations

    @property
    def keeps_original_size(self) -> bool:
        """True where a random crop needs the whole image, not its resized view."""
        return self.augment == "random_resized_crop"

    @property
    def evaluation_share(self) -> float:
        """Side of the evaluation crop relative to the largest centred one."""
        return _EVALUATION_SHARE if self.keeps_original_size else 1.0

    def stored(self, image: Pixels) -> Pixels:
        """Returns the deterministic part of the work on one image."""
        if self.keeps_original_size:
            return image
        return centre_view(image, self.image_shape[:2], 1.0)

    def training_images(self, stored: Images, draws: _Uniforms) -> Pixels:
        """Augments a batch, to uint8[batch, *image_shape].

        Image k depends on `draws[k]` only, float64[num_draws] in [0, 1).
        """
        crop_draws, more = np.split(draws, [NUM_DRAWS[self.augment]], axis=1)
        images = self._cropped(stored, crop_draws)
        if not self.num_operations:
            return images
        pairs = zip(images, more, strict=True)
        return self._stacked([rand_augment(x, row, self.magnitude) for x, row in pairs])

    def _cropped(self, stored: Images, draws: _Uniforms) -> Pixels:
        """The images after crops and flips."""
        if self.keeps_original_size:
            size = self.image_shape[:2]
            pairs = zip(stored, draws, strict=True)
            return self._stacked([_random_crop(x, row, size) for x, row in pairs])
        images = self._stacked(stored)
        if self.augment == "shift":
            return _crop_padded(images, _SHIFT_PIXELS, draws)
        if self.augment == "crop_flip":
            return _crop_padded(images, _CROP_PIXELS, draws)
        return images

    def evaluation_images(self, stored: Images) -> Pixels:
        """Returns uint8[batch, *image_shape], the same whenever it is asked for."""
        if not self.keeps_original_size:
            return self._stacked(stored)
        size = self.image_shape[:2]
        return self._stacked([centre_view(x, size, _EVALUATION_SHARE) for x in stored])

    def _stacked(self, images: Images) -> Pixels:
        if isinstance(images, np.ndarray):
            return images
        return np.stack(images) if images else np.zeros((0, *self.image_shape), "u1")


def _crop_padded(images: Pixels, padding: int, draws: _Uniforms) -> Pixels:
    """Moves each image by up to `padding` pixels, filling with zeros, and may flip it.

    `draws` is float64[batch, 2] for vertical and horizontal; a third column flips.
    """
    size, height, width, channels = images.shape
    frame = (size, height + 2 * padding, width + 2 * padding, channels)
    padded = np.zeros(frame, np.uint8)
    padded[:, padding:-padding, padding:-padding] = images
    tops, lefts = (draws[:, :2] * (2 * padding + 1)).astype(np.int64).T.tolist()
    flips: list[bool] = np.any(draws[:, 2:] < 0.5, axis=1).tolist()
    moved = np.empty_like(images)
    # A loop of slices is twice as fast as gathering pixels with index arrays.
    for k, (top, left, flip) in enumerate(zip(tops, lefts, flips, strict=True)):
        window = padded[k, top : top + height, left : left + width]
        moved[k] = window[:, ::-1] if flip else window
    return moved


def _random_crop(image: Pixels, draws: _Uniforms, size: tuple[int, int]) -> Pixels:
    """Resizes a random rectangle of an image and flips every second one.

    The area is uniform in 8 % .. 100 % of the image and the logarithm of the aspect
    ratio uniform in 3/4 .. 4/3; the first of ten tries that fits is taken, else the
    largest centred rectangle.

    `draws` is float64[23]: ten areas, ten aspects, two places, one flip.

    References:
      Szegedy et al., Going deeper with convolutions, 2015, section 6,
      https://arxiv.org/abs/1409.4842.
    """
    height, width = image.shape[:2]
    low, high = _CROP_AREA
    areas = (low + (high - low) * draws[:_CROP_TRIES]) * height * width
    low, high = np.log(_CROP_ASPECT)
    aspects = np.exp(low + (high - low) * draws[_CROP_TRIES : 2 * _CROP_TRIES])
    widths = np.rint(np.sqrt(areas * aspects))
    heights = np.rint(np.sqrt(areas / aspects))
    inside = (0 < widths) & (widths <= width) & (0 < heights) & (heights <= height)
    down, right, flip = draws[2 * _CROP_TRIES :]
    if inside.any():
        first = int(np.argmax(inside))
        crop_height, crop_width = int(heights[first]), int(widths[first])
        top = int(down * (height - crop_height + 1))
        left = int(right * (width - crop_width + 1))
        box = (left, top, left + crop_width, top + crop_height)
        crop = resize_box(image, box, size)
    else:
        crop = centre_view(image, size, 1.0)
    return crop[:, ::-1] if flip < 0.5 else crop
