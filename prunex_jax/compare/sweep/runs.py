"""Runs of a sweep: where they lie, starting those that are missing, what they found.

A run is a process of its own, `python -m prunex_jax.train`, in a folder of its own, so
that one that fails takes no other with it, and all the sweep knows is what the folders
say. A run that was stopped goes on; one that has ended is not run again; one that
diverged is a result, and is kept as one. What has not ended yet is left out of a
report, so that it can be made at any time.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.command import EXIT_DIVERGED, EXIT_STOPPED
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import read_object, write_json
from prunex_jax.compare.subprocesses import following, last_lines, run_process
from prunex_jax.compare.sweep.figure import Point
from prunex_jax.compare.sweep.study import Row, Sweep, overrides_of, settings_of
from prunex_jax.train.build.config import config_to_dict, dotted_keys, fixed_differences
from prunex_jax.train.records.folder import CONFIG, ENVIRONMENT, SUMMARY, RunFolder
from prunex_jax.train.records.summary import worth_of

# What a run that diverged leaves beside its folder's other files.
DIVERGED = "diverged.json"
_LAST_LINES = 12

# Runs a command, appends its output to a file, and returns its exit code.
Start = Callable[[Sequence[str], Path], int]


@dataclasses.dataclass(frozen=True)
class Run:
    """One row with one seed."""

    row: Row  # The row.
    seed: int  # The seed.
    workdir: Path  # Run folder.
    command: tuple[str, ...]  # What trains it.

    @property
    def is_done(self) -> bool:
        """Whether it needs no more work: it has ended, or diverged."""
        return any((self.workdir / name).exists() for name in (SUMMARY, DIVERGED))

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of its folder; {} if it is not there."""
        return read_object(self.workdir / name) or {}


@dataclasses.dataclass(frozen=True)
class Result:
    """One run that has ended."""

    row: Row  # Its row.
    seed: int  # Its seed.
    summary: Mapping[str, Any]  # Content of its summary; empty if it diverged.
    points: tuple[Point, ...] = ()  # Validation on the way.
    health: tuple[Mapping[str, Any], ...] = ()  # Logged rows, those of training.
    reason: str = ""  # Why it diverged; empty if it did not.
    # What it ran on.
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Findings:
    """A sweep and what is known of it."""

    sweep: Sweep  # The sweep.
    # Row name -> its runs that have ended, by seed; rows without any are absent.
    results: Mapping[str, Sequence[Result]]
    num_missing: int = 0  # Runs that were asked for and have not ended.
    command: str = ""  # What has made them; empty if that is not known.

    @property
    def reference(self) -> Result | None:
        """The run whose size and dense bytes are 1: the first of the first baseline.

        Without one, or until it has ended, one of the largest network there is.
        """
        ended = [r for results in self.results.values() for r in results if r.summary]
        for each in ended:
            if each.row.name in self.sweep.baselines[:1]:
                return each
        return max(ended, key=lambda each: each.summary["params_dense"], default=None)

    def values(self, name: str) -> list[float]:
        """The metric of the runs of a row that did not diverge, on its split."""
        key = f"{self.sweep.split}_{self.sweep.metric}"
        return [each.summary[key] for each in self.results[name] if each.summary]

    def shares(self, name: str, key: str) -> list[float]:
        """A number of the summaries of a row, as a share of the dense one.

        That is called so in the summary of the reference: `macs_dense` for `macs_kept`.
        Empty where a run does not say it, or an earlier version wrote its summary.
        """
        reference = self.reference
        dense = f"{key.removesuffix('_kept').removesuffix('_steady')}_dense"
        whole = reference.summary.get(dense) if reference else None
        found = [each.summary.get(key) for each in self.results[name] if each.summary]
        if not whole or None in found:
            return []
        return [value / whole for value in found]


def runs_of(sweep: Sweep, workdir: Path) -> list[Run]:
    """Lists all runs: every row with the first seed, then with the next.

    A UserError names settings that cannot run, or a folder with other ones.
    """
    runs = []
    for seed in sweep.seeds:
        own = {"seed": seed, "run.read_test": sweep.split == "test"}
        for row in sweep.rows:
            place = workdir / sweep.name / row.name / f"seed-{seed}"
            command = (
                *(sys.executable, "-m", "prunex_jax.train"),
                f"--config={row.config or sweep.config}",
                f"--workdir={place}",
                *overrides_of(sweep, row, own),
            )
            run = Run(row, seed, place, command)
            config = settings_of(sweep, row, own)
            _check_settings(run, config_to_dict(config))
            runs.append(run)
    return runs


