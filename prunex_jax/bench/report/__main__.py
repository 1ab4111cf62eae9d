"""Command line of reports: of runs, and of what studies have found.

    prunex-jax report RUN [RUN ...] [--output=FILE.html]

Writes one HTML page of run folders, finished or not, side by side: curves, bytes by
axis and phase, what is kept per channel group, health, environment, command, settings.
It needs nothing else, and loads nothing. Default of FILE: report.html in the first RUN.

    prunex-jax report --workdir=FOLDER[,FOLDER...] [--png=FOLDER]
        [--targets=VALUE,...] [--published]

Reads `records.jsonl` of every FOLDER and writes `report.html`, one file that needs
nothing else, and `tables.md` into the first one. Plots need matplotlib
(pip install 'prunex_jax[bench]'). Exit code 0: written; 2: bad input.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from prunex_jax.base.command import Command, Flag, Values, run_command, split_list
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.bench.cost_model.published import (
    published_extrapolations,
    published_notes,
    published_setting,
)
from prunex_jax.bench.report import plots
from prunex_jax.bench.report.page import NO_PLOTS
from prunex_jax.bench.report.runs import write_runs
from prunex_jax.bench.report.study import Findings, read_findings, write_report

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("output", "", "HTML file of the page of runs."),
        Flag("workdir", "", "Folders with records of studies, by commas."),
        Flag("png", "", "Folder for the plots as PNG files."),
        Flag("targets", "", "Values on validation whose time is asked for."),
        Flag("published", False, "Add the setting that PruneX was published with."),
    ),
    takes_paths=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and writes a report."""
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, paths: list[str]) -> None:
    if bool(paths) == bool(values.workdir):
        raise UserError(
            "give either run folders, as in `report runs/a runs/b`, or --workdir with "
            "folders that have records of studies; --help shows the command line"
        )
    if paths:
        _report_runs(values, [expanded(path) for path in paths])
    else:
        _report_studies(values)


def _report_runs(values: Values, folders: list[Path]) -> None:
    for flag in ("png", "targets", "published"):
        if getattr(values, flag):
            raise UserError(f"--{flag} is for reports of studies, not of runs")
    output = expanded(values.output) if values.output else None
    sys.stdout.write(f"{write_runs(folders, output)}\n")


def _report_studies(values: Values) -> None:
    if values.output:
        raise UserError(
            f"--output={values.output} is for reports of runs; those of studies are "
            "written into the first --workdir"
        )
    folders = [Path(part) for part in split_list(values.workdir)]
    if not folders:
        raise UserError(f"--workdir={values.workdir} names no folder")
    findings = read_findings(folders, _targets(values.targets))
    if values.published:
        findings = _with_published(findings)
    png = Path(values.png) if values.png else None
    path = write_report(folders[0], findings, png)
    if not plots.is_available():
        sys.stdout.write(f"{NO_PLOTS}\n")
    sys.stdout.write(f"{path}\n")


def _with_published(findings: Findings) -> Findings:
    setting = published_setting()
    modelled = dataclasses.replace(
        findings.modelled,
        extrapolations=published_extrapolations(setting),
        notes=(*findings.modelled.notes, *published_notes(setting)),
    )
    return dataclasses.replace(findings, modelled=modelled)


def _targets(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in split_list(text))
    except ValueError:
        raise UserError(f"--targets={text} is not a list like 0.6,0.65") from None
