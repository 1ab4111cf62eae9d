"""Command line of evaluation: reads an exported network back and scores it.

    prunex-jax evaluate --model=FOLDER [--split=test|validation]
        [--data_dir=FOLDER] [--batch_size=N] [--json] [--quiet]

FOLDER was made by prunex-jax export. Its files are compared with their
checksums, and its StableHLO program, not the network's code, runs on the data set that
its manifest names, on one device. Exit code 0: scored; 2: bad input.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.data import (
    ImageDataset,
    ImageSplit,
    Normalization,
    evaluation_batches,
    open_dataset,
)
from prunex_jax.export import ExportedModel, read_model
from prunex_jax.mesh import keep_compiled
from prunex_jax.train.config import resolve_config

SPLITS = ("test", "validation")
COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("model", "", "Folder made by prunex_jax.export.", is_required=True),
        Flag("split", "test", "What it is scored on.", choices=SPLITS),
        Flag("data_dir", "", "Where the data set lies, if not where the run found it."),
        Flag("batch_size", 256, "Images at a time."),
        Flag("json", False, "Print one JSON object."),
        Flag("quiet", False, "Print accuracy and loss only."),
    ),
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How good an exported network is."""

    model: str  # Its folder.
    dataset: str  # What it was scored on.
    split: str  # test or validation.
    examples: int  # Their number.
    accuracy: float  # Share of them whose largest logit is that of their class.
    loss: float  # Mean cross entropy.
    # What the run itself measured on this split at its end; None if the export is not
    # of its end.
    accuracy_of_run: float | None
    loss_of_run: float | None  # The same.


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, evaluates and prints."""
    return run_command(COMMAND, _evaluate, arguments)


def evaluate(
    folder: str | Path,
    split: str = "test",
    *,
    data_dir: str = "",
    batch_size: int = 256,
) -> Evaluation:
    """Scores an exported network on the data set that its manifest names.

    Args:
      folder: Made by `python -m prunex_jax export`.
      split: test or validation.
      data_dir: Where the data set lies, if not where the run found it.
      batch_size: Images at a time; the last batch is filled up with what does not
        count, so that one program is compiled.
    Returns:
      Means over all examples of the split.
    Raises:
      UserError: The folder is no export or was damaged, names no data set, or the split
        is empty.
    """
    if batch_size < 1:
        raise UserError(f"--batch_size={batch_size} must be positive")
    if split not in SPLITS:
        raise UserError(f"--split={split} is not one of {', '.join(SPLITS)}")
    model = read_model(folder)
    dataset = _open_dataset(model.manifest, Path(folder), data_dir)
    part = dataset.test if split == "test" else dataset.validation
    if not len(part):
        other = next(name for name in SPLITS if name != split)
        raise UserError(
            f"--split={split} of {dataset.name} is empty: the run had none; use "
            f"--split={other}"
        )
    normalization = _normalization(model.manifest)
    assert isinstance(part, ImageSplit)
    part = dataclasses.replace(part, normalization=normalization)
    loss = correct = examples = 0.0
    with evaluation_batches(part, batch_size, np.arange(batch_size)) as batches:
        for batch in batches:
            losses, hits = _score(model, batch["image"], batch["label"])
            loss += float(np.sum(losses * batch["valid"]))
            correct += float(np.sum(hits * batch["valid"]))
            examples += float(np.sum(batch["valid"]))
    summary = model.manifest["metrics"]["summary"] or {}
    return Evaluation(
        model=str(folder),
        dataset=dataset.name,
        split=split,
        examples=round(examples),
        accuracy=correct / examples,
        loss=loss / examples,
        accuracy_of_run=summary.get(f"{split}_accuracy"),
        loss_of_run=summary.get(f"{split}_loss"),
    )


def _evaluate(values: Values, rest: list[str]) -> None:
    del rest
    keep_compiled()
    found = evaluate(
        values.model,
        values.split,
        data_dir=values.data_dir,
        batch_size=values.batch_size,
    )
    if values.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
        return
    if not values.quiet:
        sys.stdout.write(
            f"{found.model}: {found.examples} {found.split} images of {found.dataset}\n"
        )
    sys.stdout.write(f"{_line(found, is_quiet=values.quiet)}\n")


def _line(found: Evaluation, is_quiet: bool) -> str:
    line = f"{found.split} accuracy {found.accuracy:.4f}, loss {found.loss:.4f}"
    if found.accuracy_of_run is None or found.loss_of_run is None or is_quiet:
        return line
    run = f"{found.accuracy_of_run:.4f}, {found.loss_of_run:.4f}"
    return f"{line} (the run measured {run})"


def _score(
    model: ExportedModel, images: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cross entropy and correctness of every example."""
    logits = np.asarray(jax.device_get(model(images)), np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_sums = np.log(np.sum(np.exp(shifted), axis=-1))
    losses = log_sums - shifted[np.arange(len(labels)), labels]
    return losses, np.argmax(logits, axis=-1) == labels


def _open_dataset(
    manifest: Mapping[str, Any], folder: Path, data_dir: str
) -> ImageDataset:
    """The data set that the run was trained on, with its splits."""
    if "classes" not in manifest.get("dataset", {}):
        raise UserError(
            f"{folder} names no data set of labelled images, because it was exported "
            "from no run, or from one of another task; call its program with "
            "prunex_jax.export.read_model instead"
        )
    config = resolve_config(manifest["config"])
    data = config.data
    if data_dir:
        data = dataclasses.replace(data, dir=data_dir)
    dataset = open_dataset(data, config.seed)
    classes = manifest["dataset"]["classes"]
    if dataset.num_classes != classes["count"]:
        raise UserError(
            f"{dataset.name} has {dataset.num_classes} classes here and had "
            f"{classes['count']} when the network was trained; give the --data_dir of "
            "that set"
        )
    # Sets may have no names of classes.
    for was, now in zip(classes["names"] or (), dataset.class_names, strict=False):
        if was != now:
            raise UserError(
                f"{dataset.name} has class {now!r} here where it had {was!r} when the "
                "network was trained; give the --data_dir of that set"
            )
    return dataset


def _normalization(manifest: Mapping[str, Any]) -> Normalization:
    """The one that the network was trained with, whatever is measured here."""
    preprocessing = manifest["dataset"]["preprocessing"]
    return Normalization(tuple(preprocessing["mean"]), tuple(preprocessing["std"]))


if __name__ == "__main__":
    sys.exit(main())
