"""The table of a drill, for people and for programs."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from prunex_jax.base.files import write_json, write_whole
from prunex_jax.compare.drill.verdicts import Verdict

RESULT_FILE = "drill.json"
_HEAD = ("fault", "method", "process", "step", "exit codes")
_JUDGED = ("seconds", "steps lost", "same bits", "verdict")
_KINDS = ("fault", "n", "good", "seconds", "steps lost", "same bits")


def write_tables(
    workdir: Path,
    command: str,
    verdicts: Sequence[Verdict],
    skipped: Mapping[str, str],
) -> str:
    """Writes drill.json and table.md, and gives the text of the second."""
    text = f"`{command}`\n\n{by_kind(verdicts, skipped)}\n{by_fault(verdicts)}"
    rows = [dataclasses.asdict(verdict) for verdict in verdicts]
    content = {"command": command, "faults": rows, "skipped": dict(skipped)}
    write_json(workdir / RESULT_FILE, content)
    write_whole(workdir / "table.md", text)
    return text


def by_fault(verdicts: Sequence[Verdict]) -> str:
    """A row for every fault that was done."""
    rows = [
        (
            *(v.fault, v.method, str(v.process), str(v.step), v.outcome),
            "none" if v.seconds is None else f"{v.seconds:.1f}",
            *(str(v.steps_lost), "yes" if v.same else "no"),
            "; ".join(v.problems) or "good",
        )
        for v in verdicts
    ]
    return _markdown((*_HEAD, *_JUDGED), rows)


def by_kind(verdicts: Sequence[Verdict], skipped: Mapping[str, str]) -> str:
    """A row for every kind of fault: how many, their medians and the largest."""
    rows = []
    for kind in dict.fromkeys(verdict.fault for verdict in verdicts):
        rows.append(_of_kind(kind, [v for v in verdicts if v.fault == kind]))
    if verdicts:
        rows.append(_of_kind("all", verdicts))
    rows += [
        (kind, "0", f"skipped: {why}", "", "", "") for kind, why in skipped.items()
    ]
    return _markdown(_KINDS, rows)


def _of_kind(kind: str, found: Sequence[Verdict]) -> tuple[str, ...]:
    n = len(found)
    seconds = [verdict.seconds for verdict in found if verdict.seconds is not None]
    lost = [verdict.steps_lost for verdict in found]
    waited = "none"
    if seconds:
        waited = f"{statistics.median(seconds):.1f} (max {max(seconds):.1f})"
    return (
        *(kind, str(n), f"{sum(not v.problems for v in found)}/{n}"),
        waited,
        f"{statistics.median(lost):g} (max {max(lost)})",
        f"{sum(verdict.same for verdict in found)}/{n}",
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
