"""Command line of fault drills.

    prunex-jax drill --workdir=FOLDER [--processes=4] [--method=NAME,...|all]
        [--faults=NAME,...] [--random=N] [--seed=S] [--fresh]
    srun prunex-jax drill --workdir=SHARED

Trains a small network on CPU, does one fault after the other to a process of the run,
starts the run again after each with the same command, and compares it with a run that
was left alone: which exit codes, seconds until all other processes ended, steps lost,
same bits. On one machine it starts --processes by itself; under a launcher, or with
--coordinator, --num_processes and --process_id, every process of the drill has one of
its own, and FOLDER is one that all of them share, and a new one.

Every run suffers each fault once: kill, term, int, stop (signals), error (an
exception), hang, full_disk (a limit of file sizes), moved (the run folder is moved
away), link (a link is down; on one machine that can make network namespaces). With
--random=N, N faults of kill, term, int, stop and link at drawn steps and processes are
spread over all methods. table.md and drill.json in FOLDER say what came of it; a drill
of one machine that was interrupted goes on with the same command.

Exit code 0: every row is good; 1: one is not, and a line names its log; 2: bad input.
"""

import functools
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.command import (
    Command,
    Flag,
    Values,
    run_command,
    split_list,
    warn,
)
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.files import read_object, write_json
from prunex_jax.bench.drill.faults import FAULTS, LINK, RANDOM
from prunex_jax.bench.drill.plan import Plan, Start, every_fault, random_faults
from prunex_jax.bench.drill.supervisor import Crew, DrillFailedError, Supervisor
from prunex_jax.bench.drill.table import write_tables
from prunex_jax.bench.drill.verdicts import judge
from prunex_jax.bench.links.hosts import Hosts, LoopbackHosts, NamespaceHosts
from prunex_jax.bench.links.sandbox import is_in_sandbox, run_in_sandbox, sandbox_kind
from prunex_jax.bench.processes import free_port
from prunex_jax.mesh.launcher import Launch, detect_launch
from prunex_jax.methods import METHODS, check_method
from prunex_jax.train.command import LAUNCH_FLAGS, given_launch

EXIT_FAULTY = 1
_PLAN_FILE, _RESULT_FILE = "plan.json", "drill.json"
_MOST_PROCESSES = 64

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Folder for runs, logs and the table.", is_required=True),
        Flag("processes", 4, "Processes of a run on one machine."),
        Flag("method", "", "Methods, or all; hsadmm without, all with --random."),
        Flag("faults", "", "Faults to do; all that are possible without."),
        Flag("random", 0, "Number of random faults instead."),
        Flag("seed", 0, "What processes, steps and random faults are drawn from."),
        Flag("silence_seconds", 12, "When a process counts as lost."),
        Flag("limit_seconds", 400, "Until a run that does not end is killed."),
        Flag("fresh", False, "Remove the drill that the folder holds."),
        *LAUNCH_FLAGS,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and drills."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(COMMAND, functools.partial(_drill, arguments), arguments)


def _drill(arguments: Sequence[str], values: Values, rest: list[str]) -> int:
    del rest
    launch = detect_launch(os.environ, given_launch(values))
    _check(values, launch)
    try:
        if launch.is_distributed:
            return _drill_cluster(values, launch)
        return _drill_machine(arguments, values)
    except DrillFailedError as error:
        warn(f"error: {error}")
        return EXIT_FAULTY


def _check(values: Values, launch: Launch) -> None:
    """Refuses what cannot work before anything starts."""
    for name, least in (
        *(("random", 0), ("silence_seconds", 3), ("limit_seconds", 60)),
        ("processes", 2),
    ):
        if getattr(values, name) < least:
            raise UserError(
                f"--{name}={getattr(values, name)} must be at least {least}"
            )
    if values.processes > _MOST_PROCESSES:
        raise UserError(f"--processes={values.processes} must be at most 64")
    if launch.is_distributed and None in (launch.coordinator, launch.num_processes):
        raise UserError(
            f"{launch.reason}: the launcher does not tell the drill where process 0 "
            "is; give --coordinator, --num_processes and --process_id"
        )
    for name in split_list(values.faults):
        known = RANDOM if values.random else tuple(FAULTS)
        if name not in known:
            raise UserError(
                f"--faults={name} is not one of {', '.join(known)}"
                f"{suggest(name, known)}"
            )


