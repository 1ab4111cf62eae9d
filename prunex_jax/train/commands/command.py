"""Command line of training.

    prunex-jax train --config=FILE[:ARGUMENT] --workdir=FOLDER
        [--config.KEY=VALUE ...] [--fresh] [--exact_topology] [--dry_run[=HOW]]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I] [--launcher=NAME]
        [--stopped_exit_code=75]

FILE is a path, or the name of a config that comes with the package. Its
get_config([ARGUMENT]) gives the settings, which --config.KEY=VALUE changes. A run in
FOLDER that was stopped goes on where it was. --dry_run prints what it will need, and
writes nothing. Exit code 0: ended; 75: stopped and saved, and the same command goes on;
1: diverged; 2: bad input. `python -m prunex_jax.train` is the same command.
"""

import ast
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prunex_jax.base.command import (
    EXIT_STOPPED,
    Command,
    Flag,
    Values,
    call_in_file,
    run_command,
    true_or_false,
)
from prunex_jax.base.errors import RunStopped, UserError, suggest

# What takes seconds to import is imported where it is used: `--help` and bad flags need
# not wait for it.
if TYPE_CHECKING:
    import ml_collections

    from prunex_jax.processes import LaunchFlags

CONFIG_FLAG = Flag(
    "config",
    "",
    "Config file or the name of a shipped one, and after a colon its argument.",
    is_required=True,
)
# How the processes of a run find each other, unless their launcher tells.
LAUNCH_FLAGS = (
    Flag("coordinator", "", "Address and port of process 0."),
    Flag("num_processes", 0, "Processes of the run."),
    Flag("process_id", -1, "Number of this process."),
    Flag(
        "launcher",
        "auto",
        "auto, none, or one of openmpi, slurm, pmi, torchrun, kubeflow, kubernetes and "
        "skypilot.",
    ),
)
_PLUGINS = "method.plugins"
COMMAND = Command(
    text=str(__doc__),
    flags=(
        CONFIG_FLAG,
        Flag("workdir", "", "Run folder.", is_required=True),
        Flag("fresh", False, "Start over, removing the run that the folder holds."),
        Flag(
            "exact_topology",
            False,
            "Refuse to go on on another number of hosts, or of devices per host.",
        ),
        Flag(
            "dry_run",
            "",
            "Compile, say what the run will need, and write nothing into its folder; "
            "`measure` times a step as well, `h100:2x8` compiles for 2 hosts with 8 "
            "H100 each that need not be here.",
            bare="compile",
        ),
        Flag(
            "stopped_exit_code",
            EXIT_STOPPED,
            "Exit code of a run that was stopped and saved; 0 says no more than ended.",
        ),
        *LAUNCH_FLAGS,
    ),
    takes_settings=True,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and trains."""
    return run_command(COMMAND, _train, arguments)


def load_config(file: str) -> "ml_collections.ConfigDict":
    """Loads the settings that a config file gives.

    Args:
      file: Path of a Python file with `get_config`, or the name of one that comes with
        the package; after a colon the argument of `get_config`.
    Raises:
      UserError: The file does not exist, cannot be run, or has no `get_config` that
        gives settings.
    """
    name, _, argument = file.partition(":")
    given = [argument] if argument else []
    config = call_in_file(name, "config", "get_config", *given)
    _check_is_config(config, f"--config={file}")
    return config


def _check_is_config(config: Any, flag: str) -> None:
    """Refuses what is not made of `default_config()`."""
    import ml_collections

    from prunex_jax.train.build.config import default_config

    remedy = "; return what prunex_jax.default_config() makes, changed"
    kind = ml_collections.ConfigDict
    is_frozen = isinstance(config, ml_collections.FrozenConfigDict)
    if not isinstance(config, kind) or is_frozen:
        what = type(config).__name__
        raise UserError(f"{flag}: get_config gives {what}, not settings{remedy}")
    for name, section in default_config().items():
        if isinstance(section, kind) and not isinstance(config.get(name), kind):
            raise UserError(f"{flag}: get_config gives no section {name!r}{remedy}")


def override_config(
    config: "ml_collections.ConfigDict", overrides: Sequence[str]
) -> "ml_collections.ConfigDict":
    """Changes settings as the command line says; `resolve_config` checks them.

    Args:
      config: From `load_config`; changed in place.
      overrides: As in `--config.data.batch_size=32` or `--noconfig.optimizer.nesterov`.
        A tuple is written as in Python, or its key is given once for each element.
    Raises:
      UserError: Unknown key, with the nearest known one, or a value of another type.
    """
    from prunex_jax.train.build.config import add_plugins, dotted_keys

    add_plugins(config)
    known = dotted_keys(config.to_dict())
    tuples: dict[str, tuple[Any, ...]] = {}
    # Plugins first: they bring settings that others may change.
    for override in sorted(overrides, key=lambda each: _PLUGINS not in each):
        name, has_value, text = override.removeprefix("--").partition("=")
        is_negated = name.startswith("no")
        key = name.removeprefix("no").removeprefix("config.")
        if key not in known:
            raise UserError(f"--{name} is not a setting{suggest(key, known)}")
        *sections, last = key.split(".")
        section = functools.reduce(getattr, sections, config)
        kind = section.get_type(last)
        if kind is bool and not has_value:
            value: Any = not is_negated
        elif is_negated or not has_value:
            raise UserError(f"--{name} needs a value: --config.{key}=...")
        elif kind in (tuple, list):
            tuples[key] = value = tuples.get(key, ()) + _parse_tuple(name, text)
        else:
            value = _parse_value(name, text, kind)
        section[last] = value
        if key == _PLUGINS:
            add_plugins(config)
            known = dotted_keys(config.to_dict())
    return config


def _parse_value(name: str, text: str, kind: type) -> Any:
    try:
        return true_or_false(text) if kind is bool else kind(text)
    except ValueError as error:
        raise UserError(f"--{name}={text} should be of type {kind.__name__}") from error


def _parse_tuple(name: str, text: str) -> tuple[Any, ...]:
    """Reads `("a", "b")`, or one element without quotes."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        if "," in text:
            raise UserError(
                f'--{name}={text} is no tuple; write it as in ("a", "b")'
            ) from error
        value = text
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def given_launch(values: Values) -> "LaunchFlags":
    """What a command line says about its launch, in `LAUNCH_FLAGS`."""
    from prunex_jax.processes import LaunchFlags

    return LaunchFlags(
        coordinator=values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
        launcher=values.launcher,
        owns_process=True,
    )


def _train(values: Values, overrides: list[str]) -> int:
    code = int(values.stopped_exit_code)
    if not 0 <= code <= 255:
        raise UserError(f"--stopped_exit_code={code} must be from 0 to 255")
    config = override_config(load_config(values.config), overrides)
    if values.dry_run:
        from prunex_jax.train.build.config import resolve_config
        from prunex_jax.train.commands.dry_run import dry_run

        settings, launch = resolve_config(config), given_launch(values)
        dry_run(settings, values.workdir, how=values.dry_run, launch=launch)
        return 0
    from prunex_jax.train.run import train

    try:
        train(
            config,
            values.workdir,
            fresh=values.fresh,
            exact_topology=values.exact_topology,
            launch=given_launch(values),
        )
    except RunStopped:
        return code
    return 0
