"""Runs a study: every row on every number of hosts over every link.

It meets the processes at their gates and turns what they say and what interfaces count
into records. A record that is there is not measured again, so a study that was stopped
goes on.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.links.links import LinkedHosts, Links
from benchmarks.links.processes import Processes
from benchmarks.links.records import (
    Curve,
    Measurement,
    Point,
    Record,
    Setup,
    read_records,
    write_record,
)
from benchmarks.links.tasks import (
    COMPUTATION,
    Planner,
    Task,
    check_scores,
    row_settings,
    session_commands,
)
from benchmarks.study import UNLIMITED, LinkRow, LinkStudy, link_megabits
from prunex_jax.compare.subprocesses import environment_of_process

Say = Callable[[str], None]


def run_study(
    study: LinkStudy,
    workdir: Path,
    make_hosts: Callable[[int], LinkedHosts],
    say: Say,
) -> list[Record]:
    """Runs what is missing of a study.

    Returns:
      All records of the study, also those of earlier calls.
    Raises:
      UserError: A row whose settings cannot work, or a goal that nothing measures.
      ProcessFailedError: A process died or took too long.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    settings = row_settings(study)
    check_scores(study, settings)
    records = [r for r in read_records(workdir) if r.setup.study == study.name]

    def keep(record: Record) -> None:
        records.append(record)
        write_record(workdir, record)

    for num_hosts in study.num_hosts:
        with make_hosts(num_hosts) as hosts:
            planner = Planner(study, settings, num_hosts, workdir)
            _run_in_processes(Bench(planner, hosts, records, keep, say), hosts)
    return records


def _run_in_processes(bench: "Bench", hosts: LinkedHosts) -> None:
    """Runs what is missing; rows one after the other share processes of their kind."""
    study, workdir = bench.planner.study, bench.planner.workdir
    # Nothing may tell jax of another launcher.
    environ = {
        key: value
        for key, value in environment_of_process().items()
        if not key.startswith("JAX_NUM_")
    }
    for kind, group in itertools.groupby(bench.tasks(), lambda task: task.kind):
        tasks, (runtime, per_host) = list(group), kind
        name = f"{study.name}_{runtime}_{hosts.num_hosts}x{per_host}"
        logs = workdir / "logs" / name
        commands = session_commands(hosts, tasks, logs)
        limit = study.limit_seconds * len(tasks)
        with Processes(commands, logs, environ, limit) as processes:
            for task in tasks:
                bench.run(task, processes)
            processes.wait()


class Meeting(Protocol):
    """All processes of a run, at their gates; see `processes.Processes`."""

    def meet(self, event: str) -> list[dict[str, Any]]:
        """Waits until all are at a gate; returns what each said."""

    def release(self) -> None:
        """Lets all go on from the gate."""

    def peak_memory(self) -> int:
        """Largest resident set of a process so far, in bytes."""


class Phase(NamedTuple):
    """What happened between two gates.

    `counted` are the bytes that interfaces saw, a mean over hosts; None where nobody
    counts. `value` is the metric of the network at the second gate, where it is scored.
    """

    step: int
    facts: Sequence[Mapping[str, Any]]
    counted: float | None
    peak_memory: int
    value: float | None

    @property
    def seconds(self) -> list[float]:
        """Of every step, on the host that took longest."""
        return [max(e) for e in zip(*(f["seconds"] for f in self.facts), strict=True)]

    def per_step(self, key: str) -> float | None:
        """Something that every process says of all steps, as a mean."""
        total = self.facts[0][key]
        return None if total is None else total / len(self.seconds)


class Reference(NamedTuple):
    """What links are measured in: computation of a step, and a dense exchange."""

    compute_seconds: float
    dense_bytes: float


