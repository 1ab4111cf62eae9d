"""What a study is: rows of settings times seeds, as a small Python file.

A `Sweep` runs its rows on simulated hosts. Studies are read, checked, narrowed and
resolved here.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from prunex_jax.base.command import call_in_file, find_file
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.compare.sweep.figure import Figure
from prunex_jax.methods import find_variants
from prunex_jax.sparsity import validate_sparsity
from prunex_jax.train.build.config import ExperimentConfig, resolve_config
from prunex_jax.train.commands.command import load_config, override_config


@dataclasses.dataclass(frozen=True)
class Row:
    """One method with its settings, as a study runs it."""

    name: str  # Key, and name of its folder: letters, digits, dashes.
    label: str = ""  # What tables call it; empty takes `name`.
    # Dotted key -> value, over the settings of the study.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: str = ""  # Training config it starts from; empty takes that of the study.

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
    return Row(name or found.name, label or found.title, merged)


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
    # What runs it, up to the flag that names its file.
    run_by: ClassVar[str] = ""

    def check(self) -> None:
        """Refuses what cannot be run, whatever the machine.

        Raises:
          UserError: Names the value and the remedy.
        """

    def with_what_is_left(self) -> Self:
        """The study where its lists name nothing that it was narrowed to be without."""
        return self


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
    run_by: ClassVar[str] = "prunex_jax sweep --sweep"

    @property
    def figure(self) -> Figure:
        """The metric, as it is shown."""
        return Figure(self.metric, self.less_is_better)

    def check(self) -> None:
        """See `Study`."""
        names = [row.name for row in self.rows]
        for key in ("baselines", "health_rows"):
            for name in getattr(self, key):
                _check_row(name, names, f"{key} of study {self.name!r} name {name!r}")

    def with_what_is_left(self) -> Self:
        """See `Study`."""
        names = {row.name for row in self.rows}
        return dataclasses.replace(
            self,
            baselines=tuple(name for name in self.baselines if name in names),
            health_rows=tuple(name for name in self.health_rows if name in names),
        )


StudyT = TypeVar("StudyT", bound=Study)


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
    flag = kind.run_by.rpartition("--")[2]
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
    run_by = getattr(study, "run_by", "")
    raise UserError(
        f"get_study() of {file} gave {study!r:.80}, which is no {kind.__name__}"
        + (f"; python -m {run_by}={file} runs it" if run_by else "")
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
    study.check()
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
    return check_study(dataclasses.replace(study, **changes).with_what_is_left())


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
