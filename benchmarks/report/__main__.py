"""Writes tables and plots of what studies over links have found.

    python -m benchmarks report --workdir=FOLDER[,FOLDER...] [--png=FOLDER]
        [--targets=VALUE,...] [--published]

Reads `records.jsonl` of every FOLDER and writes `report.html`, one file that needs
nothing else, and `tables.md` into the first one. Exit code 0: written; 2: bad input.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import (
    published_extrapolations,
    published_notes,
    published_setting,
)
from benchmarks.report.study_report import Findings, read_findings, write_report
from prunex_jax.base.command import Command, Flag, Values, run_command, split_list
from prunex_jax.base.errors import UserError

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Folders with records, by commas.", is_required=True),
        Flag("png", "", "Folder for the plots as PNG files."),
        Flag("targets", "", "Values on validation whose time is asked for."),
        Flag("published", False, "Add the setting that PruneX was published with."),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and writes a report."""
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, rest: list[str]) -> None:
    del rest
    folders = [Path(part) for part in split_list(values.workdir)]
    if not folders:
        raise UserError(f"--workdir={values.workdir} names no folder")
    findings = read_findings(folders, _targets(values.targets))
    if values.published:
        findings = _with_published(findings)
    png = Path(values.png) if values.png else None
    sys.stdout.write(f"{write_report(folders[0], findings, png)}\n")


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


if __name__ == "__main__":
    sys.exit(main())
