"""Command line of sweeps.

    prunex-jax sweep --sweep=FILE --workdir=FOLDER [--rows=NAME,...]
        [--seeds=0,1,2] [--png=FOLDER] [--report] [--dry_run] [--retry]
        [--config.KEY=VALUE ...]

Trains every row of the sweep with every seed, each in a run folder of its own below
FOLDER/NAME, where NAME is that of the sweep, and writes tables and plots there. A run
that has ended is not run again and one that was stopped goes on, so the command can be
stopped and given again. Exit code 0: all runs have ended; 1: some failed; 2: bad input.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from prunex_jax.base.command import Command, Flag, Values, run_command, say, split_list
from prunex_jax.compare.report.page import check_packages
from prunex_jax.compare.sweep.runs import forget, read_findings, run_missing, runs_of
from prunex_jax.compare.sweep.study import (
    Sweep,
    load_study,
    narrow_study,
    whole_numbers,
)
from prunex_jax.compare.sweep.sweep_report import write_report

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("sweep", "", "Sweep file, or a name of configs/sweeps.", is_required=True),
        Flag("workdir", "", "Folder for run folders and report.", is_required=True),
        Flag("rows", "", "Names of the rows to run; all without."),
        Flag("seeds", "", "Seeds; those of the sweep without."),
        Flag("png", "", "Folder for the plots as PNG files."),
        Flag("report", False, "Write the report of what there is, and run nothing."),
        Flag("dry_run", False, "Print the commands of the runs, and run nothing."),
        Flag("retry", False, "Run those again that have diverged."),
    ),
    takes_settings=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs a sweep."""
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, overrides: Sequence[str]) -> int:
    whole = load_study(values.sweep, Sweep, overrides)
    seeds = whole_numbers("seeds", split_list(values.seeds))
    part = narrow_study(whole, split_list(values.rows), seeds=seeds)
    workdir = Path(values.workdir)
    png = Path(values.png) if values.png else None
    check_packages()  # Before hours of runs.
    runs = runs_of(part, workdir)
    if values.dry_run:
        for run in runs:
            say(shlex.join(run.command))
        return 0
    # The report shows what there is of the whole sweep, whatever part is run now.
    everything = runs_of(whole, workdir)
    failed = []
    if not values.report:
        if values.retry:
            forget(runs)
        failed = run_missing(runs, say)
    command = shlex.join(sys.orig_argv)
    found = read_findings(whole, everything, runs, command)
    if found.results or not failed:
        say(str(write_report(found, workdir / whole.name, png)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
