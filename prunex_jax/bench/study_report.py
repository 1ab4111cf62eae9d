"""Command line of reports: tables and plots of what studies have found.

    prunex-jax report --workdir=FOLDER[,FOLDER...] [--png=FOLDER]
        [--targets=ACCURACY,...] [--published]

Reads `records.jsonl` of every FOLDER and writes `report.html`, one file that needs
nothing else, and `tables.md` into the first one. Plots need matplotlib
(pip install 'prunex_jax[bench]'). Exit code 0: written; 2: bad input.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.bench import plots
from prunex_jax.bench.accuracy_tables import time_to_accuracy
from prunex_jax.bench.cost import modelled
from prunex_jax.bench.cost_model.published import (
    published_extrapolations,
    published_notes,
    published_setting,
)
from prunex_jax.bench.links.records import RECORDS_FILE, Record, read_records
from prunex_jax.bench.model_tables import (
    Modelled,
    extrapolation_tables,
    predictions_table,
)
from prunex_jax.bench.report import pictures
from prunex_jax.bench.report.cells import Table
from prunex_jax.bench.report.files import NO_PLOTS, write_files
from prunex_jax.bench.report.pages import Section, facts_table
from prunex_jax.bench.tables import (
    BYTES_PER_MESSAGE,
    SHARE,
    byte_disagreements,
    bytes_per_step,
    peak_memory,
    scaling,
    step_times,
)

ENVIRONMENT_FILE = "environment.json"
# In the environment, by study: accuracies, and links that the model is checked on.
TARGETS_KEY = "target_accuracies"
HELD_OUT_KEY = "held_out"
COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Folders with records, by commas.", is_required=True),
        Flag("png", "", "Folder for the plots as PNG files."),
        Flag("targets", "", "Validation accuracies whose time is asked for."),
        Flag("published", False, "Add the setting that PruneX was published with."),
    ),
)


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that a report shows.

    Attributes:
      records: Of one study or several.
      targets: Study -> validation accuracies whose time is asked for.
      environments: Name -> plain values: versions, cores, kernel, commands.
      modelled: What a model of cost says.
      share: Of the foreseen bytes, by which counted ones may differ.
      bytes_per_message: Allowed on top; see `tables.byte_disagreements`.
    """

    records: Sequence[Record]
    targets: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    environments: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    modelled: Modelled = dataclasses.field(default_factory=Modelled)
    share: float = SHARE
    bytes_per_message: float = BYTES_PER_MESSAGE


def read_findings(folders: Sequence[Path], targets: Sequence[float] = ()) -> Findings:
    """Reads records and environments.

    Args:
      folders: Each with `records.jsonl`, and `environment.json` if there is one. A
        study that two of them have is called after its folder too.
      targets: Validation accuracies for all studies; none takes those that
        `environment.json` has for each study.
    Raises:
      UserError: A folder without records, or files that cannot be read.
    """
    found: list[Record] = []
    asked: dict[str, Sequence[float]] = {}
    held_out: dict[str, Sequence[str]] = {}
    environments = {}
    seen: set[str] = set()
    for folder in folders:
        records = _records(folder)
        environment = dict(_environment(folder))
        own = environment.pop(TARGETS_KEY, {})
        unseen = environment.pop(HELD_OUT_KEY, {})
        if environment:
            environments[str(folder)] = environment
        studies = {record.setup.study for record in records}
        for study in sorted(studies):
            name = f"{study} ({folder.name})" if study in seen else study
            asked[name] = targets or own.get(study, ())
            held_out[name] = unseen.get(study, ())
            found += [_called(r, name) for r in records if r.setup.study == study]
        seen |= studies
    return Findings(found, asked, environments, modelled(found, held_out))


