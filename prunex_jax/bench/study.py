"""What a study is: rows of settings times seeds, as a small Python file.

There are two kinds. A `LinkStudy` runs its rows on real processes over links of several
speeds (`bench.links`), a `Sweep` on simulated hosts (`bench.sweep`). Both are read,
checked, narrowed and resolved here.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from prunex_jax.base.command import call_in_file, find_file
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.bench.figure import Figure
from prunex_jax.methods import find_variants
from prunex_jax.sparsity import validate_sparsity
from prunex_jax.train.command import load_config, override_config
from prunex_jax.train.config import ExperimentConfig, resolve_config

UNLIMITED = "unlimited"
STEP_TIME = "step_time"
_SPEED = re.compile(r"([0-9.]+) Mbit/s")
_RATIO = re.compile(r"r=([0-9.]+)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One method with its settings, or one peer, as a study runs it."""

    name: str  # Key, and name of its folder: letters, digits, dashes.
    label: str = ""  # What tables call it; empty takes `name`.
    # Dotted key -> value, over the settings of the study.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: str = ""  # Training config it starts from; empty takes that of the study.
    # Rows of one curve, such as one method at several sparsities; empty for a row that
    # stands alone.
    curve: str = ""
    period: int = 1  # Steps after which the pattern of exchanges repeats.
    # jax (this package) | torch (DistributedDataParallel with gloo).
    runtime: Literal["jax", "torch"] = "jax"
    # What torch does to gradients: dense | fp16 | powersgd.
    hook: Literal["dense", "fp16", "powersgd"] = "dense"
    exchange_only: bool = False  # Whether a step is a dense exchange and nothing else.
    processes_per_host: int = 1  # Of torch, whose users start one per device.

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.label or self.name


def variant_rows(*names: str) -> tuple[Row, ...]:
    """Rows of variants of registered methods.

    Raises:
      UserError: No registered method has such a variant.
    """
    return tuple(variant_row(name) for name in names)


