"""Folders of tiny image files, each class of a colour of its own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")
SUFFIXES = ("png", "jpg", "webp", "bmp", "gif")


def write_images(
    folder: Path,
    count: int = 10,
    classes: Sequence[str] = CLASSES,
    sizes: Sequence[tuple[int, int]] = ((8, 8),),
) -> Path:
    """Writes `count` images of every class below a folder, in several formats."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            height, width = sizes[number % len(sizes)]
            pixels = rng.integers(20, 60, (height, width, 3))
            pixels[..., label % 3] += 180
            file = folder / name / f"{number}.{SUFFIXES[number % len(SUFFIXES)]}"
            Image.fromarray(pixels.astype(np.uint8)).save(file)
    return folder


def break_file(file: Path) -> Path:
    """Cuts an image file off behind its header."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])
    return file
