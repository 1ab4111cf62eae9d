"""Judges what supervisors have recorded: how a run ended after every fault, and whether
it lost no more than it may and came to the same numbers. Tables say it, for people and
for programs."""

import dataclasses
import signal
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.command import EXIT_LOST
from prunex_jax.base.files import read_object, write_json, write_whole
from prunex_jax.compare.drill.crew import Crew, Record
from prunex_jax.compare.drill.plan import CHECKPOINT_STEPS, FAULTS, Blow, Plan, Start
from prunex_jax.train.records.folder import SUMMARY, RunFolder

RESULT_FILE = "drill.json"
_HEAD = ("fault", "method", "process", "step", "exit codes")
_JUDGED = ("seconds", "steps lost", "same bits", "verdict")
_KINDS = ("fault", "n", "good", "seconds", "steps lost", "same bits")
# A save that is under way is lost as well; it has ended before the next one begins.
MOST_STEPS_LOST = 2 * CHECKPOINT_STEPS


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of one fault."""

    method: str
    fault: str
    process: int
    step: int
    outcome: str  # How the processes ended.
    seconds: float | None  # From the fault until all others ended; None without it.
    steps_lost: int  # Done, and done again after the restart.
    same: bool  # Whether the run came to the numbers of an undisturbed one.
    problems: tuple[str, ...]  # What is not as it should be.
    log: str  # Of the process it was done to; the others lie beside it.


def judge(plan: Plan, crew: Crew) -> list[Verdict]:
    """Judges the faults of one run, which is recorded."""
    starts = plan.starts
    undisturbed, disturbed = starts[0], starts[1:]
    sound = _problems_of_end(undisturbed, crew)
    ended = _problems_of_end(disturbed[-1], crew)
    resumed = [_resumed(crew, start) for start in disturbed]
    # Of every start the rows that the run has kept: up to where the next one went on.
    differs = _first_difference(undisturbed, disturbed, crew)
    verdicts = []
    for number, start in enumerate(disturbed[:-1]):
        assert start.blow is not None
        is_last = number == len(disturbed) - 2
        until = plan.num_steps + 1 if is_last else resumed[number + 2]
        is_same = not sound and not ended and (differs is None or differs > until)
        verdicts.append(
            _judge_start(start, crew, resumed[number + 1], is_same, (*sound, *ended))
        )
    return verdicts


def _judge_start(
    start: Start, crew: Crew, resumed: int, is_same: bool, more: Sequence[str]
) -> Verdict:
    blow, records = start.blow, crew.records(start)
    assert blow is not None
    acted = records[blow.process].acted
    others = [r for r in records if r.process != blow.process] or records
    seconds = max(r.ended for r in others) - acted if acted else None
    lost = max(0, max(record.step for record in records) - resumed)
    problems = [*_problems_of_codes(blow, records), *_problems_of_logs(start, crew)]
    if acted is None:
        problems.append("the run ended before the fault")
    if lost > MOST_STEPS_LOST:
        problems.append(f"{lost} steps lost")
    if not is_same:
        problems += [*more] or ["other numbers than the undisturbed run"]
    return Verdict(
        start.plan.method,
        blow.fault,
        blow.process,
        blow.step,
        ", ".join(named(record.code) for record in records),
        seconds,
        lost,
        is_same,
        tuple(problems),
        str(crew.log(start, blow.process)),
    )


def named(code: int | None) -> str:
    """An exit code in words.

    Example:
      >>> named(-9), named(69), named(None)
      ('SIGKILL', '69', 'did not end')
    """
    if code is None:
        return "did not end"
    return str(code) if code >= 0 else signal.Signals(-code).name


def write_tables(
    workdir: Path, command: str, verdicts: Sequence[Verdict], skipped: Mapping[str, str]
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


def _problems_of_codes(blow: Blow, records: Sequence[Record]) -> list[str]:
    fault, problems = FAULTS[blow.fault], []
    for record in records:
        right = fault.victim if record.process == blow.process else fault.others
        if record.code not in right:
            wanted = " or ".join(map(named, right))
            found = named(record.code)
            problems.append(f"process {record.process}: {found} instead of {wanted}")
        if record.left_over:
            problems.append(f"process {record.process} left {record.left_over} behind")
    return problems


def _problems_of_logs(start: Start, crew: Crew) -> list[str]:
    """Others that have been lost say whom they miss, and where it was."""
    assert start.blow is not None
    words = [
        word.format(process=start.blow.process)
        for word in FAULTS[start.blow.fault].said
    ]
    speakers = [
        record.process
        for record in crew.records(start)
        if record.process != start.blow.process and record.code == EXIT_LOST
    ] or [0]
    return [
        f"process {process} does not say {' ... '.join(words)}"
        for process in speakers
        if not _says(crew.log(start, process), words)
    ]


def _says(log: Path, words: Sequence[str]) -> bool:
    lines = log.read_text(errors="replace").splitlines()
    return any(all(word in line for word in words) for line in lines)


def _problems_of_end(start: Start, crew: Crew) -> tuple[str, ...]:
    return tuple(
        f"{start.run} run: process {record.process} ended with {named(record.code)}"
        for record in crew.records(start)
        if record.code != 0
    )


def _resumed(crew: Crew, start: Start) -> int:
    return crew.records(start)[0].resumed


def _first_difference(one: Start, others: Sequence[Start], crew: Crew) -> int | None:
    """The first step at which one run and another one, by all its starts, differ.

    None if they end the same.
    """
    last = one.plan.num_steps
    folders = crew.run_folder(one), crew.run_folder(others[-1])
    rows = [_rows(folder) for folder in folders]
    for step in range(1, last + 1):
        if rows[0].get(step) != rows[1].get(step):
            return step
    same_state = _digests([one], crew) == _digests(others, crew)
    same_summary = _summary(folders[0]) == _summary(folders[1])
    return None if same_state and same_summary else last


def _digests(starts: Sequence[Start], crew: Crew) -> dict[int, str]:
    """Process -> digest of its state at the end of a run."""
    records = [record for start in starts for record in crew.records(start)]
    # Who goes on with a run that has ended takes no step any more.
    return {record.process: record.digest for record in records if record.digest}


def _rows(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Step -> what was logged, without times."""
    rows = RunFolder(folder, is_primary=False).read_rows()
    return {row["step"]: _untimed(row) for row in rows}


def _summary(folder: Path) -> Mapping[str, Any]:
    return _untimed(read_object(folder / SUMMARY) or {})


def _untimed(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    # Speeds are times as well. Starts compile anew, and a save more sends a few bytes.
    timed = ("second", "flops_utilisation", "num_compilations", "wire_")
    return {k: v for k, v in numbers.items() if not any(word in k for word in timed)}


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
