"""Keeps the run folder: what ran, on what, what it logged and how it ended.

Other programs read these files:

    config.json        The resolved settings, keys sorted; it can be run again.
    environment.json   Versions, devices, host x device table, source revision;
                       `earlier` lists those of earlier starts where they differ;
                       `weights` says which trained weights it started from,
                       `addresses` where each of its processes was met,
                       `fingerprints` what tells its data and functions from others.
    metrics.jsonl      One JSON object per logged step, in order of `step`.
    summary.json       Written once, at the end; SUMMARY_KEYS are always there.
    checkpoints/       See `checkpoint`.

and where settings ask for it `tensorboard/`, `trackio.json` and `wandb.json` (see
`trackers`), and `profile/` (see `profiling`); `traceback-N.txt` where process N has
lost another one.

All of it is strict JSON: a number that is not finite is written as null. Files are
replaced by rename and rows appended, so a killed run can only leave a cut last row.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded, read_object, write_json, write_whole
from prunex_jax.processes import LastStart
from prunex_jax.train.build.config import dotted_keys, fixed_differences
from prunex_jax.train.build.fingerprints import first_difference
from prunex_jax.train.build.start import Weights
from prunex_jax.train.changes.regroup import saved_mesh, saved_shapes_of
from prunex_jax.train.records.checkpoint import newest_manifest
from prunex_jax.train.records.trackers import FILES_OF_TRACKERS, Trackers
from prunex_jax.train.steps.profiling import PROFILE

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
# Entries of ENVIRONMENT: the trained weights that the run has started from, where each
# of its processes was met,
WEIGHTS = "weights"
ADDRESSES = "addresses"
# and what it learns from, and by which functions.
FINGERPRINTS = "fingerprints"
_START_OVER = "choose another --workdir, or --fresh to start over"

SUMMARY_KEYS = tuple(
    "method steps seed hosts devices_per_host test_loss params_dense "
    "params_kept macs_dense macs_kept training_macs training_macs_dense "
    "channel_sparsity host_wire_bytes host_wire_bytes_dense host_wire_ratio "
    "host_payload_bytes_steady num_rounds num_compilations shrink_max_abs_error "
    "seconds_total seconds_per_step_median".split()
)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The files of one run, made by `open`.

    On processes other than the primary everything that writes does nothing, so that all
    processes run the same code.
    """

    workdir: Path
    is_primary: bool  # whether this process writes
    trackers: Trackers | None = None  # which get every row, too

    @classmethod
    def open(
        cls,
        workdir: Path | str,
        config_dict: Mapping[str, Any],
        environment_dict: Mapping[str, Any],
        *,
        is_primary: bool,
        fresh: bool = False,
        exact_topology: bool = False,
    ) -> Self:
        """Makes the folder of a run, or enters that of the same run to continue it.

        Args:
          workdir: The folder; `~` is expanded.
          config_dict: The resolved settings as nested dicts.
          environment_dict: What `environment` gives.
          is_primary: Whether this process writes; exactly one does.
          fresh: Remove the files of a run that lies in the folder, and only those.
          exact_topology: Refuse a run that was on another mesh.
        Raises:
          UserError: The folder holds another run or foreign files, or is not writable.
        """
        path = expanded(workdir).absolute()
        if not is_primary:
            return cls(path, is_primary)
        try:
            path.mkdir(parents=True, exist_ok=True)
            holds_run = _holds_run(path)
            if holds_run and fresh:
                _remove_results(path)
            config = _plain(config_dict, "config")
            environment = _plain(environment_dict, "environment")
            if holds_run and not fresh:
                held = read_json(path / ENVIRONMENT, _START_OVER)
                _check_same_run(path, config)
                _check_same_fingerprints(path, held, environment)
                if exact_topology:
                    _check_same_mesh(path, held, environment)
                environment["earlier"] = _earlier(held, environment)
            # Last the config: together they mark the folder as that of a run.
            write_json(path / ENVIRONMENT, environment, sort_keys=True)
            write_json(path / CONFIG, config, sort_keys=True)
        except OSError as error:
            raise UserError(
                f"--workdir={workdir} cannot be used ({error}); choose a folder that "
                "can be written"
            ) from error
        folder = cls(path, is_primary)
        folder.truncate_after(sys.maxsize)
        return folder

    @property
    def checkpoint_dir(self) -> Path:
        """Where the checkpoints lie."""
        return self.workdir / CHECKPOINTS

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one object to the metrics; on disk when this returns.

        Args:
          row: `step` and whatever else; numbers may be scalars of numpy or jax.
        Raises:
          UserError: It cannot be written, or the folder is not there any more.
          ValueError: The row has no integer `step`.
          TypeError: A value is not JSON-able.
        """
        if not self.is_primary:
            return
        plain = _plain(row, "row")
        if type(plain.get("step")) is not int:
            raise ValueError(f"a row needs an integer step, got {plain.get('step')!r}")
        with (
            self._writing(),
            open(self.workdir / METRICS, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(plain) + "\n")
        if self.trackers is not None:
            self.trackers.show(plain)

    def read_rows(self) -> list[dict[str, Any]]:
        """Reads the metrics, without a last row that was cut.

        Raises:
          UserError: A line other than the last is no JSON object.
        """
        return [row for _, row in self._lines()]

    def truncate_after(self, step: int) -> None:
        """Drops rows of larger steps, and a last row that was cut.

        A run that continues from a checkpoint logs the steps after it again.
        """
        path = self.workdir / METRICS
        if not self.is_primary or not path.exists():
            return
        lines = self._lines()
        if self.trackers is not None and lines:
            self.trackers.go_on_after(step, max(row["step"] for _, row in lines))
        kept = "".join(f"{line}\n" for line, row in lines if row["step"] <= step)
        if kept != _text_of(path):
            write_whole(path, kept)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes how the run ended.

        Raises:
          UserError: It cannot be written, or the folder is not there any more.
          ValueError: Some of SUMMARY_KEYS are missing.
        """
        missing = [key for key in SUMMARY_KEYS if key not in summary]
        if missing:
            raise ValueError(f"the summary lacks {', '.join(missing)}")
        if self.is_primary:
            with self._writing():
                write_json(self.workdir / SUMMARY, _plain(summary, "summary"))

    def read_summary(self) -> dict[str, Any] | None:
        """How the run ended, on the primary process; None if it has not."""
        path = self.workdir / SUMMARY
        held = read_object(path) if self.is_primary and path.is_file() else None
        return held if held is not None and held.keys() >= {*SUMMARY_KEYS} else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what to do where the folder cannot be written.

        Where it was moved away, a save in flight may have made another of its name.
        """
        try:
            if not (self.workdir / CONFIG).is_file():
                raise FileNotFoundError(errno.ENOENT, f"{CONFIG} is gone")
            yield
        except OSError as error:
            raise UserError(
                f"cannot write to the run folder {self.workdir} ({error.strerror}); "
                "free space or put it back, then run the same command again"
            ) from error

    def _lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Complete lines of the metrics with what they say."""
        path = self.workdir / METRICS
        lines = _text_of(path).split("\n") if path.exists() else []
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                row["step"] + 0
                rows.append((line, row))
            except (ValueError, TypeError, KeyError, RecursionError):
                if number != len(lines):
                    raise UserError(
                        f"{path}, line {number}: {line[:40]!r} is no row of metrics; "
                        "repair or remove the line"
                    ) from None
        return rows


