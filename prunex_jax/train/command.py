"""Command line of training.

    python -m prunex_jax.train --config=FILE[:ARGUMENT] --workdir=FOLDER
        [--config.KEY=VALUE ...] [--fresh]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I] [--launcher=NAME]

The settings come from get_config([ARGUMENT]) of FILE, changed by --config.KEY=VALUE. A
run in FOLDER that was stopped goes on where it was. Exit code 0: ended, or stopped and
saved; 1: diverged; 2: bad input.
"""

import sys
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from prunex_jax.base.command import Command, Flag, Values, call_in_file, run_command
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.mesh import LaunchFlags
from prunex_jax.train.config import dotted_keys
from prunex_jax.train.run import train

CONFIG_FLAG = Flag(
    "config", "", "Config file, and after a colon its argument.", is_required=True
)
# How the processes of a run find each other, unless their launcher tells.
LAUNCH_FLAGS = (
    Flag("coordinator", "", "Address and port of process 0."),
    Flag("num_processes", 0, "Processes of the run."),
    Flag("process_id", -1, "Number of this process."),
    Flag("launcher", "auto", "auto, none, slurm, openmpi or kubernetes."),
)
COMMAND = Command(
    name="prunex_jax.train",
    text=str(__doc__),
    flags=(
        CONFIG_FLAG,
        Flag("workdir", "", "Run folder.", is_required=True),
        Flag("fresh", False, "Start over, removing the run that the folder holds."),
        *LAUNCH_FLAGS,
    ),
    passes_on=lambda argument: argument.lstrip("-").startswith(
        ("config.", "noconfig.")
    ),
    hint="write --config.key=value with an equals sign",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and trains.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    return run_command(COMMAND, _train, arguments)


def load_config(file: str) -> ml_collections.ConfigDict:
    """Loads the settings that a config file gives.

    Args:
      file: Path of a Python file with `get_config`, and after a colon its argument.
    Raises:
      UserError: The file does not exist, cannot be run, or has no `get_config`.
    """
    path, _, argument = file.partition(":")
    given = [argument] if argument else []
    return call_in_file(path, "config", "get_config", *given)


def override_config(
    config: ml_collections.ConfigDict, overrides: Sequence[str]
) -> ml_collections.ConfigDict:
    """Changes settings as the command line says.

    Args:
      config: From `load_config`.
      overrides: As in `--config.data.batch_size=32` or `--noconfig.optimizer.nesterov`.
    Returns:
      The changed settings.
    Raises:
      UserError: Unknown key, with the nearest known one, or a value of another type.
    """
    known = dotted_keys(config.to_dict())
    for override in overrides:
        name = override.lstrip("-").partition("=")[0].removeprefix("no")
        key = name.removeprefix("config.")
        if key not in known:
            raise UserError(f"--{name} is not a setting{suggest(key, known)}")
    values = flags.FlagValues()
    command = ["prunex_jax.train", *overrides]
    config_flags.DEFINE_config_dict(
        "config", config, flag_values=values, sys_argv=command
    )
    values(command)
    return values.config


def given_launch(values: Values) -> LaunchFlags:
    """What a command line says about its launch, in `LAUNCH_FLAGS`."""
    return LaunchFlags(
        coordinator=values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
        launcher=values.launcher,
    )


def _train(values: Values, overrides: list[str]) -> None:
    config = override_config(load_config(values.config), overrides)
    train(
        config,
        values.workdir,
        fresh=values.fresh,
        launch=given_launch(values),
    )


if __name__ == "__main__":
    sys.exit(main())
