"""Runs of a sweep: where they lie, which are missing, and starting those.

A run is a process of its own, `python -m prunex_jax.train`, in a folder of its own, so
that one that fails takes no other with it, and all the sweep knows is what the folders
say. A run that was stopped goes on; one that has ended is not run again; one that
diverged is a result, and is kept as one.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.command import EXIT_DIVERGED
from prunex_jax.base.errors import UserError
from prunex_jax.base.signals import handling
from prunex_jax.bench.sweep.sweeps import (
    Row,
    Sweep,
    config_of,
    overrides_of,
    settings_of,
)
from prunex_jax.train.config import config_to_dict, dotted_keys, fixed_differences
from prunex_jax.train.folder import CONFIG, SUMMARY
from prunex_jax.train.program import keeping_programs

LOG = "log.txt"
# What a run that diverged leaves beside its folder's other files.
DIVERGED = "diverged.json"
_LAST_LINES = 12

# Runs a command, appends its output to a file, and returns its exit code.
Start = Callable[[Sequence[str], Path], int]


@dataclasses.dataclass(frozen=True)
class Run:
    """One row with one seed.

    Attributes:
      row: The row.
      seed: The seed.
      workdir: Run folder.
      command: What trains it.
      programs: Where the runs of a sweep keep what they compile: those of a row differ
        by their seed only.
    """

    row: Row
    seed: int
    workdir: Path
    command: tuple[str, ...]
    programs: Path

    @property
    def is_done(self) -> bool:
        """Whether it needs no more work: it has ended, or diverged."""
        return any((self.workdir / name).exists() for name in (SUMMARY, DIVERGED))


def runs_of(
    sweep: Sweep, folder: Path, workdir: Path, extra: Sequence[str] = ()
) -> list[Run]:
    """Lists all runs: every row with the first seed, then with the next.

    Args:
      sweep: The sweep.
      folder: That of its file.
      workdir: Where run folders are.
      extra: Further `--config.KEY=VALUE`, for all rows.
    Raises:
      UserError: Settings that do not exist or cannot run, of any row; or a folder that
        holds a run with other settings.
    """
    runs = []
    for seed in sweep.seeds:
        for row in sweep.rows:
            place = workdir / sweep.name / row.name / f"seed-{seed}"
            config = settings_of(sweep, folder, row, seed, extra)
            _check_settings(place, config_to_dict(config))
            command = [sys.executable, "-m", "prunex_jax.train"]
            command += [f"--config={config_of(sweep, folder, row)}"]
            command += [f"--workdir={place}"]
            command += [*overrides_of(sweep, row, seed), *extra]
            runs.append(Run(row, seed, place, tuple(command), workdir / "compiled"))
    return runs


def run_missing(
    runs: Sequence[Run], say: Callable[[str], None], start: Start | None = None
) -> list[Run]:
    """Starts all runs that are not done, one after the other.

    Args:
      runs: From `runs_of`.
      say: Where lines for people go.
      start: Runs a command; a process of its own without.
    Returns:
      Those that were stopped, or failed otherwise than by diverging; the end of their
      logs was said.
    """
    failed = []
    for number, run in enumerate(runs, start=1):
        name = f"{number}/{len(runs)} {run.row.name}, seed {run.seed}"
        if run.is_done:
            say(f"{name}: {_outcome(run)}, from before")
            continue
        say(f"{name}: {run.workdir}")
        run.workdir.parent.mkdir(parents=True, exist_ok=True)
        log = run.workdir.with_suffix(f".{LOG}")
        begin = start or functools.partial(_start, programs=run.programs)
        code = begin(run.command, log)
        if code == EXIT_DIVERGED:
            _keep_divergence(run, log)
        if run.is_done:
            say(f"{name}: {_outcome(run)}")
        else:
            failed.append(run)
            said = "\n  ".join(_last_lines(log)[-_LAST_LINES:])
            # A run that somebody stops saves, and ends well.
            what = f"failed with exit code {code}" if code else "was stopped"
            say(f"{name}: {what}\n  {said}")
    return failed


def forget(runs: Sequence[Run]) -> None:
    """Lets runs that diverged run again; what they have logged is kept until then."""
    for run in runs:
        (run.workdir / DIVERGED).unlink(missing_ok=True)


def _start(command: Sequence[str], log: Path, programs: Path) -> int:
    environ = {**keeping_programs(programs), **os.environ}
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environ
        ) as process,
        _stopping_with_us(process),
    ):
        return process.wait()


@contextlib.contextmanager
def _stopping_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hands Ctrl-C and SIGTERM to a run, which saves and ends; then this process ends.

    A run that went on alone would be in the way of the same sweep, started again.
    """
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        del frame
        heard.append(number)
        process.terminate()

    with handling((signal.SIGINT, signal.SIGTERM), hear):
        yield
    if heard:
        signal.raise_signal(heard[0])


def _keep_divergence(run: Run, log: Path) -> None:
    """Writes down why a run ended: its last line says it."""
    lines = _last_lines(log)
    reason = lines[-1].removeprefix("error: ") if lines else ""
    content = {"reason": reason}
    run.workdir.mkdir(exist_ok=True)
    (run.workdir / DIVERGED).write_text(json.dumps(content, indent=2) + "\n")


def _last_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def _outcome(run: Run) -> str:
    path = run.workdir / SUMMARY
    if not path.exists():
        return "diverged"
    summary = json.loads(path.read_text())
    split = "validation" if summary["test_accuracy"] is None else "test"
    accuracy, ratio = summary[f"{split}_accuracy"], summary["host_wire_ratio"]
    return f"{split} accuracy {accuracy:.4f} with {ratio:.4f} of dense bytes"


def _check_settings(workdir: Path, config: dict[str, Any]) -> None:
    """Refuses to take the run of other settings for this one."""
    path = workdir / CONFIG
    if not path.exists():
        return
    held, wanted = dotted_keys(json.loads(path.read_text())), dotted_keys(config)
    for key, was, is_now in fixed_differences(held, wanted):
        raise UserError(
            f"{workdir} holds a run with {key}={was!r}, and the sweep asks for "
            f"{is_now!r}; choose another --workdir, or remove it"
        )
