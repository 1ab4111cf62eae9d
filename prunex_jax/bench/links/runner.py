"""Runs a study: every row on every number of hosts over every link.

It owns the order of runs, what every run is told, and turning what hosts said and
interfaces counted into records. A record that is there is not measured again, so a
study that was stopped goes on. It leaves processes to `processes`, links to `hosts`.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prunex_jax.bench.links.hosts import Hosts
from prunex_jax.bench.links.processes import Processes
from prunex_jax.bench.links.records import (
    Curve,
    Measurement,
    Point,
    Record,
    Setup,
    read_records,
    write_record,
)
from prunex_jax.bench.links.tasks import (
    COMPUTATION,
    Planner,
    Task,
    kind_of_processes,
    row_settings,
    session_commands,
    session_environment,
)
from prunex_jax.bench.study import UNLIMITED, Row, Study, link_megabits

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What links are measured in, for one number of hosts.

    Attributes:
      compute_seconds: Of a step without exchanges.
      dense_bytes: What a host sends in a hierarchical dense float32 exchange.
    """

    compute_seconds: float
    dense_bytes: float


def run_study(
    study: Study,
    study_folder: Path,
    workdir: Path,
    make_hosts: Callable[[int], Hosts],
    say: Say,
) -> list[Record]:
    """Runs what is missing of a study.

    Args:
      study: What to run.
      study_folder: What `Study.config` is relative to.
      workdir: Gets `records.jsonl`, and a run folder and logs per run.
      make_hosts: From a number of hosts to them, not entered yet.
      say: Gets lines for people.
    Returns:
      All records of the study, also those of earlier calls.
    Raises:
      UserError: A row whose settings cannot work.
      ProcessFailedError: A process died or took too long.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    settings = row_settings(study, study_folder)
    records = [r for r in read_records(workdir) if r.setup.study == study.name]

    def keep(record: Record) -> None:
        records.append(record)
        write_record(workdir, record)

    for num_hosts in study.num_hosts:
        with make_hosts(num_hosts) as hosts:
            planner = Planner(study, settings, num_hosts, workdir)
            bench = Bench(study, planner, hosts, records, keep, say)
            _run_in_processes(bench, hosts, workdir)
    return records


def _run_in_processes(bench: "Bench", hosts: Hosts, workdir: Path) -> None:
    """Runs what is missing; rows one after the other share processes of their kind."""
    tasks = bench.tasks()
    for kind, group in itertools.groupby(tasks, kind_of_processes):
        session = list(group)
        runtime, per_host = kind
        folder = (
            workdir
            / "logs"
            / f"{bench.study.name}_{runtime}_{hosts.num_hosts}x{per_host}"
        )
        limit = bench.study.limit_seconds * len(session)
        commands = session_commands(hosts, runtime, per_host, session, folder)
        with Processes(
            commands, folder, session_environment(workdir), limit
        ) as processes:
            for task in session:
                bench.run(task, processes)
            processes.wait()


class Links(Protocol):
    """What joins the hosts of a study."""

    @property
    def kind(self) -> str:
        """As `records.Setup.hosts_kind`."""

    @property
    def num_hosts(self) -> int:
        """How many it joins."""

    def shape(self, megabits: float | None) -> None:
        """Limits all of them, each way; None lifts the limit."""

    def sent_bytes(self) -> tuple[int, ...] | None:
        """Bytes that every host has sent so far; None if nobody counts."""


class Meeting(Protocol):
    """All processes of a run, at their gates."""

    def meet(self, event: str) -> list[dict[str, Any]]:
        """Waits until all are at a gate; returns what each said."""

    def release(self, **orders: Any) -> None:
        """Lets all go on from the gate."""

    def peak_memory(self) -> int:
        """Largest resident set of a process so far, in bytes."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A study on one number of hosts.

    Attributes:
      study: The study.
      planner: Makes its tasks.
      links: What joins the hosts.
      records: What is known of it; grows.
      keep: Called with every new record; adds it to `records`.
      say: Gets lines for people.
    """

    study: Study
    planner: Planner
    links: Links
    records: Sequence[Record]
    keep: Callable[[Record], None]
    say: Say

    def run(self, task: Task, processes: Meeting) -> None:
        """Meets the processes that run a task, and records what they say."""
        self.say(f"{self.study.name}: {task.row.title}, {self.links.num_hosts} hosts")
        if task.spec.evaluates:
            self._train(task, processes)
        else:
            self._measure(task, processes)

    def tasks(self) -> list[Task]:
        """What is missing, in order; first what r is counted in."""
        study, planner = self.study, self.planner
        tasks = []
        if self._reference() is None:
            tasks.append(planner.steady(COMPUTATION, (UNLIMITED,)))
        for row in study.rows:
            if study.goal == "step_time":
                links = [link for link in study.links if not self._known(row, link)]
                if links:
                    tasks.append(planner.steady(row, tuple(links)))
                continue
            tasks += [
                planner.training(row, link, seed)
                for link, seed in itertools.product(study.links, study.seeds)
                if not self._known(row, link, seed)
            ]
        return tasks

    def _reference(self) -> Reference | None:
        """The computation of a step, which r is counted in; None before it is known."""
        found = self._known(COMPUTATION, UNLIMITED)
        if not isinstance(found, Measurement):
            return None
        return Reference(found.median, found.setup.dense_bytes)

    def _known(self, row: Row, link: str, seed: int | None = None) -> Record | None:
        """What was recorded of a row over a link; of a whole run, with a seed."""
        key = (self.study.name, row.name, self.links.num_hosts, link, seed)
        for record in self.records:
            at = record.setup
            own_seed = record.seed if isinstance(record, Curve) else None
            if (at.study, at.row, at.num_hosts, at.link, own_seed) == key:
                return record
        return None

    def _measure(self, task: Task, processes: Meeting) -> None:
        """Steady steps over one link after the other."""
        row, links = task.row, task.links
        self._pass_gate(processes)
        before = self._start_phase(processes, links[0])
        for number, link in enumerate(links):
            facts = processes.meet("pause")
            after = self.links.sent_bytes()
            self.links.shape(None)
            peak = processes.peak_memory()
            self._record(self._measurement(row, link, facts, before, after, peak))
            processes.release()
            processes.meet("resume")
            if number + 1 < len(links):
                before = self._start_phase(processes, links[number + 1])
        processes.release()
        processes.meet("done")
        processes.release()

    def _train(self, task: Task, processes: Meeting) -> None:
        """A whole run over one link, and its accuracy on the way."""
        (link,), boundaries = task.links, task.spec.boundaries
        points: list[Point] = []
        seconds = sent = 0.0
        before = None
        for number, step in enumerate(boundaries):
            facts = processes.meet("pause")
            if number:
                seconds += sum(_slowest(facts))
                sent += self._sent(facts, before)
            self.links.shape(None)
            processes.release()
            accuracy = processes.meet("resume")[0]["accuracy"]
            points.append(
                Point(step=step, seconds=seconds, host_bytes=sent, accuracy=accuracy)
            )
            if step < boundaries[-1]:
                before = self._start_phase(processes, link)
        processes.release()
        processes.meet("done")
        processes.release()
        summary = Path(task.spec.workdir) / "summary.json"
        self._record(
            Curve(
                setup=self._setup(task.row, link),
                points=tuple(points),
                seed=task.spec.config["seed"],
                summary=json.loads(summary.read_text()) if summary.exists() else {},
            )
        )

    def _pass_gate(self, processes: Meeting) -> None:
        """The gate after the warm-up: nothing is counted."""
        processes.meet("pause")
        processes.release()
        processes.meet("resume")

    def _start_phase(self, processes: Meeting, link: str) -> tuple[int, ...] | None:
        """Sets the speed of the links and lets all go on; returns the counters."""
        self.links.shape(self._megabits(link))
        before = self.links.sent_bytes()
        processes.release()
        return before

    def _megabits(self, link: str) -> float | None:
        reference = self._reference()
        if reference is None:
            return None
        return link_megabits(link, reference.compute_seconds, reference.dense_bytes)

    def _sent(
        self, facts: Sequence[Mapping[str, Any]], before: tuple[int, ...] | None
    ) -> float:
        """Bytes sent by a host since, counted if they can be."""
        after = self.links.sent_bytes()
        if before is None or after is None:
            return float(facts[0]["traced_bytes"] or 0.0)
        return sum(_differences(before, after)) / len(after)

    def _measurement(
        self,
        row: Row,
        link: str,
        facts: Sequence[Mapping[str, Any]],
        before: tuple[int, ...] | None,
        after: tuple[int, ...] | None,
        peak_memory: int,
    ) -> Measurement:
        seconds = _slowest(facts)
        steps = len(seconds)
        rounds = [
            sum(seconds[start : start + row.period]) / row.period
            for start in range(row.period, steps, row.period)
        ]
        counted = None
        if before is not None and after is not None:
            counted = sum(_differences(before, after)) / len(after) / steps
        said = facts[0]
        own = None
        if row is COMPUTATION:
            own = Reference(statistics.median(rounds), said["dense_bytes"])
        return Measurement(
            setup=self._setup(row, link, own),
            seconds=tuple(rounds),
            interface_bytes=counted,
            traced_bytes=_per_step(said["traced_bytes"], steps),
            formula_bytes=_per_step(said["formula_bytes"], steps),
            hops=(said["hops"] or 0.0) / steps,
            peak_memory=peak_memory,
        )

    def _setup(self, row: Row, link: str, own: Reference | None = None) -> Setup:
        reference = own or self._reference()
        assert reference is not None, "the computation is measured first"
        return Setup(
            study=self.study.name,
            row=row.name,
            title=row.title,
            runtime=row.runtime,
            num_hosts=self.links.num_hosts,
            devices_per_host=self.study.devices_per_host,
            hosts_kind=self.links.kind,
            link=link,
            megabits=self._megabits(link),
            compute_seconds=reference.compute_seconds,
            dense_bytes=reference.dense_bytes,
            stand_in_seconds=self.study.stand_in_seconds / self.links.num_hosts,
        )

    def _record(self, record: Record) -> None:
        self.keep(record)
        self.say("  " + _line(record))


def _slowest(facts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of every step, on the host that took longest."""
    return [max(each) for each in zip(*(f["seconds"] for f in facts), strict=True)]


def _differences(before: Sequence[int], after: Sequence[int]) -> Iterator[int]:
    return (new - old for old, new in zip(before, after, strict=True))


def _per_step(total: float | None, steps: int) -> float | None:
    return None if total is None else total / steps


def _line(record: Record) -> str:
    setup = record.setup
    speed = "" if setup.megabits is None else f" ({setup.megabits:.4g} Mbit/s)"
    if isinstance(record, Curve):
        last = record.points[-1]
        return (
            f"{setup.link}{speed}: validation accuracy {last.accuracy:.3f} after "
            f"{last.seconds:.1f} s and {last.host_bytes / 1e6:.1f} MB per host"
        )
    counted = record.interface_bytes
    sent = "not counted" if counted is None else f"{counted:,.0f} bytes"
    traced = record.traced_bytes
    expected = "" if traced is None else f", traced {traced:,.0f}"
    return (
        f"{setup.link}{speed}: {1000 * record.median:.1f} ms per step, {sent} per host"
        f"{expected}"
    )