def write_report(folder: Path, findings: Findings, png: Path | None = None) -> Path:
    """Writes the report.

    Args:
      folder: Gets `report.html` and `tables.md`.
      findings: What to show.
      png: Gets the plots as PNG files; None draws none.
    Returns:
      Path of the HTML file.
    Raises:
      UserError: PNG files are asked for, and matplotlib is not there.
    """
    drawn = _plots(findings)
    sections = make_sections(findings, drawn)
    notes = _notes(findings)
    return write_files(folder, "Methods over links", notes, sections, drawn, png)


def make_sections(
    findings: Findings, drawn: Sequence[pictures.Plot] = ()
) -> list[Section]:
    """All parts of the report, in order.

    Args:
      findings: What to show.
      drawn: Its plots.
    """
    records, modelled = findings.records, findings.modelled
    allowed = findings.share, findings.bytes_per_message
    gaps = [str(gap) for gap in byte_disagreements(records, *allowed)]
    parts: list[tuple[str, str, list[Table], list[str]]] = [
        (
            "accuracy",
            "Time to accuracy",
            time_to_accuracy(records, findings.targets),
            [],
        ),
        ("step-time", "Time of a step", step_times(records), []),
        ("", "Bytes of a step", bytes_per_step(records, *allowed), gaps),
        ("scaling", "Scaling", scaling(records), []),
        ("", "Memory", peak_memory(records), []),
        (
            "model",
            "Model of cost",
            predictions_table(modelled) + extrapolation_tables(modelled.extrapolations),
            [],
        ),
        (
            "",
            "Where and how",
            [facts_table(*pair) for pair in findings.environments.items()],
            [],
        ),
    ]
    return [
        Section(
            title,
            tables,
            [pictures.picture_of(plot) for plot in drawn if plot.section == section],
            warnings=warnings,
        )
        for section, title, tables, warnings in parts
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and writes a report.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, rest: list[str]) -> None:
    del rest
    folders = [Path(part) for part in values.workdir.split(",") if part]
    if not folders:
        raise UserError(f"--workdir={values.workdir} names no folder")
    findings = read_findings(folders, _targets(values.targets))
    png = Path(values.png) if values.png else None
    if values.published:
        findings = dataclasses.replace(findings, modelled=_with_published(findings))
    path = write_report(folders[0], findings, png)
    if not pictures.is_available():
        sys.stdout.write(f"{NO_PLOTS}\n")
    sys.stdout.write(f"{path}\n")


def _with_published(findings: Findings) -> Modelled:
    setting = published_setting()
    return dataclasses.replace(
        findings.modelled,
        extrapolations=published_extrapolations(setting),
        notes=(*findings.modelled.notes, *published_notes(setting)),
    )


def _targets(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise UserError(f"--targets={text} is not a list like 0.6,0.65") from None


def _records(folder: Path) -> list[Record]:
    records = read_records(folder)
    if not records:
        raise UserError(
            f"--workdir={folder} has no {RECORDS_FILE}; python -m prunex_jax bench "
            "makes them"
        )
    return records


def _environment(folder: Path) -> Mapping[str, Any]:
    path = folder / ENVIRONMENT_FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; remove it, or mend it")
    return content


def _called(record: Record, study: str) -> Record:
    setup = dataclasses.replace(record.setup, study=study)
    return dataclasses.replace(record, setup=setup)


def _plots(findings: Findings) -> list[pictures.Plot]:
    if not pictures.is_available():
        return []
    return plots.make_plots(findings.records, findings.targets, findings.modelled)


def _notes(findings: Findings) -> list[str]:
    """What the numbers are."""
    kinds = {record.setup.hosts_kind for record in findings.records}
    notes = []
    if kinds & {"namespaces", "loopback"}:
        notes.append(
            "All hosts share the cores of one machine, so steps are slower than on as "
            "many machines. Compare times as ratios within one run."
        )
    if "loopback" in kinds:
        notes.append(
            "Where it says loopback, hosts are plain processes: links are not limited, "
            "and bytes are those of the trace."
        )
    if "cluster" in kinds:
        notes.append(
            "Where it says cluster, links are not limited, and what else the machines "
            "send is counted too."
        )
    return notes


if __name__ == "__main__":
    sys.exit(main())
