"""Command line: python -m prunex_jax.train --config=configs/....py --workdir=..."""

import sys
from collections.abc import Sequence

from absl import app, flags
from ml_collections import config_flags

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
      The exit code: 0 for a run that ended or was stopped and saved, 1 for one that
      diverged, 2 for bad input.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    values = flags.FlagValues()
    config_flag = _define_flags(values)
    try:
        rest = values(["prunex_jax.train", *arguments])[1:]
        if rest:
            raise UserError(f"unknown argument {rest[0]!r}; every setting is a flag")
        train(
            config_flag.value,
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
