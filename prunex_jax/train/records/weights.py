"""Reads trained weights for a run to start from, whatever wrote them.

    FOLDER                    made by prunex-jax export
    RUN, RUN/checkpoints/12   a run folder: its newest checkpoint, or one of them
    FILE.safetensors, FOLDER  torchvision, timm or Hugging Face; see `models.weights`

A run reads them once: its checkpoints have what became of them, and its folder says
which files they were.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import digest_of, expanded
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.export.folder import ARRAYS, MANIFEST, read_arrays
from prunex_jax.models.weights import Tensors, read_tensors
from prunex_jax.models.weights.files import SETTING
from prunex_jax.train.build.start import OURS, Weights
from prunex_jax.train.records.checkpoint import saved_steps
from prunex_jax.train.records.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    held_weights,
)
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.steps.state import whole_tree

# What names of arrays of exported runs start with.
_PARTS = ("params/", "statistics/")


def find_weights(
    source: str, workdir: str | Path | None = None, *, fresh: bool = False
) -> Weights | None:
    """Reads what `config.model.weights` names, unless the run is past needing it.

    Args:
      source: The setting; empty for none.
      workdir: The run folder, which may hold the run already; None for no run.
      fresh: Whether the run that it holds will be removed.
    Returns:
      The weights; without arrays where the run has a checkpoint.
    Raises:
      UserError: They cannot be read, or are others than the run has started from.
    """
    if not source:
        return None
    held = None
    if workdir is not None and not fresh:
        path = expanded(workdir)
        held = held_weights(path)
        if held is not None and saved_steps(path / CHECKPOINTS):
            return held
    weights = _read(source)
    before = held if held is not None and held.source == source else weights
    if dict(before.digests) != dict(weights.digests):
        raise UserError(
            f"{SETTING}={source!r} has changed since the run in {workdir} started from "
            "it; put it back, choose another --workdir, or --fresh to start over"
        )
    return weights


def _read(source: str) -> Weights:
    path = expanded(source)
    if (path / MANIFEST).is_file() and (path / ARRAYS).is_file():
        return _of_export(path, source)
    run = path.parents[1] if path.parent.name == CHECKPOINTS else path
    if (run / CONFIG).is_file() and (run / ENVIRONMENT).is_file():
        return _of_run(run, path, source)
    tensors = read_tensors(source)
    return Weights(source, "", tensors.digests, tensors=tensors)


def _of_export(path: Path, source: str) -> Weights:
    manifest, arrays = read_arrays(path)
    if not all(name.startswith(_PARTS) for name in arrays):
        # Of a function that takes parameters only, which a user has exported.
        arrays = {f"{_PARTS[0]}{name}": array for name, array in arrays.items()}
    kept = {
        group["name"]: (group["size"], group["kept"]) for group in manifest["channels"]
    }
    return _ours(source, arrays, {ARRAYS: manifest["files"][ARRAYS]}, kept)


def _of_run(run: Path, path: Path, source: str) -> Weights:
    if jax.process_count() > 1:
        raise UserError(
            f"{SETTING}={source!r} is a run folder, which one process can read and "
            f"{jax.process_count()} cannot; export it (prunex-jax export), and give "
            "the export"
        )
    steps = saved_steps(run / CHECKPOINTS)
    wanted = (
        steps[-1:] if path == run else tuple(s for s in steps if str(s) == path.name)
    )
    if not wanted:
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{SETTING}={source!r}: no such checkpoint; there is: {there}")
    trained = load_trained(run, step=wanted[0], simulates=True)
    shrunk, masks = trained.shrunk, trained.cut.masks
    leaves = flatten_by_path(whole_tree(shrunk.params, shrunk.statistics))
    arrays = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    # It has the digests of all files of the checkpoint.
    file = f"{CHECKPOINTS}/{wanted[0]}/{MANIFEST}"
    kept = {
        name: (mask.size, np.flatnonzero(mask).tolist()) for name, mask in masks.items()
    }
    return _ours(source, arrays, {file: digest_of(run / file)}, kept)


def _ours(
    source: str,
    arrays: Mapping[str, np.ndarray],
    digests: Mapping[str, str],
    kept: Mapping[str, Any],
) -> Weights:
    shapes = {path: array.shape for path, array in arrays.items()}
    tensors = Tensors(arrays, digests, {})
    return Weights(source, OURS, digests, shapes, kept, tensors)
