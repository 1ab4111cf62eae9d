"""Command line of training.

    python -m prunex_jax.train --config=FILE[:ARGUMENT] --workdir=FOLDER
        [--config.KEY=VALUE ...] [--fresh]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I] [--launcher=NAME]

The settings come from get_config([ARGUMENT]) of FILE, changed by --config.KEY=VALUE. A
run in FOLDER that was stopped goes on where it was. Exit code 0: ended, or stopped and
saved; 1: diverged; 2: bad input.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_collections
from absl import flags
from ml_collections import config_flags

from prunex_jax.config import dotted_keys, suggest
from prunex_jax.errors import TrainingDivergedError, UserError
from prunex_jax.run import train
from prunex_jax.topology import LaunchFlags

EXIT_DIVERGED = 1
EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and trains.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(f"{__doc__}\n")
        return 0
    try:
        values, overrides = _parse_flags(arguments)
        config = override_config(load_config(values.config), overrides)
        train(
            config,
            values.workdir,
            fresh=values.fresh,
            launch=LaunchFlags(
                coordinator=values.coordinator,
                num_processes=values.num_processes,
                process_id=values.process_id,
                launcher=values.launcher,
            ),
        )
    except TrainingDivergedError as error:
        return _fail(error, EXIT_DIVERGED)
    except (UserError, flags.Error) as error:
        return _fail(error, EXIT_BAD_INPUT)
    return 0


def load_config(file: str) -> ml_collections.ConfigDict:
    """Loads the settings that a config file gives.

    Args:
      file: Path of a Python file with `get_config`, and after a colon its argument.
    Raises:
      UserError: The file does not exist, cannot be run, or has no `get_config`.
    """
    path, _, argument = file.partition(":")
    if not Path(path).is_file():
        raise UserError(f"--config={path} is not a file; configs/ has examples")
    spec = importlib.util.spec_from_file_location("prunex_jax_config", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Config files build on their neighbours, as in `import cifar10_resnet20_hsadmm`.
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(module)
        return module.get_config(*([argument] if argument else []))
    except UserError:
        raise
    except Exception as error:
        what = " ".join(str(error).split())
        raise UserError(
            f"--config={file} cannot be loaded: {type(error).__name__}: {what}"
        ) from error
    finally:
        sys.path.remove(str(Path(path).parent))


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


def _parse_flags(arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Splits the command line into our flags and overrides of settings."""
    overrides: list[str] = []
    own: list[str] = []
    for argument in arguments:
        is_override = argument.lstrip("-").startswith(("config.", "noconfig."))
        (overrides if is_override else own).append(argument)
    values = flags.FlagValues()
    _define_flags(values)
    rest = values(["prunex_jax.train", *own])[1:]
    if rest:
        raise UserError(
            f"argument {rest[0]!r} is not understood; write --config.key=value with an "
            "equals sign"
        )
    for name in ("config", "workdir"):
        if not values[name].value:
            raise UserError(f"--{name} is required; --help shows the command line")
    return values, overrides


def _define_flags(values: flags.FlagValues) -> None:
    def string(name: str, default: str, text: str) -> None:
        flags.DEFINE_string(name, default, text, flag_values=values)

    string("config", "", "Config file, and after a colon its argument.")
    string("workdir", "", "Run folder.")
    string("coordinator", "", "Address and port of process 0.")
    string("launcher", "auto", "auto | none | slurm | openmpi | kubernetes")
    flags.DEFINE_integer("num_processes", 0, "Processes.", flag_values=values)
    flags.DEFINE_integer("process_id", -1, "Of this process.", flag_values=values)
    flags.DEFINE_bool("fresh", False, "Start over.", flag_values=values)


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
