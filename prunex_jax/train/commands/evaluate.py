"""Command line of evaluation: reads an exported network back and scores it.

    prunex-jax evaluate --model=FOLDER [--split=test|validation]
        [--data_dir=FOLDER] [--batch_size=N] [--json] [--quiet]
        [--data=MODULE:OBJECT] [--loss=MODULE:OBJECT] [--inputs=MODULE:OBJECT]
        [--trusted]

FOLDER was made by prunex-jax export. Its files are compared with their
checksums, and its StableHLO program, not the network's code, runs on the data set that
its manifest names, on one device: the metrics are those of its task, such as accuracy,
or bits per byte. Where these data lie is printed, unless --data_dir says it. Data and
functions that were brought to the run in Python are named as package.module:object.
Exit code 0: scored; 2: bad input.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.imports import is_named
from prunex_jax.data import (
    Dataset,
    ImageDataset,
    ImageSplit,
    Normalization,
    Split,
    TextDataset,
    evaluation_batches,
)
from prunex_jax.export import ExportedModel, read_model
from prunex_jax.models import is_own
from prunex_jax.models.settings import ModelConfig
from prunex_jax.processes import keep_compiled
from prunex_jax.tasks import LOSS, Objective, Own, Task, make_task
from prunex_jax.train.build.config import ExperimentConfig, resolve_config
from prunex_jax.train.commands.own import OWN_FLAGS, given_own
from prunex_jax.train.records.scores import measured

SPLITS = ("test", "validation")
# Settings that say what is read and how. Others are of no use here, and plugins would
# run code that an export names.
_SECTIONS = ("seed", "data", "model", "run")
# What odd content of a manifest raises.
_ODD = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("model", "", "Folder made by prunex_jax.export.", is_required=True),
        Flag("split", "test", "What it is scored on.", choices=SPLITS),
        Flag("data_dir", "", "Where the data set lies, if not where the run found it."),
        Flag("batch_size", 256, "Examples at a time.", at_least=1),
        Flag("json", False, "Print one JSON object."),
        Flag("quiet", False, "Print the metrics only."),
        Flag(
            "trusted", False, "Run a program that calls anything, whose maker you know."
        ),
        *OWN_FLAGS,
    ),
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How good an exported network is."""

    model: str  # Its folder.
    dataset: str  # What it was scored on.
    split: str  # test or validation.
    examples: int  # Their number.
    noun: str  # What an example is, such as "images".
    # Metric of the task -> mean over the split.
    measures: Mapping[str, float]
    # What the run itself measured on this split at its end; empty if the export is not
    # of its end, or the data are not the same.
    measures_of_run: Mapping[str, float]
    difference: str = ""  # In which way the data are not those of the run.
    place: str = ""  # Where the data lie, if the manifest and not the caller says it.

    def plain(self) -> dict[str, Any]:
        """One object of plain values: metrics, and beside them those of the run."""
        about = {
            key: getattr(self, key) for key in ("model", "dataset", "split", "examples")
        }
        of_run = {f"{k}_of_run": self.measures_of_run.get(k) for k in self.measures}
        return {**about, **self.measures, **of_run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, evaluates and prints."""
    return run_command(COMMAND, _evaluate, arguments)


def evaluate(
    folder: str | Path,
    split: str = "test",
    *,
    data_dir: str = "",
    batch_size: int = 256,
    own: Own | None = None,
    trusted: bool = False,
) -> Evaluation:
    """Scores an exported network on the data set that its manifest names.

    Raises:
      UserError: The folder is no export or was damaged, names no data set, or the split
        is empty.
    """
    if batch_size < 1:
        raise UserError(f"--batch_size={batch_size} must be positive")
    if split not in SPLITS:
        raise UserError(f"--split={split} is not one of {', '.join(SPLITS)}")
    model = read_model(folder, trusted=trusted)
    try:
        return _evaluated(model, str(folder), split, data_dir, batch_size, own)
    except UserError:
        raise
    except _ODD as error:
        raise UserError(
            f"{folder} cannot be evaluated: its manifest, arrays, program and data do "
            f"not fit ({one_line(error, 200)}); export it again"
        ) from error


def _evaluated(
    model: ExportedModel,
    folder: str,
    split: str,
    data_dir: str,
    batch_size: int,
    own: Own | None,
) -> Evaluation:
    config = _config_of(model.manifest, Path(folder), data_dir)
    task = _task_of(model, config, own)
    dataset, objective = task.dataset, task.objective
    part = dataset.test if split == "test" else dataset.validation
    if not len(part):
        other = next(name for name in SPLITS if name != split)
        raise UserError(
            f"--split={split} of {dataset.name} is empty: the run had none; use "
            f"--split={other}"
        )
    summary = model.manifest["metrics"]["summary"] or {}
    names = [metric.name for metric in objective.metrics]
    of_run = {name: summary.get(f"{split}_{name}") for name in names}
    difference = _difference(model.manifest["dataset"], dataset.about())
    return Evaluation(
        model=folder,
        dataset=dataset.name,
        split=split,
        examples=len(part),
        noun=_noun(dataset),
        measures=_score(model, objective, part, batch_size),
        measures_of_run={
            name: float(value)
            for name, value in of_run.items()
            if value is not None and not difference
        },
        difference=difference,
        place="" if data_dir else config.data.dir,
    )


def _evaluate(values: Values, rest: list[str]) -> None:
    del rest
    keep_compiled()
    found = evaluate(
        values.model,
        values.split,
        data_dir=values.data_dir,
        batch_size=values.batch_size,
        own=given_own(values),
        trusted=values.trusted,
    )
    if values.json:
        sys.stdout.write(json.dumps(found.plain()) + "\n")
        return
    if not values.quiet:
        number = f"{found.examples} {found.split} {found.noun}"
        place = f" in {found.place}" if found.place else ""
        sys.stdout.write(f"{found.model}: {number} of {found.dataset}{place}\n")
    sys.stdout.write(f"{_line(found, is_quiet=values.quiet)}\n")


def _line(found: Evaluation, is_quiet: bool) -> str:
    # The loss, which says the least, comes last.
    names = sorted(found.measures, key=lambda name: name == LOSS.name)
    shown = [f"{n.replace('_', ' ')} {found.measures[n]:.4f}" for n in names]
    line = f"{found.split} {', '.join(shown)}"
    if is_quiet:
        return line
    if found.difference:
        return f"{line} ({found.difference})"
    if found.measures_of_run.keys() != found.measures.keys():
        return line
    run = ", ".join(f"{found.measures_of_run[name]:.4f}" for name in names)
    return f"{line} (the run measured {run})"


def _score(
    model: ExportedModel, objective: Objective, split: Split, batch_size: int
) -> dict[str, float]:
    """Metrics over a split."""
    score = jax.jit(objective.score)
    with evaluation_batches(split, batch_size, np.arange(batch_size)) as batches:
        scores = (score(model(objective.inputs(batch)), batch) for batch in batches)
        measures = measured(objective, scores) or {}
    if not math.isfinite(measures.get(LOSS.name, math.nan)):
        raise UserError(
            f"the loss of the {split.name} split is {measures.get(LOSS.name)}: the "
            "program answers with what are no numbers, or labels have no output; "
            "export it again"
        )
    return measures


def _task_of(model: ExportedModel, config: ExperimentConfig, own: Own | None) -> Task:
    """The task of the run, on its data set with its splits."""
    settings = config.model
    if own is not None or is_named(settings.name) or is_own(settings.name):
        # The program stands for the network, of which settings have nothing to say.
        own, settings = replace(own or Own(), model=_network_of(model)), ModelConfig()
    task = make_task(config.data, settings, config.seed, own)
    if not isinstance(task.dataset, ImageDataset):
        return task
    about = model.manifest["dataset"]
    _check_classes(task.dataset, about["classes"])
    normalized = _normalized(task.dataset, about["preprocessing"])
    return replace(task, dataset=normalized)


def _network_of(model: ExportedModel) -> Any:
    """The program instead of the user's own network, whose code may be gone."""
    arrays = dict(model.arrays)
    return lambda key: {}, lambda params, inputs: model.program(arrays, inputs)


def _check_classes(dataset: ImageDataset, classes: Mapping[str, Any]) -> None:
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


def _config_of(
    manifest: Mapping[str, Any], folder: Path, data_dir: str
) -> ExperimentConfig:
    """What the run has read, and how."""
    values = manifest.get("config")
    if not values:
        raise UserError(
            f"{folder} names no data set, because it was exported from no run; call "
            "its program with prunex_jax.export.read_model instead"
        )
    config = resolve_config({key: values[key] for key in _SECTIONS})
    return replace(config, data=replace(config.data, dir=data_dir or config.data.dir))


def _difference(of_run: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In which way data are not those of the run, where they say so; or nothing."""
    then, now = of_run.get("digest"), here.get("digest")
    if then == now:
        return ""
    return f"other data than those of the run: digest {now} here, {then} then"


def _noun(dataset: Dataset) -> str:
    if isinstance(dataset, ImageDataset):
        return "images"
    return "sequences" if isinstance(dataset, TextDataset) else "examples"


def _normalized(dataset: ImageDataset, about: Mapping[str, Any]) -> ImageDataset:
    """Images as the network was trained on them, whatever is measured here."""
    normalization = Normalization(tuple(about["mean"]), tuple(about["std"]))
    values = (*normalization.mean, *normalization.std)
    if not all(map(math.isfinite, values)) or not all(x > 0 for x in normalization.std):
        raise UserError(
            f"the manifest normalizes by mean={about['mean']} and std={about['std']}, "
            "which must be finite, the latter above 0; export it again"
        )

    def normalized(split: Split) -> Split:
        assert isinstance(split, ImageSplit)
        return replace(split, normalization=normalization)

    return replace(
        dataset,
        test=normalized(dataset.test),
        validation=normalized(dataset.validation),
    )
