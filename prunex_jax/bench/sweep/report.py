"""What is in the report of a sweep; `prunex_jax.bench.report` writes it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.errors import UserError
from prunex_jax.bench.report import pictures
from prunex_jax.bench.report.files import write_files
from prunex_jax.bench.report.pages import Picture, Section, facts_table
from prunex_jax.bench.sweep.plots import make_plots
from prunex_jax.bench.sweep.results import Findings
from prunex_jax.bench.sweep.tables import (
    accuracy_table,
    divergence_table,
    settings_table,
)


def write_report(findings: Findings, folder: Path, png: Path | None = None) -> Path:
    """Writes the report of a sweep.

    Args:
      findings: What to show.
      folder: Gets `report.html` and `tables.md`.
      png: Gets the plots as PNG files; None draws none.
    Returns:
      Path of the HTML file.
    Raises:
      UserError: Nothing has ended yet, or PNG files are asked for and matplotlib is not
        there.
    """
    name = findings.sweep.name
    if not findings.results:
        raise UserError(f"{folder} has no run of sweep {name!r} that ended")
    plots = make_plots(findings) if pictures.is_available() else []
    return write_files(folder, name, (), _sections(findings, plots), plots, png)


def _sections(findings: Findings, plots: Sequence[pictures.Plot]) -> list[Section]:
    def drawn(section: str) -> list[Picture]:
        return [pictures.picture_of(plot) for plot in plots if plot.section == section]

    tables = [accuracy_table(findings), *divergence_table(findings)]
    return [
        Section("Accuracy and its price", tables, drawn("accuracy")),
        Section("Health", [], drawn("health")),
        Section(
            "Where and how",
            [settings_table(findings), facts_table("Machine", _machine(findings))],
        ),
    ]


def _machine(findings: Findings) -> Mapping[str, Any]:
    """Environment of the runs; each that differs, but for the command."""
    found: dict[str, Mapping[str, Any]] = {}
    for results in findings.results.values():
        for each in results:
            facts = {k: v for k, v in each.environment.items() if k != "command"}
            found.setdefault(json.dumps(facts, sort_keys=True), facts)
    if len(found) == 1:
        return next(iter(found.values()))
    return {str(number): facts for number, facts in enumerate(found.values(), 1)}