def _methods(values: Values) -> list[str]:
    names = split_list(values.method) or ("all" if values.random else "hsadmm",)
    if "all" in names:
        return list(METHODS)
    for name in names:
        check_method(name, "--method")
    return list(names)


def _plans(values: Values, faults: Sequence[str], num_processes: int) -> list[Plan]:
    methods, seed = _methods(values), values.seed
    if values.random:
        return random_faults(methods, faults, num_processes, values.random, seed)
    return every_fault(methods, faults, num_processes, seed)


def _faults(values: Values, no_links: str) -> tuple[list[str], dict[str, str]]:
    """The faults to do, and those that are left out with the reason."""
    known = RANDOM if values.random else tuple(FAULTS)
    asked = split_list(values.faults) or known
    skipped = {LINK: no_links} if no_links and LINK in asked else {}
    return [fault for fault in asked if fault not in skipped], skipped


def _drill_machine(arguments: Sequence[str], values: Values) -> int:
    """Starts all processes of the runs here."""
    wants_links = LINK in _faults(values, "")[0]
    no_links = ""
    if wants_links and not is_in_sandbox():
        kind, reason = sandbox_kind()
        if kind is not None:
            again = [sys.executable, "-m", "prunex_jax", "drill", *arguments]
            return run_in_sandbox(again)
        no_links = reason
    faults, skipped = _faults(values, no_links)
    plans, workdir = _plans(values, faults, values.processes), _workdir(values)
    in_namespaces = LINK in faults
    make: Callable[[int], Hosts] = NamespaceHosts if in_namespaces else LoopbackHosts
    with make(values.processes) as hosts:
        crew = Crew(
            num_processes=values.processes,
            workdir=workdir,
            hosts=hosts,
            host_of=lambda process: process,
            coordinator=_meeting_points(hosts.address(0)),
            silence_seconds=values.silence_seconds,
            limit_seconds=values.limit_seconds,
            set_link=hosts.set_link if isinstance(hosts, NamespaceHosts) else None,
        )
        _prepare(values, plans, crew)
        supervisors = [Supervisor(n, crew, _say) for n in range(values.processes)]
        _run_beside(supervisors, plans)
    return _report(workdir, plans, crew, skipped)


def _drill_cluster(values: Values, launch: Launch) -> int:
    """Looks after one process of every run; the others of the launcher do the same."""
    assert launch.num_processes is not None and launch.process_id is not None
    assert launch.coordinator is not None
    coordinator = launch.coordinator
    faults, skipped = _faults(values, "links of a cluster are left alone")
    plans = _plans(values, faults, launch.num_processes)
    workdir, is_first = _workdir(values), launch.process_id == 0
    with LoopbackHosts(1) as hosts:
        crew = Crew(
            num_processes=launch.num_processes,
            workdir=workdir,
            hosts=hosts,
            host_of=lambda process: 0,
            coordinator=lambda start: coordinator,
            silence_seconds=values.silence_seconds,
            limit_seconds=values.limit_seconds,
        )
        if values.fresh:
            raise UserError("--fresh is for one machine; name a new --workdir here")
        _meet(plans, crew, is_first)
        supervisor = Supervisor(launch.process_id, crew, _say)
        try:
            supervisor.run(plans)
        finally:
            supervisor.kill()
    return _report(workdir, plans, crew, skipped, is_first=is_first)


def _workdir(values: Values) -> Path:
    return Path(values.workdir).expanduser().absolute()


