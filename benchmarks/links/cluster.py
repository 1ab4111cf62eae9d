"""Studies on a cluster: the processes that its launcher has started measure themselves.

Every process runs every row, one after the other, and meets the others at gates by
exchanging what each has to say. The same runner as on one machine turns that into
records, in a thread beside the training, on every process; the first one keeps them.
Real links are used unchanged, and what a machine sends is counted with everything else
that it sends.
"""

import dataclasses
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.links.host import run_spec
from benchmarks.links.kernel import peak_memory
from benchmarks.links.links import ClusterLinks
from benchmarks.links.records import Record, forget_study, write_record
from benchmarks.links.runner import Bench
from benchmarks.links.tasks import Planner, row_settings
from benchmarks.study import UNLIMITED, LinkStudy
from prunex_jax.base.errors import UserError
from prunex_jax.mesh import gather_texts
from prunex_jax.processes import LaunchFlags
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.joining import join_processes


def run_on_cluster(
    study: LinkStudy,
    workdir: Path,
    launch: LaunchFlags,
    say: Callable[[str], None],
) -> bool:
    """Runs a study on the processes of a launcher; each of them calls it.

    Returns:
      Whether this process is the one that keeps the records.
    Raises:
      UserError: A row whose settings cannot work.
    """
    rows = tuple(row for row in study.rows if row.runtime == "jax")
    if not rows:
        raise UserError(f"study {study.name!r} has no row that runs on a cluster")
    settings = row_settings(study, is_simulated=False)
    config = resolve_config(settings[rows[0].name])
    started, topology = join_processes(config, launch)
    study = dataclasses.replace(
        study,
        rows=rows,
        num_hosts=(topology.num_hosts,),
        devices_per_host=topology.devices_per_host,
        links=(UNLIMITED,),
        held_out=(),
    )
    records: list[Record] = []
    if topology.is_primary:
        forget_study(workdir, study.name)

    def keep(record: Record) -> None:
        records.append(record)
        if topology.is_primary:
            write_record(workdir, record)

    planner = Planner(study, settings, topology.num_hosts, workdir)
    quiet = say if topology.is_primary else lambda text: None
    quiet(f"start     {started.described}")
    links = ClusterLinks(topology.num_hosts)
    _run_beside(Bench(planner, links, records, keep, quiet), launch)
    return topology.is_primary


def _run_beside(bench: Bench, launch: LaunchFlags) -> None:
    """Trains in this thread, which signals reach, and records in another."""
    tasks, meeting = bench.tasks(), OwnMeeting()
    problems: list[BaseException] = []

    def record() -> None:
        try:
            for task in tasks:
                bench.run(task, meeting)
        except BaseException as problem:
            problems.append(problem)
            meeting.give_up()

    recorder = threading.Thread(target=record, daemon=True)
    recorder.start()
    try:
        for task in tasks:
            run_spec(task.spec, meeting, launch)
    except EOFError:
        recorder.join()
        raise problems[0] from None
    recorder.join()


class OwnMeeting:
    """Both ends of a gate in one process: training arrives, the runner meets.

    What the processes say goes around among them while they are at the gate.
    """

    def __init__(self) -> None:
        self._arrived: queue.Queue[list[dict[str, Any]]] = queue.Queue()
        self._may_go_on: queue.Queue[bool] = queue.Queue()

    def arrive(self, **facts: Any) -> None:
        """As `gates.Gate.arrive`.

        Raises:
          EOFError: The runner has given up.
        Collectives:
          Gathers of what every process says, outside of what is measured.
        """
        texts = gather_texts(json.dumps(facts))
        self._arrived.put([dict(json.loads(text)) for text in texts])
        if not self._may_go_on.get():
            raise EOFError("the runner is gone")

    def meet(self, event: str) -> list[dict[str, Any]]:
        """As `processes.Processes.meet`."""
        facts = self._arrived.get()
        assert all(said["event"] == event for said in facts), (event, facts)
        return facts

    def release(self) -> None:
        """As `processes.Processes.release`."""
        self._may_go_on.put(True)

    def give_up(self) -> None:
        """Ends the training at its next gate."""
        self._may_go_on.put(False)

    def peak_memory(self) -> int:
        """As `processes.Processes.peak_memory`, of this process."""
        return peak_memory()
