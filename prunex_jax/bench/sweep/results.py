"""What the runs of a sweep have found, read from their folders.

It owns reading; `tables` and `plots` show it. A run that has not ended yet is left out,
so a report can be made at any time.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from prunex_jax.bench.sweep.runs import DIVERGED, Run
from prunex_jax.bench.sweep.sweeps import Row, Sweep
from prunex_jax.train.folder import ENVIRONMENT, SUMMARY, RunFolder


@dataclasses.dataclass(frozen=True)
class Point:
    """Validation during a run.

    Attributes:
      step: Steps done.
      accuracy: On the validation split.
      host_bytes: What a host has sent over the host axis by then.
      seconds: Spent in steps by then.
    """

    step: int
    accuracy: float
    host_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One run that has ended.

    Attributes:
      row: Its row.
      seed: Its seed.
      summary: Content of its summary; empty if it diverged.
      points: Validation on the way.
      health: Logged rows, those of training.
      reason: Why it diverged; empty if it did not.
      environment: What it ran on.
    """

    row: Row
    seed: int
    summary: Mapping[str, Any]
    points: tuple[Point, ...] = ()
    health: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Findings:
    """A sweep and what is known of it.

    Attributes:
      sweep: The sweep.
      results: Row name -> its runs that have ended, by seed; rows without any are
        absent.
      num_missing: Runs that have not ended.
    """

    sweep: Sweep
    results: Mapping[str, Sequence[Result]]
    num_missing: int = 0

    @property
    def reference(self) -> Result | None:
        """The run whose size and dense bytes are 1: the first of the first baseline.

        Without one, or until it has ended, one of the largest network there is.
        """
        ended = [
            each
            for results in self.results.values()
            for each in results
            if each.summary
        ]
        for each in ended:
            if each.row.name in self.sweep.baselines[:1]:
                return each
        return max(ended, key=lambda each: each.summary["params_dense"], default=None)

    def accuracies(self, name: str) -> list[float]:
        """Accuracy of the runs of a row that did not diverge, on the sweep's split."""
        key = f"{self.sweep.split}_accuracy"
        return [each.summary[key] for each in self.results[name] if each.summary]

    def shares(self, name: str, key: str, of: str) -> list[float]:
        """A number of the summaries of a row, as a share of one of the reference.

        Args:
          name: The row.
          key: Of its summaries.
          of: Of the reference's summary.
        """
        reference = self.reference
        whole = reference.summary[of] if reference else 0
        if not whole:
            return []
        ended = [each.summary for each in self.results[name] if each.summary]
        return [summary[key] / whole for summary in ended]


def read_findings(sweep: Sweep, runs: Sequence[Run]) -> Findings:
    """Reads what has ended.

    Args:
      sweep: The sweep.
      runs: From `runs.runs_of`.
    """
    results: dict[str, list[Result]] = {}
    for run in runs:
        if run.is_done:
            results.setdefault(run.row.name, []).append(_read(run))
    num_missing = sum(not run.is_done for run in runs)
    ordered = {r.name: results[r.name] for r in sweep.rows if r.name in results}
    return Findings(sweep, ordered, num_missing)


def _read(run: Run) -> Result:
    lines = RunFolder(run.workdir, is_primary=False).read_rows()
    summary, diverged = (_json(run, name) for name in (SUMMARY, DIVERGED))
    return Result(
        row=run.row,
        seed=run.seed,
        summary=summary,
        points=tuple(_point(line) for line in lines if "validation_accuracy" in line),
        health=tuple(line for line in lines if "loss" in line),
        reason="" if summary else diverged.get("reason", ""),
        environment=_json(run, ENVIRONMENT),
    )


def _point(line: Mapping[str, Any]) -> Point:
    return Point(
        line["step"],
        line["validation_accuracy"],
        line["host_wire_bytes"],
        line["seconds_in_steps"],
    )


def _json(run: Run, name: str) -> dict[str, Any]:
    path = run.workdir / name
    return json.loads(path.read_text()) if path.exists() else {}
