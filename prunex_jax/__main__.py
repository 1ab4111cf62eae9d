"""The front door: every command of the package by name."""

import importlib
import sys
from collections.abc import Sequence

from prunex_jax import __version__
from prunex_jax.base.command import EXIT_BAD_INPUT
from prunex_jax.base.errors import suggest

# Command -> its module, and what it does.
COMMANDS = {
    "train": (
        "prunex_jax.train.commands.command",
        "Train a network into a run folder.",
    ),
    "supervise": (
        "prunex_jax.train.commands.supervise",
        "Start a command again when its process is lost.",
    ),
    "export": (
        "prunex_jax.train.commands.export",
        "Write the small network of a run as a folder of its own.",
    ),
    "evaluate": (
        "prunex_jax.train.commands.evaluate",
        "Read an exported network back and score it.",
    ),
    "doctor": (
        "prunex_jax.compare.doctor",
        "Examine machines, links and the run folder before a long run.",
    ),
    "drill": (
        "prunex_jax.compare.drill.__main__",
        "Kill, stop and starve a small run, and see whether it comes back.",
    ),
    "advise": (
        "prunex_jax.compare.advise",
        "Measure the links and say which method suits them, if any.",
    ),
    "sweep": (
        "prunex_jax.compare.sweep.__main__",
        "Train rows of settings with several seeds and compare them.",
    ),
    "report": ("prunex_jax.compare.report.run_report", "Write a page of runs."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the command line names.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code of the command; 2 where there is no such command. Without a command
      the help is shown.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(arguments[1:])
    if name in ("", "-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if name == "--version":
        sys.stdout.write(f"prunex-jax {__version__}\n")
        return 0
    known = f"choose one of {', '.join(COMMANDS)}{suggest(name, COMMANDS)}"
    sys.stderr.write(f"error: {name!r} is no command; {known}\n")
    return EXIT_BAD_INPUT


def _help() -> str:
    rows = [f"  {name:<10} {text}\n" for name, (_, text) in COMMANDS.items()]
    return (
        "Trains networks across slow links between hosts, sending only what matters.\n"
        "\n    prunex-jax COMMAND [--flag=value ...]\n\ncommands:\n"
        + "".join(rows)
        + "\nprunex-jax COMMAND --help shows the flags of a command; `python -m\n"
        "prunex_jax` is the same program.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
