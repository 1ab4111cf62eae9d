"""Decodes, crops and resizes one image with Pillow.

Every image that needs it goes through here, so that pixels do not depend on which other
image libraries happen to be installed.
"""

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
# One array where all images have one size and lie in memory, else one array each.
Images = Pixels | Sequence[Pixels]


def decode_image(encoded: bytes, num_channels: int) -> Pixels:
    """Decodes JPEG, PNG or another format that Pillow knows.

    Returns:
      uint8[height, width, num_channels].
    """
    with Image.open(io.BytesIO(encoded)) as image:
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
    Returns:
      uint8[*size, channels].
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
    side to 256, centre crop of 224, in one step.

    Args:
      image: uint8[height, width, channels].
      size: Height and width wanted.
      share: Side of the rectangle relative to the largest that fits, in (0, 1].
    Returns:
      uint8[*size, channels]; the image itself where nothing has to change.
    """
    height, width = image.shape[:2]
    if (height, width) == size and share == 1.0:
        return image
    scale = min(height / size[0], width / size[1]) * share
    box_height, box_width = scale * size[0], scale * size[1]
    top, left = (height - box_height) / 2, (width - box_width) / 2
    return resize_box(image, (left, top, left + box_width, top + box_height), size)