def held_weights(path: Path) -> Weights | None:
    """What the run in a folder, if any, has started from; without arrays."""
    try:
        return Weights.of_record(_noted(path, WEIGHTS))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def holds_run(workdir: Path | str) -> bool:
    """Whether a run has started in the folder, which may be missing."""
    return os.path.isfile(expanded(workdir) / CONFIG)


def last_start(workdir: Path | str) -> LastStart:
    """Where the processes of the run in a folder were met, if it says so."""
    path = expanded(workdir).absolute()
    held = _noted(path, ADDRESSES)
    if not isinstance(held, list) or not all(isinstance(each, str) for each in held):
        held = []
    return LastStart(str(path), tuple(held))


def _noted(path: Path, entry: str) -> Any:
    """What the environment in a folder, if any, says of something; None if nothing."""
    try:
        return (read_object(path / ENVIRONMENT) or {}).get(entry)
    except OSError:  # Which is said where the folder is opened.
        return None


def _holds_run(path: Path) -> bool:
    """Whether the folder is that of a run; if not, it has to be empty."""
    names = {entry.name for entry in path.iterdir() if entry.name[0] != "."}
    if {CONFIG, ENVIRONMENT} <= names:
        return True
    foreign = sorted(names - {ENVIRONMENT})  # Alone, of a start that was killed.
    if foreign:
        raise UserError(
            f"--workdir={path} holds {foreign[0]} and no run; choose a new or empty "
            "folder"
        )
    return False


