"""Runs a study: methods and PyTorch over links between real or emulated hosts.

    python -m benchmarks links --study=FILE --workdir=FOLDER [--hosts=KIND]
        [--rows=NAME,...] [--num_hosts=2,4] [--links='r=4,100 Mbit/s'] [--fresh]
        [--config.KEY=VALUE ...]
    srun python -m benchmarks links --study=FILE --workdir=FOLDER --hosts=cluster

Starts one process per host and measures every row of the study over every link: what
its interfaces send, how long its steps take, or how fast it learns. Records and report
go to FOLDER; what is recorded is not measured again. Hosts are network namespaces of
this machine, as root or with user namespaces, and vanish with the command; without
either they are plain processes, over links that are neither limited nor counted. On a
cluster, all processes of its launcher give the command, and real links are used
unchanged.

Exit code 0: measured, and bytes agree; 1: a host failed, or interfaces have counted
other bytes than the programs say; 2: bad input.
"""

import functools
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.links.cluster import run_on_cluster
from benchmarks.links.links import LinkedHosts, PlainHosts, ShapedHosts
from benchmarks.links.processes import ProcessFailedError
from benchmarks.links.records import Record, forget_study
from benchmarks.links.runner import run_study
from benchmarks.report.steps import byte_disagreements
from benchmarks.report.study_report import (
    ENVIRONMENT_FILE,
    HELD_OUT_KEY,
    TARGETS_KEY,
    read_findings,
    take_targets,
    write_report,
)
from benchmarks.study import UNLIMITED, LinkStudy
from prunex_jax.base.command import (
    Command,
    Flag,
    Values,
    run_command,
    say,
    split_list,
)
from prunex_jax.base.environment import source_revision, versions
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import write_json
from prunex_jax.compare.drill.sandbox import is_in_sandbox, run_in_sandbox, sandbox_kind
from prunex_jax.compare.report.page import check_packages
from prunex_jax.compare.sweep.study import load_study, narrow_study, whole_numbers
from prunex_jax.train.commands.command import LAUNCH_FLAGS, given_launch

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("study", "", "Study file, as of benchmarks/studies.", is_required=True),
        Flag("workdir", "", "Folder for records, runs and report.", is_required=True),
        Flag(
            "hosts",
            "auto",
            "What a host is.",
            choices=("auto", "namespaces", "loopback", "cluster"),
        ),
        Flag("rows", "", "Names of the rows to run; all without."),
        Flag("num_hosts", "", "Numbers of hosts; those of the study without."),
        Flag("links", "", "Links; those of the study without."),
        Flag("fresh", False, "Measure again what the folder has of this study."),
        *LAUNCH_FLAGS,
    ),
    takes_settings=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs a study."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    run = functools.partial(_run, arguments=arguments)
    return run_command(COMMAND, run, arguments)


def _run(values: Values, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    check_packages()  # Before hours of runs.
    study = narrow_study(
        load_study(values.study, LinkStudy, overrides),
        split_list(values.rows),
        num_hosts=whole_numbers("num_hosts", split_list(values.num_hosts)),
        links=split_list(values.links),
    )
    if values.hosts == "cluster":
        return _run_on_cluster(values, study)
    kind = _hosts_kind(values.hosts)
    if kind == "namespaces" and not is_in_sandbox():
        return run_in_sandbox([sys.executable, "-m", "benchmarks.links", *arguments])
    if kind == "loopback":
        study = _without_links(study)
    workdir = Path(values.workdir)
    if values.fresh:
        forget_study(workdir, study.name)
    write_environment(workdir, study)
    make_hosts: type[LinkedHosts] = ShapedHosts if kind == "namespaces" else PlainHosts
    try:
        records = run_study(study, workdir, make_hosts, say)
    except ProcessFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return _report(workdir, records)


def _run_on_cluster(values: Values, study: LinkStudy) -> int:
    workdir = Path(values.workdir)
    if not run_on_cluster(study, workdir, given_launch(values), say):
        return 0
    write_environment(workdir, study)
    say(str(write_report(workdir, read_findings([workdir]))))
    return 0


def _report(workdir: Path, records: Sequence[Record]) -> int:
    say(str(write_report(workdir, read_findings([workdir]))))
    disagreements = byte_disagreements(records)
    for disagreement in disagreements:
        sys.stderr.write(f"error: {disagreement}\n")
    return 1 if disagreements else 0


def _hosts_kind(asked: str) -> str:
    """What hosts will be; says why where it is not what was hoped for."""
    if asked == "loopback" or is_in_sandbox():
        return "loopback" if asked == "loopback" else "namespaces"
    kind, reason = sandbox_kind()
    if kind is not None:
        return "namespaces"
    if asked == "namespaces":
        raise UserError(f"--hosts=namespaces is not possible here: {reason}")
    say(f"hosts are plain processes, links are neither limited nor counted: {reason}")
    return "loopback"


def _without_links(study: LinkStudy) -> LinkStudy:
    left = [link for link in study.links if link != UNLIMITED]
    if left:
        say(f"links cannot be limited here, so these are left out: {', '.join(left)}")
    return narrow_study(study, links=(UNLIMITED,))


def write_environment(workdir: Path, study: LinkStudy) -> None:
    """Says in the folder what a study was run with, and what its report needs."""
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ENVIRONMENT_FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    before[TARGETS_KEY] = take_targets(before)
    command = shlex.join(sys.orig_argv)
    asked = {TARGETS_KEY: study.targets, HELD_OUT_KEY: study.held_out}
    facts = {
        "versions": versions(),
        "source": source_revision(Path(__file__).parent),
        "operating_system": platform.platform(),
        "cores": os.cpu_count(),
        "commands": [*dict.fromkeys([*before.get("commands", []), command])],
        **{k: {**before.get(k, {}), study.name: v} for k, v in asked.items()},
    }
    write_json(path, facts)


if __name__ == "__main__":
    sys.exit(main())
