"""Command line of studies.

    prunex-jax bench --study=FILE --workdir=FOLDER [--hosts=KIND]
        [--rows=NAME,...] [--num_hosts=2,4] [--links='r=4,100 Mbit/s'] [--fresh]
        [--config.KEY=VALUE ...]
    srun prunex-jax bench --study=FILE --workdir=FOLDER --hosts=cluster

Starts one process per host and measures every row of the study over every link: what
its interfaces send, how long its steps take, or how fast it learns. Records and report
go to FOLDER; what is recorded is not measured again. Hosts are network namespaces of
this machine, as root or with user namespaces, and vanish with the command; without
either they are plain processes, over links that are neither limited nor counted. On a
cluster, all processes of its launcher give the command, and links are what they are.

Exit code 0: measured, and bytes agree; 1: a host failed, or interfaces have counted
other bytes than the programs say; 2: bad input.
"""

import dataclasses
import functools
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from prunex_jax.base.command import (
    Command,
    Flag,
    Values,
    find_file,
    run_command,
    split_list,
)
from prunex_jax.base.environment import source_revision, versions
from prunex_jax.base.errors import UserError
from prunex_jax.bench.links.cluster import run_on_cluster
from prunex_jax.bench.links.hosts import Hosts, LoopbackHosts, NamespaceHosts
from prunex_jax.bench.links.processes import ProcessFailedError
from prunex_jax.bench.links.records import Record, forget_study
from prunex_jax.bench.links.runner import run_study
from prunex_jax.bench.links.sandbox import is_in_sandbox, run_in_sandbox, sandbox_kind
from prunex_jax.bench.report.steps import byte_disagreements
from prunex_jax.bench.report.study import (
    ENVIRONMENT_FILE,
    HELD_OUT_KEY,
    TARGETS_KEY,
    read_findings,
    write_report,
)
from prunex_jax.bench.study import UNLIMITED, Study, load_study, narrow_study
from prunex_jax.train.command import LAUNCH_FLAGS, given_launch

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("study", "", "Study file, or a name of configs/bench.", is_required=True),
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
    """Parses the command line and runs a study.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    run = functools.partial(_run, arguments=arguments)
    return run_command(COMMAND, run, arguments)


def _run(values: Values, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    study = _with_settings(_study(values), overrides)
    if values.hosts == "cluster":
        return _run_on_cluster(values, study)
    kind = _hosts_kind(values.hosts)
    if kind == "namespaces" and not is_in_sandbox():
        return run_in_sandbox([sys.executable, "-m", "prunex_jax.bench", *arguments])
    if kind == "loopback":
        study = _without_links(study)
    workdir = Path(values.workdir)
    if values.fresh:
        forget_study(workdir, study.name)
    write_environment(workdir, study)
    make_hosts: type[Hosts] = NamespaceHosts if kind == "namespaces" else LoopbackHosts
    try:
        folder = find_file(values.study, "study").parent
        records = run_study(study, folder, workdir, make_hosts, _say)
    except ProcessFailedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return _report(workdir, records)


def _run_on_cluster(values: Values, study: Study) -> int:
    launch = given_launch(values)
    workdir, folder = Path(values.workdir), find_file(values.study, "study").parent
    if not run_on_cluster(study, folder, workdir, launch, _say):
        return 0
    write_environment(workdir, study)
    _say(str(write_report(workdir, read_findings([workdir]))))
    return 0


def _report(workdir: Path, records: Sequence[Record]) -> int:
    _say(str(write_report(workdir, read_findings([workdir]))))
    disagreements = byte_disagreements(records)
    for disagreement in disagreements:
        sys.stderr.write(f"error: {disagreement}\n")
    return 1 if disagreements else 0


def _study(values: Values) -> Study:
    numbers = split_list(values.num_hosts)
    if not all(number.isdigit() and int(number) for number in numbers):
        raise UserError(f"--num_hosts={values.num_hosts} is not a list like 2,4")
    return narrow_study(
        load_study(values.study),
        split_list(values.rows),
        tuple(int(number) for number in numbers),
        split_list(values.links),
    )


def _with_settings(study: Study, overrides: Sequence[str]) -> Study:
    """Changes settings of all rows, as `--config.KEY=VALUE` says."""
    changes = dict(study.settings)
    for override in overrides:
        key, equals, value = override.lstrip("-").partition("=")
        if not equals:
            raise UserError(f"{override} has no value; write --config.KEY=VALUE")
        changes[key.removeprefix("config.")] = value
    return dataclasses.replace(study, settings=changes)


def _hosts_kind(asked: str) -> str:
    """What hosts will be; says why where it is not what was hoped for."""
    if asked == "loopback" or is_in_sandbox():
        return "loopback" if asked == "loopback" else "namespaces"
    kind, reason = sandbox_kind()
    if kind is not None:
        return "namespaces"
    if asked == "namespaces":
        raise UserError(f"--hosts=namespaces is not possible here: {reason}")
    _say(f"hosts are plain processes, links are neither limited nor counted: {reason}")
    return "loopback"


def _without_links(study: Study) -> Study:
    left = [link for link in study.links if link != UNLIMITED]
    if left:
        _say(f"links cannot be limited here, so these are left out: {', '.join(left)}")
    return narrow_study(study, links=(UNLIMITED,))


def write_environment(workdir: Path, study: Study) -> None:
    """Says in the folder what a study was run with, and what its report needs."""
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ENVIRONMENT_FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    commands = before.get("commands", [])
    command = shlex.join(sys.orig_argv)
    facts = {
        "versions": versions(),
        "source": source_revision(Path(__file__).parent),
        "operating_system": platform.platform(),
        "cores": os.cpu_count(),
        "commands": [*commands, *([command] if command not in commands else [])],
    }
    for key, value in (
        (TARGETS_KEY, study.target_accuracies),
        (HELD_OUT_KEY, study.held_out),
    ):
        facts[key] = {**before.get(key, {}), study.name: value}
    path.write_text(json.dumps(facts, indent=2) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