def _meeting_points(address: str) -> Callable[[Start], str]:
    """A port of its own for every start, the same for all that ask."""
    lock, ports = threading.Lock(), dict[str, int]()

    def meet(start: Start) -> str:
        with lock:
            name = f"{start.plan.method} {start.name}"
            return f"{address}:{ports.setdefault(name, free_port())}"

    return meet


def _described(plans: Sequence[Plan], crew: Crew) -> dict[str, Any]:
    runs = {plan.method: [vars(blow) for blow in plan.blows] for plan in plans}
    return {"processes": crew.num_processes, "runs": runs}


def _prepare(values: Values, plans: Sequence[Plan], crew: Crew) -> None:
    """Removes what an interrupted drill has left of runs that it did not finish."""
    file = crew.workdir / _PLAN_FILE
    described, before = _described(plans, crew), read_object(file)
    if values.fresh and before is not None:
        for method in before.get("runs", {}):
            shutil.rmtree(crew.workdir / method, ignore_errors=True)
    elif file.exists() and before != described:
        raise UserError(
            f"--workdir={values.workdir} holds another drill; --fresh removes it"
        )
    crew.workdir.mkdir(parents=True, exist_ok=True)
    write_json(file, described)
    for plan in plans:
        for run in dict.fromkeys(start.run for start in plan.starts):
            starts = [start for start in plan.starts if start.run == run]
            if not all(map(crew.is_recorded, starts)):
                _forget(crew, starts)


def _forget(crew: Crew, starts: Sequence[Start]) -> None:
    shutil.rmtree(crew.run_folder(starts[0]), ignore_errors=True)
    for start in starts:
        for process in range(crew.num_processes):
            crew.record_file(start, process).unlink(missing_ok=True)


def _meet(plans: Sequence[Plan], crew: Crew, is_first: bool) -> None:
    """Waits until process 0 has written the plan, and compares it with one's own."""
    file, described = crew.workdir / _PLAN_FILE, _described(plans, crew)
    if (crew.workdir / _RESULT_FILE).exists() or (is_first and file.exists()):
        raise UserError(f"{crew.workdir} holds a drill already; name a new --workdir")
    if is_first:
        crew.workdir.mkdir(parents=True, exist_ok=True)
        write_json(file, described)
        return
    deadline = time.monotonic() + crew.limit_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise DrillFailedError(
                f"process 0 of the drill has not written {file}: it does not run, or "
                "the folder is not shared"
            )
        time.sleep(0.1)
    if read_object(file) != described:
        raise UserError(f"{file} is of a drill with other flags; give all the same")


def _run_beside(supervisors: Sequence[Supervisor], plans: Sequence[Plan]) -> None:
    """Runs supervisors in threads, and ends all processes when one cannot go on."""
    problems: list[BaseException] = []

    def run(supervisor: Supervisor) -> None:
        try:
            supervisor.run(plans)
        except BaseException as problem:
            problems.append(problem)

    threads = [
        threading.Thread(target=run, args=(supervisor,), daemon=True)
        for supervisor in supervisors
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not problems:
            threads[0].join(0.2)
            time.sleep(0.05)
    finally:
        for supervisor in supervisors:
            supervisor.kill()
    if problems:
        raise problems[0]


def _report(
    workdir: Path,
    plans: Sequence[Plan],
    crew: Crew,
    skipped: dict[str, str],
    *,
    is_first: bool = True,
) -> int:
    verdicts = [verdict for plan in plans for verdict in judge(plan, crew)]
    if is_first:
        command = shlex.join(["prunex-jax", "drill", *sys.argv[2:]])
        _say(write_tables(workdir, command, verdicts, skipped).rstrip("\n"))
        for verdict in verdicts:
            if verdict.problems:
                warn(
                    f"error: {verdict.method}, {verdict.fault} of process "
                    f"{verdict.process} at step {verdict.step}: "
                    f"{'; '.join(verdict.problems)}; see {verdict.log}"
                )
    return EXIT_FAULTY if any(verdict.problems for verdict in verdicts) else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
