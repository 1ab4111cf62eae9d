"""What the runs of a sweep have found, read from their folders.

A run that has not ended yet is left out, so a report can be made at any time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from prunex_jax.compare.sweep.figure import Point
from prunex_jax.compare.sweep.runs import DIVERGED, Run
from prunex_jax.compare.sweep.study import Row, Sweep
from prunex_jax.train.records.folder import ENVIRONMENT, SUMMARY, RunFolder


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
    num_missing: int = 0  # Runs that have not ended.

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

    def shares(self, name: str, key: str, of: str) -> list[float]:
        """A number of the summaries of a row, as a share of one of the reference.

        Empty where a run does not say it, or an earlier version wrote its summary.
        """
        reference = self.reference
        whole = reference.summary.get(of) if reference else None
        found = [each.summary.get(key) for each in self.results[name] if each.summary]
        if not whole or None in found:
            return []
        return [value / whole for value in found]


def read_findings(sweep: Sweep, runs: Sequence[Run]) -> Findings:
    """Reads what has ended."""
    results: dict[str, list[Result]] = {row.name: [] for row in sweep.rows}
    for run in runs:
        if run.is_done:
            results[run.row.name].append(_read(run, sweep.metric))
    num_missing = sum(not run.is_done for run in runs)
    known = {name: found for name, found in results.items() if found}
    return Findings(sweep, known, num_missing)


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
