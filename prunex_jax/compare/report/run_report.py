"""Command line of the page of runs.

    prunex-jax report RUN [RUN ...] [--output=FILE.html]

Writes one HTML page of run folders, finished or not, side by side: curves, bytes by
axis and phase, what is kept per channel group, health, environment, command, settings.
What a folder does not say is left out. The page needs nothing else, and loads nothing.
Default of FILE: report.html in the first RUN. Exit code 0: written; 2: bad input.
"""

import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded, read_object, write_whole
from prunex_jax.compare.report.page import (
    REPORT_FILE,
    Section,
    check_packages,
    facts_table,
    make_page,
)
from prunex_jax.compare.report.plots import STYLES, Look, Plot, Series
from prunex_jax.compare.report.tables import (
    Cell,
    Column,
    Table,
    digits,
    is_number,
    make_table,
    shown_bytes,
)
from prunex_jax.train.build.config import dotted_keys
from prunex_jax.train.records.checkpoint import newest_manifest
from prunex_jax.train.records.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    SUMMARY,
    RunFolder,
)

Rows = Sequence[Mapping[str, Any]]

# In rows of training, metrics of the task stand before this key, and health after.
_AFTER_METRICS = "learning_rate"
_VALIDATION = "validation_"
# Colours and marks of runs; then they repeat.
_HUES = list(STYLES.values())[1:]
_LARGEST = 1e300  # Of what is drawn; NaN is not either.
# What is no health though it stands there.
_COSTS = {
    *("sparsity", "phase", "host_wire_bytes", "device_wire_bytes", "host_wire_ratio"),
    *("seconds_in_steps", "seconds_per_step_median"),
    *("flops_per_second", "flops_utilisation", "examples_seen", "tokens_seen"),
}


