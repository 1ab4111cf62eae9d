"""The report of studies: what was found, read and put in order."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.links.records import RECORDS_FILE, Record, read_records
from benchmarks.report.cost import (
    Modelled,
    extrapolation_tables,
    model_plots,
    modelled,
    predictions_table,
)
from benchmarks.report.places import DENSE, titles
from benchmarks.report.steps import (
    byte_disagreements,
    bytes_per_step,
    peak_memory,
    scaling,
    scaling_plots,
    step_time_plots,
    step_times,
)
from benchmarks.report.targets import (
    figures_of,
    target_plots,
    time_to_targets,
)
from prunex_jax.base.errors import UserError
from prunex_jax.compare.report.page import Section, facts_table, write_page
from prunex_jax.compare.report.plots import Look, make_looks

ENVIRONMENT_FILE = "environment.json"
# In the environment, by study: values of its metric, and links that the model of cost
# is checked on.
TARGETS_KEY = "targets"
# What earlier versions called them, which knew accuracies only.
_EARLIER_TARGETS_KEY = "target_accuracies"
HELD_OUT_KEY = "held_out"


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that a report shows."""

    records: Sequence[Record]  # Of one study or several.
    # Study -> values of its metric, on validation, whose time is asked for.
    targets: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    # Name -> plain values: versions, cores, kernel, commands.
    environments: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    # What a model of cost says.
    modelled: Modelled = dataclasses.field(default_factory=Modelled)


def read_findings(folders: Sequence[Path], targets: Sequence[float] = ()) -> Findings:
    """Reads records and environments.

    Args:
      folders: Each with `records.jsonl`, and `environment.json` if there is one. A
        study that two of them have is called after its folder too.
      targets: Values of the metric on validation, for all studies; none takes those
        that `environment.json` has for each study.
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
        environment = _environment(folder)
        own = take_targets(environment)
        unseen = environment.pop(HELD_OUT_KEY, {})
        if environment:
            environments[str(folder)] = environment
        studies = {record.setup.study for record in records}
        for study in sorted(studies):
            name = f"{study} ({folder.name})" if study in seen else study
            asked[name] = targets or own.get(study, ())
            held_out[name] = unseen.get(study, ())
            found += [
                dataclasses.replace(
                    each, setup=dataclasses.replace(each.setup, study=name)
                )
                for each in records
                if each.setup.study == study
            ]
        seen |= studies
    return Findings(found, asked, environments, modelled(found, held_out))


def take_targets(environment: dict[str, Any]) -> dict[str, Sequence[float]]:
    """Takes the targets of studies out of an environment, also one of 0.1.

    Example:
      >>> take_targets({'target_accuracies': {'a': [0.4]}, 'targets': {'b': [2.0]}})
      {'a': [0.4], 'b': [2.0]}
    """
    keys = _EARLIER_TARGETS_KEY, TARGETS_KEY
    return {k: v for key in keys for k, v in environment.pop(key, {}).items()}


def write_report(folder: Path, findings: Findings, png: Path | None = None) -> Path:
    """Writes the report, with its plots as PNG files too if a folder is given."""
    sections = make_sections(findings)
    return write_page(folder, "Methods over links", _notes(findings), sections, png)


def make_sections(findings: Findings) -> list[Section]:
    """All parts of the report, in order."""
    records, modelled = findings.records, findings.modelled
    looks = _looks(findings)
    return [
        Section(
            "Time to " + (", ".join(figures_of(records)) or "a target"),
            time_to_targets(records, findings.targets),
            target_plots(records, findings.targets, looks),
        ),
        Section(
            "Time of a step",
            step_times(records),
            step_time_plots(records, modelled.lines, looks),
        ),
        Section(
            "Bytes of a step",
            bytes_per_step(records),
            warnings=byte_disagreements(records),
        ),
        Section("Scaling", scaling(records), scaling_plots(records, looks)),
        Section("Memory", peak_memory(records)),
        Section(
            "Model of cost",
            predictions_table(modelled) + extrapolation_tables(modelled.extrapolations),
            model_plots(modelled, looks),
        ),
        Section(
            "Where and how",
            [facts_table(*pair) for pair in findings.environments.items()],
        ),
    ]


def _looks(findings: Findings) -> dict[str, Look]:
    """Row -> how it is drawn, in all plots of a report."""
    called = titles(findings.records)
    for each in findings.modelled.extrapolations:
        called |= {row: each.titles[row] for row in each.titles if row not in called}
    return make_looks(called, first=(DENSE,))


def _records(folder: Path) -> list[Record]:
    records = read_records(folder)
    if not records:
        raise UserError(
            f"--workdir={folder} has no {RECORDS_FILE}; "
            "`python -m benchmarks links` makes them"
        )
    return records


def _environment(folder: Path) -> dict[str, Any]:
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
