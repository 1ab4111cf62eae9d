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
import sys
from collections.abc import Sequence

from prunex_jax.base.command import (
    Command,
    Flag,
    Values,
    run_command,
    say,
    split_list,
    warn,
)
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.files import expanded
from prunex_jax.compare.drill.crew import Crew, DrillFailedError
from prunex_jax.compare.drill.hosts import Hosts, LoopbackHosts, NamespaceHosts
from prunex_jax.compare.drill.plan import (
    FAULTS,
    LINK,
    RANDOM,
    Plan,
    every_fault,
    random_faults,
)
from prunex_jax.compare.drill.run import meeting_points, run_on_cluster, run_on_machine
from prunex_jax.compare.drill.sandbox import is_in_sandbox, run_in_sandbox, sandbox_kind
from prunex_jax.compare.drill.verdicts import Verdict, judge, write_tables
from prunex_jax.methods import METHODS, check_method
from prunex_jax.processes.launcher import Launch, detect_launch
from prunex_jax.train.commands.command import LAUNCH_FLAGS, given_launch

EXIT_FAULTY = 1
_MOST_PROCESSES = 64

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Folder for runs, logs and the table.", is_required=True),
        Flag("processes", 4, "Processes of a run on one machine.", at_least=2),
        Flag("method", "", "Methods, or all; hsadmm without, all with --random."),
        Flag("faults", "", "Faults to do; all that are possible without."),
        Flag("random", 0, "Number of random faults instead.", at_least=0),
        Flag("seed", 0, "What processes, steps and random faults are drawn from."),
        Flag("silence_seconds", 12, "When a process counts as lost.", at_least=3),
        Flag("limit_seconds", 400, "Until a run is killed.", at_least=60),
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
    is_alone = not launch.is_distributed
    no_links = "" if is_alone else "links of a cluster are left alone"
    if is_alone and LINK in _faults(values, "")[0] and not is_in_sandbox():
        kind, no_links = sandbox_kind()
        if kind is not None:
            again = [sys.executable, "-m", "prunex_jax", "drill", *arguments]
            return run_in_sandbox(again)
    faults, skipped = _faults(values, no_links)
    # On a cluster this is the supervisor of one process, which is here.
    make: type[Hosts] = NamespaceHosts if is_in_sandbox() else LoopbackHosts
    with make(values.processes if is_alone else 1) as hosts:
        crew = _crew(values, launch, hosts)
        plans = _plans(values, faults, crew.num_processes)
        try:
            if is_alone:
                run_on_machine(plans, crew, say, fresh=values.fresh)
            else:
                run_on_cluster(launch.process_id or 0, plans, crew, say)
        except DrillFailedError as error:
            warn(f"error: {error}")
            return EXIT_FAULTY
    verdicts = [verdict for plan in plans for verdict in judge(plan, crew)]
    if not launch.process_id:
        command = shlex.join(["prunex-jax", "drill", *arguments])
        _report(crew, command, verdicts, skipped)
    return EXIT_FAULTY if any(verdict.problems for verdict in verdicts) else 0


def _check(values: Values, launch: Launch) -> None:
    """Refuses what cannot work before anything starts."""
    if values.processes > _MOST_PROCESSES:
        raise UserError(
            f"--processes={values.processes} must be at most {_MOST_PROCESSES}"
        )
    if launch.is_distributed and None in (launch.coordinator, launch.num_processes):
        raise UserError(
            f"{launch.reason}: the launcher does not tell the drill where process 0 "
            "is; give --coordinator, --num_processes and --process_id"
        )
    if launch.is_distributed and values.fresh:
        raise UserError("--fresh is for one machine; name a new --workdir here")
    for flag in ("faults", "method"):
        given = getattr(values, flag)
        if given and not split_list(given):
            raise UserError(f"--{flag}={given} names nothing; leave it out for all")
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
    return list(dict.fromkeys(names))


def _faults(values: Values, no_links: str) -> tuple[list[str], dict[str, str]]:
    """The faults to do, and those that are left out with the reason."""
    asked = split_list(values.faults) or (RANDOM if values.random else tuple(FAULTS))
    skipped = {LINK: no_links} if no_links and LINK in asked else {}
    left = [fault for fault in asked if fault not in skipped]
    if not left:
        raise UserError(f"--faults={values.faults} leaves nothing to do: {no_links}")
    return left, skipped


def _plans(values: Values, faults: Sequence[str], num_processes: int) -> list[Plan]:
    methods, seed = _methods(values), values.seed
    if values.random:
        return random_faults(methods, faults, num_processes, values.random, seed)
    return every_fault(methods, faults, num_processes, seed)


def _crew(values: Values, launch: Launch, hosts: Hosts) -> Crew:
    """The processes of the launcher, or those that this machine is to start."""
    num_processes, given = values.processes, launch.coordinator
    if launch.is_distributed:
        num_processes = launch.num_processes
    return Crew(
        num_processes=num_processes,
        workdir=expanded(values.workdir).absolute(),
        hosts=hosts,
        coordinator=meeting_points(hosts.address(0), given),
        silence_seconds=values.silence_seconds,
        limit_seconds=values.limit_seconds,
    )


def _report(
    crew: Crew, command: str, verdicts: Sequence[Verdict], skipped: dict[str, str]
) -> None:
    """Writes and says what came of the faults; the first process does."""
    say(write_tables(crew.workdir, command, verdicts, skipped).rstrip("\n"))
    for verdict in verdicts:
        if verdict.problems:
            warn(f"error: {_said(verdict)}")


def _said(verdict: Verdict) -> str:
    return (
        f"{verdict.method}, {verdict.fault} of process {verdict.process} at step "
        f"{verdict.step}: {'; '.join(verdict.problems)}; see {verdict.log}"
    )


if __name__ == "__main__":
    sys.exit(main())