COMMAND = Command(
    text=str(__doc__),
    flags=(Flag("output", "", "HTML file of the page."),),
    takes_paths=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and writes the page."""
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, paths: list[str]) -> None:
    if not paths:
        raise UserError("give run folders, as in `report runs/a runs/b`")
    output = expanded(values.output) if values.output else None
    sys.stdout.write(f"{write_runs([expanded(path) for path in paths], output)}\n")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder says; empty where it says nothing."""

    name: str  # On the page.
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Rows
    summary: Mapping[str, Any]  # Empty until the run has ended.
    position: Mapping[str, Any]  # Of its newest checkpoint.

    @property
    def training(self) -> Rows:
        """The rows that training has logged."""
        return [row for row in self.rows if _AFTER_METRICS in row]

    @property
    def metrics(self) -> list[str]:
        """Names of what training measures."""
        for row in self.training:
            names = itertools.takewhile(lambda key: key != _AFTER_METRICS, row)
            return [name for name in names if name != "step"]
        return []

    @property
    def last_step(self) -> int:
        """Steps done as far as the folder says."""
        logged = [row["step"] for row in self.rows[-1:]]
        return max(0, *logged, self.position.get("step", 0))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads run folders; names are those of folders, or paths where these are equal."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [_read(*each) for each in zip(names, folders, strict=True)]


def write_runs(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the page of run folders, by default into the first of them.

    Raises:
      UserError: A folder holds no run, or the file cannot be written.
    """
    check_packages()
    runs = read_runs(folders)
    output = output or folders[0] / REPORT_FILE
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    page = make_page(title, map(_state_of, runs), make_sections(runs))
    try:
        write_whole(output, page)
    except OSError as error:
        raise UserError(
            f"--output={output} cannot be written ({error}); choose another file"
        ) from error
    return output


def make_sections(runs: Sequence[Run]) -> list[Section]:
    """Everything on the page below its headline."""
    return [
        Section("Result", tables=_present(_result_table(runs))),
        Section("Curves", plots=list(_plots(runs)), warnings=_unlogged(runs)),
        Section("Bytes", tables=_present(_bytes_table(runs))),
        Section("Channels", tables=_present(*map(_channels_table, runs))),
        Section("Health", tables=_present(*map(_health_table, runs))),
        Section(
            "Environment",
            tables=[facts_table(run.name, run.environment) for run in runs],
        ),
        Section("Settings", tables=[_settings_table(runs)]),
    ]


def _read(name: str, folder: Path) -> Run:
    try:
        config = read_object(folder / CONFIG)
        if config is None:
            raise UserError(
                f"{folder} holds no run: there is no {CONFIG} in it that can be read; "
                "give the --workdir of a run"
            )
        return Run(
            name=name,
            config=config,
            environment=read_object(folder / ENVIRONMENT) or {},
            rows=RunFolder(folder, is_primary=False).read_rows(),
            summary=read_object(folder / SUMMARY) or {},
            position=newest_manifest(folder / CHECKPOINTS).get("extra", {}),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} cannot be read: {error}") from error


def _state_of(run: Run) -> str:
    """One sentence on how far a run is, from what there is of it."""
    topology = run.environment.get("topology") or {}
    where = ""
    if {"num_hosts", "devices_per_host"} <= topology.keys():
        hosts, devices = topology["num_hosts"], topology["devices_per_host"]
        where = f" on {hosts} x {devices} devices"
    how = "ended" if run.summary else "has not ended"
    methods = ", then ".join(_methods(run)) or "an unknown method"
    return f"{run.name}: {methods}{where}; {how}, {run.last_step:,} steps done."


def _unlogged(runs: Sequence[Run]) -> list[str]:
    return [f"{run.name} has logged nothing yet." for run in runs if not run.rows]


def _methods(run: Run) -> list[str]:
    """Method of each phase, as far as settings say."""
    method = _dict_in(run.config, "method")
    schedule = method.get("schedule") or ([method.get("name", "?")] if method else [])
    return [str(entry).partition("@")[0].strip() for entry in schedule]


def _result_table(runs: Sequence[Run]) -> Table | None:
    """Numbers of the summaries, a column per run."""
    ended = [run for run in runs if run.summary]
    names = dict.fromkeys(
        key
        for run in ended
        for key, value in run.summary.items()
        if not isinstance(value, Mapping)
    )
    return _compared("summary", ended, names, lambda run, key: run.summary.get(key))


def _plots(runs: Sequence[Run]) -> Iterator[Plot]:
    """Metrics by step and by bytes, sparsity and bytes by step."""
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    for name in metrics:
        seen = f"{_VALIDATION}{name}"
        yield from _plot(f"{name} (dashed: validation)", runs, "step", name, seen)
    for name in metrics:
        seen = f"{_VALIDATION}{name}"
        title = f"{seen} by bytes over hosts"
        yield from _plot(title, runs, "host_wire_bytes", dashed=seen)
    for name, title in (
        ("sparsity", "sparsity (share of channels removed)"),
        ("host_wire_bytes", "bytes over hosts, per host"),
        ("device_wire_bytes", "bytes inside of hosts, per host"),
        ("learning_rate", "learning rate"),
        ("seconds_per_step_median", "seconds per step (median)"),
    ):
        yield from _plot(title, runs, "step", name)


def _plot(
    title: str, runs: Sequence[Run], over: str, solid: str = "", dashed: str = ""
) -> Iterator[Plot]:
    """A plot of one or two numbers of rows over another; none without points."""
    looks, series = {}, []
    for run, (hue, mark) in zip(runs, itertools.cycle(_HUES), strict=False):
        for key, is_dashed in ((solid, False), (dashed, True)):
            label = f"{run.name}, validation" if is_dashed else run.name
            points = [
                (row[over], row[key])
                for row in run.rows
                if _can_be_drawn(row.get(key)) and _can_be_drawn(row.get(over))
            ]
            if points:
                looks[label] = Look(label, hue, mark, is_dashed=is_dashed)
                series.append(Series(label, points))
    if series:
        across, up = (key.replace("_", " ") for key in (over, solid or dashed))
        most = len(series)
        yield Plot(
            title, title, across, up, series, looks, log="", most_emphasised=most
        )


def _bytes_table(runs: Sequence[Run]) -> Table | None:
    """What each phase has sent over both axes, from the rows of the log."""
    lines = [line for run in runs for line in _phases(run)]
    if not lines:
        return None
    columns: list[Column[Mapping[str, Any]]] = [
        Column("run and phase", lambda line: line["name"]),
        Column("steps", lambda line: line["steps"]),
    ]
    for axis, where in (("host", "between hosts"), ("device", "inside of a host")):
        for key, name in ((axis, where), (f"{axis}_per_step", f"{where},\nper step")):
            columns.append(Column(name, operator.itemgetter(key), shown_bytes))
    notes = [
        "Bytes that one host sends, counted from the programs that ran, as far as rows "
        "were logged; evaluation at the end of a run comes after its last row."
    ]
    return make_table("bytes by axis and phase", columns, lines, notes)


def _phases(run: Run) -> Iterator[dict[str, Any]]:
    """Differences of the totals from phase to phase."""
    methods = _methods(run)
    step, sent = 0, {"host": 0.0, "device": 0.0}
    rows = [row for row in run.rows if is_number(row.get("host_wire_bytes"))]
    for phase, group in itertools.groupby(rows, lambda row: row.get("phase", 0)):
        logged = list(group)
        end = logged[-1]["step"]
        line: dict[str, Any] = {
            "name": f"{run.name}: {methods[phase] if phase < len(methods) else phase}",
            "steps": f"{step} to {end}",
        }
        for axis, before in sent.items():
            key = f"{axis}_wire_bytes"
            totals = [each[key] for each in logged if is_number(each.get(key))]
            added = totals[-1] - before if totals else None
            each_step = None if added is None else added / max(1, end - step)
            line |= {axis: added, f"{axis}_per_step": each_step}
            sent[axis] += added or 0.0
        step = end
        yield line


def _channels_table(run: Run) -> Table | None:
    """What is kept per group: at the end, or at the newest checkpoint."""
    ended = _dict_in(run.summary, "channels_kept")
    saved = _dict_in(run.position, "keep_counts")
    if not ended and not saved:
        return None
    columns: list[Column[str]] = [Column("group", str)]
    notes: tuple[str, ...] = ()
    if ended:
        columns += [
            Column("kept", lambda name: ended[name][0]),
            Column("of", lambda name: ended[name][1]),
            Column("removed", lambda name: _removed(*ended[name])),
        ]
    else:
        columns.append(Column("kept", saved.__getitem__))
        notes = (f"At step {run.position.get('step')}, its newest checkpoint.",)
    last = run.training[-1] if run.training else {}
    for key, values in last.items():
        if isinstance(values, Mapping) and values.keys() & (ended or saved).keys():
            columns.append(Column(key.replace("_", " "), values.get, _written))
    return make_table(f"channels of {run.name}", columns, ended or saved, notes)


def _removed(kept: float, size: float) -> str:
    return f"{1 - kept / max(size, 1):.1%}"


def _health_table(run: Run) -> Table | None:
    """Last and extreme values of what the log says beside metrics and costs."""
    found: dict[str, list[tuple[float, int]]] = {}
    for row in run.training:
        for key in itertools.dropwhile(lambda key: key != _AFTER_METRICS, row):
            if key not in {*_COSTS, _AFTER_METRICS} and is_number(row[key]):
                found.setdefault(key, []).append((row[key], row["step"]))
    if not found:
        return None
    columns: list[Column[str]] = [
        Column("", lambda key: key.replace("_", " ")),
        Column("last", lambda key: found[key][-1][0], _written),
        Column("least", lambda key: min(found[key])[0], _written),
        Column("largest", lambda key: max(found[key])[0], _written),
        Column("at step", lambda key: max(found[key])[1]),
    ]
    notes = ("Of the rows of the log; numbers that are not finite are left out.",)
    return make_table(f"health of {run.name}", columns, found, notes)


def _settings_table(runs: Sequence[Run]) -> Table:
    """All settings, and first those that differ between the runs."""
    settings = [dotted_keys(run.config) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    differ = {key: len({repr(each.get(key)) for each in settings}) > 1 for key in keys}
    rows = tuple(
        (Cell(key), *(Cell(str(each.get(key, "absent"))) for each in settings))
        for key in sorted(keys, key=lambda key: not differ[key])
    )
    notes = (f"{sum(differ.values())} settings differ.",) if len(runs) > 1 else ()
    header = tuple(run.name for run in runs) if len(runs) > 1 else ("value",)
    return Table("settings", ("", *header), rows, notes)


def _compared(
    title: str,
    runs: Sequence[Run],
    names: Iterable[str],
    content: Callable[[Run, str], Any],
) -> Table | None:
    """A line per name, and a column per run."""
    names = list(names)
    if not runs or not names:
        return None
    columns = [
        Column(run.name, functools.partial(content, run), _written) for run in runs
    ]
    return make_table(title, [Column("", str), *columns], names)


def _written(value: float) -> str:
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else digits(value)


def _can_be_drawn(value: Any) -> bool:
    return is_number(value) and abs(value) < _LARGEST


def _dict_in(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A dict within another one; empty where there is none."""
    inner = tree.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _present(*tables: Table | None) -> list[Table]:
    return [table for table in tables if table is not None]