def run_missing(
    runs: Sequence[Run], say: Callable[[str], None], start: Start | None = None
) -> list[Run]:
    """Starts all runs that are not done, one after the other.

    Gives those that were stopped, or failed otherwise than by diverging; the end of
    their logs was said. `start` runs a command; without, a process of its own does.
    """
    failed = []
    for number, run in enumerate(runs, start=1):
        name = f"{number}/{len(runs)} {run.row.name}, seed {run.seed}"
        if run.is_done:
            say(f"{name}: {_outcome(run)}, from before")
            continue
        say(f"{name}: {run.workdir}")
        run.workdir.parent.mkdir(parents=True, exist_ok=True)
        log = run.workdir.with_suffix(".log.txt")
        with following(log, functools.partial(_tell, say, name)):
            code = (start or run_process)(run.command, log)
        if code == EXIT_DIVERGED:
            _keep_divergence(run, log)
        if run.is_done:
            say(f"{name}: {_outcome(run)}")
        else:
            failed.append(run)
            said = "\n  ".join(last_lines(log, _LAST_LINES))
            was_stopped = code in (0, EXIT_STOPPED)
            what = "was stopped" if was_stopped else f"failed with exit code {code}"
            say(f"{name}: {what}\n  {said}")
    return failed


def _tell(say: Callable[[str], None], name: str, line: str) -> None:
    say(f"{name}: {line}")


def forget(runs: Sequence[Run]) -> None:
    """Lets runs that diverged run again; what they have logged is kept until then."""
    for run in runs:
        (run.workdir / DIVERGED).unlink(missing_ok=True)


def read_findings(
    sweep: Sweep,
    runs: Sequence[Run],
    asked: Sequence[Run] | None = None,
    command: str = "",
) -> Findings:
    """Reads what has ended of a sweep.

    `asked` are those of its runs that somebody waits for, None for all; `command` is
    what has made them.
    """
    results: dict[str, list[Result]] = {row.name: [] for row in sweep.rows}
    for run in runs:
        if run.is_done:
            results[run.row.name].append(_read(run, sweep.metric))
    num_missing = sum(not run.is_done for run in (runs if asked is None else asked))
    known = {name: found for name, found in results.items() if found}
    return Findings(sweep, known, num_missing, command)


def _keep_divergence(run: Run, log: Path) -> None:
    """Writes down why a run ended: its last line says it."""
    reason = "".join(last_lines(log, 1)).removeprefix("error: ")
    run.workdir.mkdir(exist_ok=True)
    write_json(run.workdir / DIVERGED, {"reason": reason})


def _outcome(run: Run) -> str:
    summary = run.read(SUMMARY)
    if not summary:
        return "diverged"
    ratio = summary["host_wire_ratio"]
    return f"{worth_of(summary)} with {ratio:.4f} of dense bytes"


def _check_settings(run: Run, config: dict[str, Any]) -> None:
    """Refuses to take the run of other settings for this one."""
    held = run.read(CONFIG)
    if not held:
        return
    for key, was, is_now in fixed_differences(dotted_keys(held), dotted_keys(config)):
        raise UserError(
            f"{run.workdir} holds a run with {key}={was!r}, and the sweep asks for "
            f"{is_now!r}; choose another --workdir, or remove it"
        )


def _read(run: Run, metric: str) -> Result:
    lines = RunFolder(run.workdir, is_primary=False).read_rows()
    summary = run.read(SUMMARY)
    key = f"validation_{metric}"
    points = tuple(
        Point(
            step=line["step"],
            value=line[key],
            host_bytes=line["host_wire_bytes"],
            seconds=line["seconds_in_steps"],
        )
        for line in lines
        if key in line
    )
    return Result(
        row=run.row,
        seed=run.seed,
        summary=summary,
        points=points,
        health=tuple(line for line in lines if "loss" in line),
        reason="" if summary else run.read(DIVERGED).get("reason", ""),
        environment=run.read(ENVIRONMENT),
    )
