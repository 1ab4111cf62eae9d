"""What a sweep is: rows of settings times seeds, as a small declarative file.

It owns the description and its checks, and reading it from a file. It leaves running to
`runs`.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prunex_jax.base.command import call_in_file, check_name, take_rows
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import ExperimentConfig
from prunex_jax.sparsity import validate_sparsity
from prunex_jax.train.command import load_config, override_config
from prunex_jax.train.config import resolve_config


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, run once with every seed.

    Attributes:
      name: Key, and name of its folder: letters, digits, dashes.
      label: What tables call it; empty takes `name`.
      settings: Dotted key -> value, over the settings of the sweep.
      config: Training config it starts from; empty takes that of the sweep.
      curve: Rows of one curve, such as one method at several sparsities; empty for a
        row that stands alone.
    """

    name: str
    label: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: str = ""
    curve: str = ""

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.label or self.name


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Rows that are compared with each other.

    Attributes:
      name: Key, and name of its folder.
      config: Training config that rows start from, relative to the sweep's file, with
        its argument after a colon.
      rows: What is compared, in the order of tables.
      settings: Dotted key -> value, over that config, for all rows.
      seeds: Each row runs once with each.
      baselines: Rows that all others are compared with, for instance dense averaging.
      split: What accuracies are of. "validation" is for choosing settings: the test
        split is not even read. "test" is for settings that have been chosen.
      health_rows: Rows whose residuals and drift are plotted.
    """

    name: str
    config: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    baselines: tuple[str, ...] = ()
    split: Literal["validation", "test"] = "test"
    health_rows: tuple[str, ...] = ()


def load_sweep(file: str | Path) -> Sweep:
    """Loads a sweep from a Python file with `get_sweep()`.

    Raises:
      UserError: The file does not exist, cannot be run, gives no sweep, or one that
        cannot be run.
    """
    sweep = call_in_file(file, "sweep", "get_sweep")
    if not isinstance(sweep, Sweep):
        raise UserError(f"get_sweep() of {file} gave {sweep!r}, which is no Sweep")
    return check_sweep(sweep)


def check_sweep(sweep: Sweep) -> Sweep:
    """Refuses what cannot be run, whatever the machine; returns the sweep.

    Raises:
      UserError: Names the value and the remedy.
    """
    names = [row.name for row in sweep.rows]
    for name in (sweep.name, *names):
        check_name(name)
    for what, given in (("row", names), ("seed", [str(s) for s in sweep.seeds])):
        twice = {each for each in given if given.count(each) > 1}
        if twice or not given:
            found = f"{what} {min(twice)} twice" if twice else f"no {what}"
            raise UserError(f"sweep {sweep.name!r} has {found}")
    for what, asked in (
        ("baselines", sweep.baselines),
        ("health_rows", sweep.health_rows),
    ):
        for name in asked:
            if name not in names:
                raise UserError(
                    f"{what} of sweep {sweep.name!r} name {name!r}, which is no row"
                    f"{suggest(name, names)}"
                )
    for settings in (sweep.settings, *(row.settings for row in sweep.rows)):
        for key in ("seed", "run.read_test"):
            if key in settings:
                raise UserError(
                    f"sweep {sweep.name!r} sets {key}, which its seeds and split decide"
                )
    return sweep


def narrow_sweep(
    sweep: Sweep, rows: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Sweep:
    """Takes a part of a sweep; what is empty stays whole.

    Raises:
      UserError: A row that the sweep does not have.
    """
    kept = take_rows(sweep.rows, rows, f"sweep {sweep.name!r}")
    names = {row.name for row in kept}
    return check_sweep(
        dataclasses.replace(
            sweep,
            rows=kept,
            seeds=tuple(seeds) or sweep.seeds,
            baselines=tuple(name for name in sweep.baselines if name in names),
            health_rows=tuple(name for name in sweep.health_rows if name in names),
        )
    )


def overrides_of(sweep: Sweep, row: Row, seed: int) -> list[str]:
    """Command-line arguments that turn the config into this run.

    Example:
      >>> row = Row('small', settings={'model.width': 0.5, 'method.name': 'dense'})
      >>> overrides_of(Sweep('a', 'b.py', (row,)), row, 1)[:2]
      ['--config.model.width=0.5', '--config.method.name=dense']
    """
    settings = {**sweep.settings, **row.settings}
    settings |= {"seed": seed, "run.read_test": sweep.split == "test"}
    return [f"--config.{key}={value}" for key, value in settings.items()]


def config_of(sweep: Sweep, folder: Path, row: Row) -> str:
    """The training config of a row, with its argument, as a path from here."""
    return os.path.normpath(folder / (row.config or sweep.config))


def settings_of(
    sweep: Sweep, folder: Path, row: Row, seed: int, extra: Sequence[str] = ()
) -> ExperimentConfig:
    """The settings of one run, resolved and checked.

    Args:
      sweep: The sweep.
      folder: That of its file.
      row: One of its rows.
      seed: One of its seeds.
      extra: Further `--config.KEY=VALUE`.
    Raises:
      UserError: A setting that does not exist, or values that cannot run.
    """
    config = load_config(config_of(sweep, folder, row))
    overrides = [*overrides_of(sweep, row, seed), *extra]
    try:
        resolved = resolve_config(override_config(config, overrides))
        validate_sparsity(resolved.sparsity)
    except UserError as error:
        raise UserError(f"row {row.name}: {error}") from error
    return resolved
