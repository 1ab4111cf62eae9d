"""RandAugment: a few operations on every image, drawn from fourteen, alike in strength.

References:
  Cubuk et al., RandAugment: practical automated data augmentation with a reduced search
  space, 2020, arXiv:1909.13719. Ranges are those of its operations in AutoAugment, with
  enhancements of 1 - m and 1 + m for both signs, as is now usual.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

_Picture = Image.Image
# Numbers that one operation needs: which it is, and its sign.
DRAWS_PER_OPERATION = 2
_STRONGEST = 30
_SHEAR = 0.3
_DEGREES = 30.0
# Largest translation as a share of a side: 150 of the 331 pixels of the original.
_TRANSLATION = 150 / 331
_ENHANCEMENT = 0.9
_BITS = 4


def rand_augment(
    image: npt.NDArray[np.uint8], draws: npt.NDArray[np.float64], magnitude: float
) -> npt.NDArray[np.uint8]:
    """Does operations on an image, one after the other.

    Args:
      image: uint8[height, width, channels] with 1 or 3 channels.
      draws: float64[2 * operations] in [0, 1).
      magnitude: How strong they are, 0 .. 30.
    Returns:
      uint8 of the same shape; what moves in from outside is black.
    Example:
      >>> image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
      >>> rand_augment(image, np.array([0.0, 0.0]), 9.0).tolist() == image.tolist()
      True
    """
    channels = image.shape[-1]
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    for which, sign in draws.reshape(-1, DRAWS_PER_OPERATION).tolist():
        operation = _OPERATIONS[int(which * len(_OPERATIONS))]
        level = magnitude / _STRONGEST
        picture = operation(picture, level, -1.0 if sign < 0.5 else 1.0)
    return np.asarray(picture).reshape(image.shape)


def _affine(picture: _Picture, *matrix: float) -> _Picture:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix)


def _same(picture: _Picture, level: float, sign: float) -> _Picture:
    return picture


def _shear_x(picture: _Picture, level: float, sign: float) -> _Picture:
    slope = sign * level * _SHEAR
    return _affine(picture, 1, slope, -slope * picture.height / 2, 0, 1, 0)


def _shear_y(picture: _Picture, level: float, sign: float) -> _Picture:
    slope = sign * level * _SHEAR
    return _affine(picture, 1, 0, 0, slope, 1, -slope * picture.width / 2)


def _translate_x(picture: _Picture, level: float, sign: float) -> _Picture:
    pixels = round(sign * level * _TRANSLATION * picture.width)
    return _affine(picture, 1, 0, pixels, 0, 1, 0)


def _translate_y(picture: _Picture, level: float, sign: float) -> _Picture:
    pixels = round(sign * level * _TRANSLATION * picture.height)
    return _affine(picture, 1, 0, 0, 0, 1, pixels)


def _rotate(picture: _Picture, level: float, sign: float) -> _Picture:
    return picture.rotate(sign * level * _DEGREES)


def _enhance(
    kind: Callable[[_Picture], ImageEnhance._Enhance],
) -> Callable[[_Picture, float, float], _Picture]:
    def operation(picture: _Picture, level: float, sign: float) -> _Picture:
        return kind(picture).enhance(1 + sign * level * _ENHANCEMENT)

    return operation


def _posterize(picture: _Picture, level: float, sign: float) -> _Picture:
    return ImageOps.posterize(picture, 8 - round(level * _BITS))


def _solarize(picture: _Picture, level: float, sign: float) -> _Picture:
    # Pixels from the threshold on are inverted; at level 0 there are none.
    return ImageOps.solarize(picture, round(256 * (1 - level)))


def _autocontrast(picture: _Picture, level: float, sign: float) -> _Picture:
    return ImageOps.autocontrast(picture)


def _equalize(picture: _Picture, level: float, sign: float) -> _Picture:
    return ImageOps.equalize(picture)


_OPERATIONS: tuple[Callable[[_Picture, float, float], _Picture], ...] = (
    _same,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _rotate,
    _enhance(ImageEnhance.Brightness),
    _enhance(ImageEnhance.Color),
    _enhance(ImageEnhance.Contrast),
    _enhance(ImageEnhance.Sharpness),
    _posterize,
    _solarize,
    _autocontrast,
    _equalize,
)
