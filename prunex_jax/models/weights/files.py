"""Reads safetensors, one file or a folder of parts, and refuses pickles."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import digest_of, expanded, read_object
from prunex_jax.base.tensor_files import TensorFileError, load_tensors

SETTING = "config.model.weights"
_SUFFIX = ".safetensors"
# Where the parts of a set of weights are listed, as Hugging Face splits them.
_INDEX = "model.safetensors.index.json"
# Settings of a network, beside its weights.
_CONFIG = "config.json"
_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
_KERAS = (".h5", ".hdf5", ".keras")


@dataclasses.dataclass(frozen=True, eq=False)
class Tensors:
    """What files of weights hold."""

    arrays: Mapping[str, np.ndarray]  # Name -> array.
    digests: Mapping[str, str]  # File, below the folder if there is one -> SHA-256.
    # What the config.json beside them says of the network; {} without one.
    config: Mapping[str, Any]


def read_tensors(source: str) -> Tensors:
    """Reads a file of safetensors, or a folder that holds one, or its parts.

    Args:
      source: File or folder; `~` is expanded.
    Returns:
      All tensors of all parts.
    Raises:
      UserError: There is nothing that can be read, or only a pickle.
    Example:
      >>> import tempfile
      >>> from safetensors.numpy import save_file
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_file({'a': np.ones(2)}, f'{folder}/model.safetensors')
      ...     read_tensors(folder).arrays['a'].tolist()
      [1.0, 1.0]
    """
    path = expanded(source)
    files = _parts_of(path, source) if path.is_dir() else [path]
    arrays: dict[str, np.ndarray] = {}
    digests = {}
    for file in files:
        _check_suffix(file, source)
        found = _load(file, source)
        twice = sorted(found.keys() & arrays.keys())
        if twice:
            raise UserError(
                f"{SETTING}={source!r} has {twice[0]!r} in {file.name} and in another "
                "part; give the folder as it was downloaded"
            )
        arrays |= found
        digests[file.name] = digest_of(file)
    return Tensors(arrays, digests, _config_beside(files[0]))


def _parts_of(folder: Path, source: str) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in dict.fromkeys(names)]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(
                f"{SETTING}={source!r}: {_INDEX} cannot be read ({error}); download "
                "it again"
            ) from error
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(files) == 1:
        return files
    if files:
        raise UserError(
            f"{SETTING}={source!r} holds {len(files)} files of weights and no "
            f"{_INDEX}; name one of {', '.join(file.name for file in files)}"
        )
    for file in sorted(folder.iterdir()):
        if file.suffix in (*_PICKLES, *_KERAS):
            _check_suffix(file, source)
    raise UserError(
        f"{SETTING}={source!r} is a folder without weights; give a {_SUFFIX} file, a "
        "folder made by prunex-jax export, or a run folder"
    )


def _check_suffix(file: Path, source: str) -> None:
    """Refuses what would have to be unpickled, with the way to convert it."""
    if file.suffix in _PICKLES:
        raise UserError(
            f"{SETTING}={source!r}: {file.name} is a pickle, which may run code, and "
            "is not read; convert it once: safetensors.torch.save_file(torch.load("
            f"{file.name!r}, weights_only=True), {file.stem + _SUFFIX!r})"
        )
    if file.suffix in _KERAS:
        raise UserError(
            f"{SETTING}={source!r}: {file.name} is a file of Keras, which is not read; "
            "convert it once: safetensors.numpy.save_file({name: array, ...}, "
            f"{file.stem + _SUFFIX!r})"
        )
    if file.suffix != _SUFFIX:
        raise UserError(
            f"{SETTING}={source!r} is no {_SUFFIX} file, no folder made by prunex-jax "
            "export and no run folder; give one of these"
        )


def _load(file: Path, source: str) -> dict[str, np.ndarray]:
    try:
        return load_tensors(file)
    except (OSError, TensorFileError) as error:
        what = " ".join(str(error).split())
        raise UserError(
            f"{SETTING}={source!r}: {file.name} cannot be read as safetensors "
            f"({what[:200]}); check the path, or copy the file again"
        ) from error


def _config_beside(file: Path) -> dict[str, Any]:
    try:
        return read_object(file.parent / _CONFIG) or {}
    except OSError:
        return {}
