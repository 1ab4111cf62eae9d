"""Runs a drill: on one machine a supervisor per process, in threads; on a cluster every
process of its launcher is the supervisor of one."""

import shutil
import threading
import time
from collections.abc import Callable, Sequence

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import read_object, write_json
from prunex_jax.compare.drill.crew import PLAN_FILE, Crew, DrillFailedError
from prunex_jax.compare.drill.plan import Plan, Start
from prunex_jax.compare.drill.supervisor import Supervisor
from prunex_jax.compare.drill.verdicts import RESULT_FILE
from prunex_jax.compare.subprocesses import free_port

_LOOK_SECONDS = 0.1


def meeting_points(address: str, given: str | None) -> Callable[[Start], str]:
    """Where the processes of a start meet: as given, or at a port of its own."""
    lock, ports = threading.Lock(), dict[str, int]()

    def meet(start: Start) -> str:
        if given is not None:
            return given
        with lock:
            name = f"{start.plan.method} {start.name}"
            return f"{address}:{ports.setdefault(name, free_port())}"

    return meet


def run_on_machine(
    plans: Sequence[Plan], crew: Crew, say: Callable[[str], None], *, fresh: bool
) -> None:
    """Runs all that is not recorded yet, and ends all processes if it cannot go on."""
    _prepare(plans, crew, fresh)
    supervisors = [Supervisor(n, crew, say) for n in range(crew.num_processes)]
    problems: list[BaseException] = []

    def run(supervisor: Supervisor) -> None:
        try:
            supervisor.run(plans)
        except BaseException as problem:
            problems.append(problem)

    # Daemons: who waits for others that have ended is left alone at the end.
    threads = [
        threading.Thread(target=run, args=(supervisor,), daemon=True)
        for supervisor in supervisors
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not problems:
            time.sleep(_LOOK_SECONDS)
    finally:
        for supervisor in supervisors:
            supervisor.kill()
    if problems:
        raise problems[0]


def run_on_cluster(
    process: int, plans: Sequence[Plan], crew: Crew, say: Callable[[str], None]
) -> None:
    """Looks after one process of every run; the other supervisors do the same."""
    _meet(process, plans, crew)
    supervisor = Supervisor(process, crew, say)
    try:
        supervisor.run(plans)
    finally:
        supervisor.kill()


def _prepare(plans: Sequence[Plan], crew: Crew, fresh: bool) -> None:
    """Removes what an interrupted drill has left of runs that it did not finish."""
    file = crew.workdir / PLAN_FILE
    wanted, before = crew.described(plans), read_object(file)
    if fresh and before is not None:
        for method in before.get("runs", {}):
            shutil.rmtree(crew.workdir / method, ignore_errors=True)
    elif file.exists() and before != wanted:
        raise UserError(
            f"--workdir={crew.workdir} holds another drill; --fresh removes it"
        )
    if before is None and crew.workdir.is_dir():
        foreign = sorted(entry.name for entry in crew.workdir.iterdir())
        if foreign:
            raise UserError(
                f"--workdir={crew.workdir} holds {foreign[0]} and no drill; choose a "
                "new or empty folder"
            )
    crew.workdir.mkdir(parents=True, exist_ok=True)
    write_json(file, wanted)
    for plan in plans:
        for run in dict.fromkeys(start.run for start in plan.starts):
            starts = [start for start in plan.starts if start.run == run]
            if not all(map(crew.is_recorded, starts)):
                for start in starts:
                    crew.forget(start)


def _meet(process: int, plans: Sequence[Plan], crew: Crew) -> None:
    """Waits until process 0 has written the plan, and compares it with one's own."""
    file, wanted = crew.workdir / PLAN_FILE, crew.described(plans)
    is_first = process == 0
    if (crew.workdir / RESULT_FILE).exists() or (is_first and file.exists()):
        raise UserError(f"{crew.workdir} holds a drill already; name a new --workdir")
    if is_first:
        crew.workdir.mkdir(parents=True, exist_ok=True)
        write_json(file, wanted)
        return
    deadline = time.monotonic() + crew.limit_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise DrillFailedError(
                f"process 0 of the drill has not written {file}: it does not run, or "
                "the folder is not shared"
            )
        time.sleep(_LOOK_SECONDS)
    if read_object(file) != wanted:
        raise UserError(f"{file} is of a drill with other flags; give all the same")
