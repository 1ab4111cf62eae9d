"""Reads and writes files of safetensors; the package is an extra."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from prunex_jax.base.imports import need_package


class TensorFileError(ValueError):
    """A file is no safetensors, or has what numpy cannot hold; says why."""


def load_tensors(file: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a file.

    Raises:
      OSError: It cannot be read.
      TensorFileError: It is no such file.
      UserError: The package is not installed.
    """
    need_package("safetensors", "export", f"Reading {file}")
    from safetensors import SafetensorError, numpy

    try:
        return numpy.load_file(file)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise TensorFileError(text) from error
    except AttributeError as error:  # Of numpy, which has no numbers of eight bits.
        kind = str(error).rpartition(" ")[2].strip("'")
        raise TensorFileError(
            f"it has numbers of type {kind}, which are not read; convert them to "
            "float32 or bfloat16"
        ) from error


def save_tensors(arrays: Mapping[str, np.ndarray], file: Path) -> None:
    """Writes arrays to a file.

    Raises:
      OSError: It cannot be written.
      UserError: The package is not installed.
    """
    need_package("safetensors", "export", f"Writing {file}")
    from safetensors import SafetensorError, numpy

    try:
        numpy.save_file(dict(arrays), file)
    except SafetensorError as error:
        raise OSError(str(error)) from error