def variant_row(variant: str, name: str = "", label: str = "", **settings: Any) -> Row:
    """A row of a variant of a registered method, with changes.

    Args:
      variant: Name of a `methods.Variant`.
      name: Of the row; empty takes that of the variant.
      label: Of the row; empty takes the variant's title.
      **settings: Dotted key -> value, over those of the variant.
    Raises:
      UserError: No registered method has such a variant.
    Example:
      >>> row = variant_row('topk', 'dense-topk', **{'method.topk.density': 0.1})
      >>> row.title, row.settings
      ('Top-K, 1 %', {'method.name': 'topk', 'method.topk.density': 0.1})
    """
    (found,) = find_variants(variant)
    merged = {**found.settings, **settings}
    return Row(name or found.name, label or found.title, merged, period=found.period)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Rows that are compared with each other."""

    name: str  # Key, and name of its folder.
    # Training config that rows start from, relative to the study's file, with its
    # argument after a colon.
    config: str
    rows: tuple[Row, ...]  # What is compared, in the order of tables.
    # Dotted key -> value, over that config, for all rows.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)  # Each row runs once with each.
    # `--config.KEY=VALUE` of the command line, over the settings of rows.
    overrides: tuple[str, ...] = ()
    reserved: ClassVar[tuple[str, ...]] = ()  # Keys that the study itself decides.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Study):
    """Rows on simulated hosts: a metric per byte, with its spread over seeds."""

    seeds: tuple[int, ...] = (0, 1, 2)
    # Rows that all others are compared with, for instance dense averaging.
    baselines: tuple[str, ...] = ()
    # What the metric is of. "validation" is for choosing settings: the test split is
    # not even read. "test" is for settings that have been chosen.
    split: Literal["validation", "test"] = "test"
    # What rows are compared by: accuracy, or another metric of the task.
    metric: str = "accuracy"
    less_is_better: bool = False  # Whether that is a loss, or the like.
    health_rows: tuple[str, ...] = ()  # Rows whose residuals and drift are plotted.
    reserved: ClassVar[tuple[str, ...]] = ("seed", "run.read_test")

    @property
    def figure(self) -> Figure:
        """The metric, as it is shown."""
        return Figure(self.metric, self.less_is_better)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkStudy(Study):
    """Rows on hosts joined by links of several speeds."""

    num_hosts: tuple[int, ...] = (2,)  # Sizes of the host axis, one after the other.
    devices_per_host: int = 1  # Virtual CPU devices of every host.
    # "100 Mbit/s", "unlimited", or "r=4": so slow that one exchange of hierarchical
    # dense float32 takes 4 times the computation of a step.
    links: tuple[str, ...] = (UNLIMITED,)
    # Those links that the model of cost is not fitted to, but checked on.
    held_out: tuple[str, ...] = ()
    # step_time (steady steps, all links in one run per row), or a metric of the task,
    # such as accuracy or bits_per_byte (whole runs, one per row, link and seed).
    goal: str = STEP_TIME
    less_is_better: bool = False  # Whether that metric is a loss, or the like.
    # Measured rounds of `Row.period` steps per link; one more goes before.
    rounds: int = 5
    # Values of that metric, on the validation split, whose time is asked for.
    targets: tuple[float, ...] = ()
    # Examples of the validation split that are scored, spread evenly over it; 0: all.
    scored_examples: int = 0
    # Pause in every step that stands for the computation of the whole batch on one
    # host; each of n hosts pauses for an n-th. 0: none.
    stand_in_seconds: float = 0.0
    # Time for one row on one number of hosts; what takes longer is killed.
    limit_seconds: float = 900.0

    @property
    def figure(self) -> Figure | None:
        """What whole runs are scored by; None where steps are timed."""
        is_timed = self.goal == STEP_TIME
        return None if is_timed else Figure(self.goal, self.less_is_better)


StudyT = TypeVar("StudyT", bound=Study)
# Kind -> the command that runs it, and the flag that names its file.
_COMMANDS = {LinkStudy: ("bench", "study"), Sweep: ("sweep", "sweep")}


def load_study(
    file: str | Path, kind: type[StudyT], overrides: Sequence[str] = ()
) -> StudyT:
    """Loads a study from a Python file with `get_study()`.

    Args:
      file: Its path, or the name of a shipped one; it may import its neighbours.
      kind: What it must give.
      overrides: As of `Study`.
    Returns:
      The study, with the paths of training configs as they are from here.
    Raises:
      UserError: The file does not exist, cannot be run, gives another kind of study or
        none, or one that cannot be run.
    """
    flag = _COMMANDS[kind][1]
    study = call_in_file(file, flag, "get_study")
    if isinstance(study, kind):
        folder = find_file(file, flag).parent

        def found(config: str) -> str:
            return os.path.normpath(folder / config)

        rows = tuple(
            dataclasses.replace(row, config=found(row.config or study.config))
            for row in study.rows
        )
        study = dataclasses.replace(
            study, config=found(study.config), rows=rows, overrides=tuple(overrides)
        )
        return check_study(study)
    command, flag = _COMMANDS.get(type(study), ("", ""))
    remedy = f"; python -m prunex_jax {command} --{flag}={file} runs it"
    raise UserError(
        f"get_study() of {file} gave {study!r:.80}, which is no {kind.__name__}"
        f"{remedy if command else ''}"
    )


def check_study(study: StudyT) -> StudyT:
    """Refuses what cannot be run, whatever the machine; returns the study.

    Raises:
      UserError: Names the value and the remedy.
    """
    names = [row.name for row in study.rows]
    for name in (study.name, *names):
        if not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise UserError(f"name {name!r} may have letters, digits and dashes only")
    for what, given in (("row", names), ("seed", list(map(str, study.seeds)))):
        twice = {each for each in given if given.count(each) > 1}
        if twice or not given:
            found = f"{what} {min(twice)} twice" if twice else f"no {what}"
            raise UserError(f"study {study.name!r} has {found}")
    for settings in (study.settings, *(row.settings for row in study.rows)):
        for key in {*study.reserved} & {*settings}:
            raise UserError(
                f"study {study.name!r} sets {key}, which its seeds and split decide"
            )
    if isinstance(study, LinkStudy):
        _check_links(study)
    if isinstance(study, Sweep):
        for key in ("baselines", "health_rows"):
            for name in getattr(study, key):
                _check_row(name, names, f"{key} of study {study.name!r} name {name!r}")
    return study


def narrow_study(
    study: StudyT, rows: Sequence[str] = (), **parts: Sequence[Any]
) -> StudyT:
    """Takes a part of a study; what is empty stays whole.

    Args:
      study: The study.
      rows: Names of rows, in the order wanted.
      **parts: Other values of its fields, such as seeds or links.
    Raises:
      UserError: A row that the study does not have, or values that it cannot have.
    """
    known = {row.name: row for row in study.rows}
    for name in rows:
        _check_row(name, known, f"--rows names {name!r}")
    kept = tuple(known[name] for name in rows) or study.rows
    changes: dict[str, Any] = {"rows": kept}
    changes |= {key: tuple(values) for key, values in parts.items() if values}

    def of(given: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in given if name in names)

    if isinstance(study, LinkStudy):
        changes["held_out"] = of(study.held_out, changes.get("links", study.links))
    if isinstance(study, Sweep):
        names = {row.name for row in kept}
        changes["baselines"] = of(study.baselines, names)
        changes["health_rows"] = of(study.health_rows, names)
    return check_study(dataclasses.replace(study, **changes))


def check_goal(goal: str, metrics: Collection[str]) -> None:
    """Refuses a goal that is none of the metrics that a task measures.

    Raises:
      UserError: Names them.
    """
    if goal not in metrics:
        raise UserError(
            f"goal={goal!r} is neither {STEP_TIME!r} nor measured by the task of the "
            f"study{suggest(goal, metrics)} (it measures {', '.join(metrics)})"
        )


def whole_numbers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """Numbers of a flag that takes several.

    Raises:
      UserError: One is no whole number.
    Example:
      >>> whole_numbers('seeds', ('0', '1'))
      (0, 1)
    """
    if not all(value.isdigit() for value in values):
        raise UserError(f"--{flag}={','.join(values)} is not a list like 2,4")
    return tuple(map(int, values))


def link_megabits(link: str, seconds_per_r: float, dense_bytes: float) -> float | None:
    """Speed of a link in Mbit/s; None if it is unlimited.

    Args:
      link: As in `LinkStudy.links`.
      seconds_per_r: Computation of a step, which r multiplies.
      dense_bytes: What a host sends in a hierarchical dense float32 exchange.
    Raises:
      UserError: Not understood.
    Example:
      >>> link_megabits('r=4', 0.5, 1e6), link_megabits('100 Mbit/s', 0.5, 1e6)
      (4.0, 100.0)
    """
    if link == UNLIMITED:
        return None
    if match := _SPEED.fullmatch(link):
        return float(match[1])
    if match := _RATIO.fullmatch(link):
        return 8 * dense_bytes / 1e6 / (float(match[1]) * seconds_per_r)
    raise UserError(
        f"link {link!r} is not understood; write '100 Mbit/s', 'r=4' or '{UNLIMITED}'"
    )


def overrides_of(study: Study, row: Row, own: Mapping[str, Any]) -> list[str]:
    """Command-line arguments that turn the config into a run of a row.

    Example:
      >>> row = Row('small', settings={'model.width': 0.5, 'method.name': 'dense'})
      >>> overrides_of(Sweep(name='a', config='b.py', rows=(row,)), row, {'seed': 1})
      ['--config.model.width=0.5', '--config.method.name=dense', '--config.seed=1']
    """

    def flags(settings: Mapping[str, Any]) -> list[str]:
        return [f"--config.{key}={value}" for key, value in settings.items()]

    return [*flags({**study.settings, **row.settings}), *study.overrides, *flags(own)]


def settings_of(study: Study, row: Row, own: Mapping[str, Any]) -> ExperimentConfig:
    """The settings of one run of a row, resolved and checked.

    Raises:
      UserError: A setting that does not exist, or values that cannot run.
    """
    config = load_config(row.config or study.config)
    try:
        overridden = override_config(config, overrides_of(study, row, own))
        resolved = resolve_config(overridden)
        validate_sparsity(resolved.sparsity)
    except UserError as error:
        raise UserError(f"row {row.name}: {error}") from error
    return resolved


def _check_row(name: str, known: Iterable[str], what: str) -> None:
    if name not in known:
        raise UserError(
            f"{what}, which is no row{suggest(name, known)} "
            f"(there are {', '.join(known)})"
        )


def _check_links(study: LinkStudy) -> None:
    for link in study.links:
        link_megabits(link, 1.0, 1.0)
    if not set(study.held_out) <= set(study.links):
        raise UserError(f"held_out={study.held_out} has links that are not measured")
    numbers = {
        "num_hosts": min(study.num_hosts, default=0),
        "devices_per_host": study.devices_per_host,
        "rounds": study.rounds,
        "links": len(study.links),
        "limit_seconds": study.limit_seconds,
        "period": min(row.period for row in study.rows),
        "processes_per_host": min(row.processes_per_host for row in study.rows),
    }
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"study {study.name!r}: {name}={value} must be at least 1")
    for row in study.rows:
        if row.runtime == "jax" and row.processes_per_host > 1:
            raise UserError(
                f"row {row.name!r}: processes_per_host={row.processes_per_host} is for "
                "torch; a jax host is one process with devices_per_host devices"
            )
    for name in ("stand_in_seconds", "scored_examples"):
        if getattr(study, name) < 0:
            raise UserError(f"{name}={getattr(study, name)} must not be negative")