def _remove_results(path: Path) -> None:
    """Removes the run but for config and environment, which are replaced afterwards."""
    tracebacks = [file.name for file in path.glob("traceback-*.txt")]
    named = (CHECKPOINTS, METRICS, SUMMARY, PROFILE, *FILES_OF_TRACKERS)
    for name in (*named, *tracebacks):
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def _check_same_run(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses to continue a run with other settings."""
    before = dotted_keys(read_json(path / CONFIG, _START_OVER))
    now = dotted_keys(config)
    for key, was, is_now in fixed_differences(before, now):
        raise UserError(
            f"--workdir={path} holds a run with {key}={was!r}, this one has "
            f"{is_now!r}; {_START_OVER}"
        )


def _check_same_fingerprints(
    path: Path, held: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Refuses to continue a run on other data, or with another network or loss."""
    before = held.get(FINGERPRINTS)
    # Of a version that did not record them; or of a start that has trained nothing.
    is_new = not any((path / CHECKPOINTS).glob("*/manifest.json"))
    if not isinstance(before, Mapping) or is_new:
        return
    different = first_difference(before, environment.get(FINGERPRINTS, {}))
    if different is not None:
        what, was, is_now = different
        raise UserError(
            f"--workdir={path} holds a run in which {what} was {was!r}, and is "
            f"{is_now!r} now; give it what it had, choose another --workdir, or "
            "--fresh (fresh=True) to start over"
        )


def _check_same_mesh(
    path: Path, held: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Refuses to continue a run on another mesh than its newest checkpoint is of."""
    before, now = (tree.get("topology") or {} for tree in (held, environment))
    # The start that the environment is of may have saved nothing.
    leaves = newest_manifest(path / CHECKPOINTS).get("leaves", {})
    saved, keys = saved_mesh(saved_shapes_of(leaves)), ("num_hosts", "devices_per_host")
    if saved is not None:
        before = dict(zip(keys, saved, strict=True))
    for key in keys:
        if before.get(key) != now.get(key):
            raise UserError(
                f"--workdir={path} holds a run with topology.{key}={before.get(key)!r},"
                f" this one has {now.get(key)!r}; leave out --exact_topology to go on "
                "with it, or choose another --workdir"
            )


def _earlier(
    held: dict[str, Any], environment: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Environments of earlier starts, each that differs from the one after it."""
    earlier = held.pop("earlier", [])
    earlier = earlier if isinstance(earlier, list) else []
    same = all(held.get(k) == v for k, v in environment.items() if k != "command")
    return earlier if same else [*earlier, held]


def _plain(value: Any, where: str) -> Any:
    """What JSON can hold; null for numbers that are not finite."""
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray | jax.Array) and value.ndim == 0
    ):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(x, f"{where}.{key}") for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x, f"{where}[{index}]") for index, x in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{where} is {type(value).__name__}, which JSON cannot hold")


def _text_of(path: Path) -> str:
    """The text of a file; what is none reads as marks that no row has."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); remove it, or choose another "
            "--workdir"
        ) from error


def read_json(path: Path, remedy: str = "give the --workdir of a run") -> Any:
    """A JSON object of a run folder.

    Raises:
      UserError: It is missing, or cannot be read.
    """
    problem = "is missing" if not path.exists() else "is no JSON object"
    try:
        content = read_object(path)
    except OSError as error:
        content, problem = None, f"cannot be read ({error.strerror})"
    if content is None:
        raise UserError(f"{path} {problem}; {remedy}")
    return content