@dataclasses.dataclass(frozen=True)
class Bench:
    """A study on one number of hosts."""

    planner: Planner  # Makes its tasks.
    links: Links  # What joins the hosts.
    records: Sequence[Record]  # What is known of it; grows.
    keep: Callable[[Record], None]  # Called with every new record; adds it to `records`
    say: Say  # Gets lines for people.

    def tasks(self) -> list[Task]:
        """What is missing, in order; first what r is counted in."""
        study, tasks = self.planner.study, []
        if self._reference() is None:
            tasks.append(self.planner.steady(COMPUTATION, (UNLIMITED,)))
        for row in study.rows:
            if study.figure is not None:
                tasks += [
                    self.planner.training(row, link, seed)
                    for link, seed in itertools.product(study.links, study.seeds)
                    if not self._known(row, link, seed)
                ]
            elif links := [link for link in study.links if not self._known(row, link)]:
                tasks.append(self.planner.steady(row, tuple(links)))
        return tasks

    def run(self, task: Task, processes: Meeting) -> None:
        """Meets the processes that run a task, and records what they say."""
        name = self.planner.study.name
        self.say(f"{name}: {task.row.title}, {self.links.num_hosts} hosts")
        if task.spec.metric:
            self._record(self._curve(task, processes))
            return
        for link, phase in self._phases(task, processes):
            if link is not None:  # not before the first gate, which is the warm-up
                self._record(self._measurement(task.row, link, phase))

    def _phases(
        self, task: Task, processes: Meeting
    ) -> Iterator[tuple[str | None, Phase]]:
        """Passes all gates; gives what happened before each, and over which link.

        Links are not limited while processes stop at a gate.
        """
        before = None
        links = (None, *task.links)
        for number, step in enumerate(task.spec.boundaries):
            facts = processes.meet("pause")
            after = self.links.sent_bytes()
            counted = None
            if before is not None and after is not None:
                counted = (sum(after) - sum(before)) / len(after)
            self.links.shape(None)
            peak = processes.peak_memory()
            processes.release()
            value = processes.meet("resume")[0]["value"]
            yield links[number], Phase(step, facts, counted, peak, value)
            if number < len(task.links):
                self.links.shape(self._megabits(task.links[number]))
                before = self.links.sent_bytes()
            processes.release()
        processes.meet("done")
        processes.release()

    def _curve(self, task: Task, processes: Meeting) -> Curve:
        """A whole run over one link, and its metric on the way."""
        figure, points = self.planner.study.figure, list[Point]()
        assert figure is not None, "whole runs are scored"
        seconds = sent = 0.0
        for link, phase in self._phases(task, processes):
            if link is not None:
                seconds += sum(phase.seconds)
                traced = phase.facts[0]["traced_bytes"] or 0.0
                sent += traced if phase.counted is None else phase.counted
            assert phase.value is not None, "a run is scored at every gate"
            points.append(Point(phase.step, phase.value, sent, seconds))
        summary = Path(task.spec.workdir) / "summary.json"
        return Curve(
            setup=self._setup(task.row, task.links[0]),
            points=tuple(points),
            seed=task.spec.config["seed"],
            summary=json.loads(summary.read_text()) if summary.exists() else {},
            figure=figure,
        )

    def _measurement(self, row: LinkRow, link: str, phase: Phase) -> Measurement:
        seconds = phase.seconds
        rounds = tuple(
            sum(seconds[start : start + row.period]) / row.period
            for start in range(row.period, len(seconds), row.period)
        )
        own = None
        if row is COMPUTATION:
            own = Reference(statistics.median(rounds), phase.facts[0]["dense_bytes"])
        counted = None if phase.counted is None else phase.counted / len(seconds)
        return Measurement(
            setup=self._setup(row, link, own),
            seconds=rounds,
            interface_bytes=counted,
            traced_bytes=phase.per_step("traced_bytes"),
            formula_bytes=phase.per_step("formula_bytes"),
            hops=phase.per_step("hops") or 0.0,
            peak_memory=phase.peak_memory,
        )

    def _setup(self, row: LinkRow, link: str, own: Reference | None = None) -> Setup:
        study, reference = self.planner.study, own or self._reference()
        assert reference is not None, "the computation is measured first"
        return Setup(
            study=study.name,
            row=row.name,
            title=row.title,
            runtime=row.runtime,
            num_hosts=self.links.num_hosts,
            devices_per_host=study.devices_per_host,
            hosts_kind=self.links.kind,
            link=link,
            megabits=self._megabits(link),
            **reference._asdict(),
            stand_in_seconds=study.stand_in_seconds / self.links.num_hosts,
        )

    def _megabits(self, link: str) -> float | None:
        reference = self._reference()
        return None if reference is None else link_megabits(link, *reference)

    def _reference(self) -> Reference | None:
        """None before the computation of a step is known."""
        found = self._known(COMPUTATION, UNLIMITED)
        if not isinstance(found, Measurement):
            return None
        return Reference(found.median, found.setup.dense_bytes)

    def _known(self, row: LinkRow, link: str, seed: int | None = None) -> Record | None:
        """What was recorded of a row over a link; of a whole run, with a seed."""
        figure = None if seed is None else self.planner.study.figure
        key = (row.name, self.links.num_hosts, link, seed, figure)
        for record in self.records:
            at = record.setup
            own: tuple[Any, Any] = None, None
            if isinstance(record, Curve):
                own = record.seed, record.figure
            if (at.row, at.num_hosts, at.link, *own) == key:
                return record
        return None

    def _record(self, record: Record) -> None:
        self.keep(record)
        self.say("  " + _line(record))


def _line(record: Record) -> str:
    setup = record.setup
    speed = "" if setup.megabits is None else f" ({setup.megabits:.4g} Mbit/s)"
    if isinstance(record, Curve):
        last = record.points[-1]
        return (
            f"{setup.link}{speed}: validation {record.figure.words} {last.value:.3f} "
            f"after {last.seconds:.1f} s and {last.host_bytes / 1e6:.1f} MB per host"
        )
    counted, traced = record.interface_bytes, record.traced_bytes
    sent = "not counted" if counted is None else f"{counted:,.0f} bytes"
    expected = "" if traced is None else f", traced {traced:,.0f}"
    return (
        f"{setup.link}{speed}: {1000 * record.median:.1f} ms per step, {sent} per host"
        f"{expected}"
    )
