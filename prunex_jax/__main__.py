"""python -m prunex_jax COMMAND: every command of the package by name."""

import importlib
import sys

COMMANDS = {
    "train": "prunex_jax.train.command",
    "evaluate": "prunex_jax.train.evaluate_export",
    "export": "prunex_jax.train.export_command",
    "advise": "prunex_jax.bench.advise",
    "bench": "prunex_jax.bench.__main__",
    "sweep": "prunex_jax.bench.sweep.__main__",
    "report": "prunex_jax.bench.study_report",
}


def main() -> int:
    """Runs the command that the command line names."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.stderr.write(f"error: name a command: {', '.join(COMMANDS)}\n")
        return 2
    return importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
