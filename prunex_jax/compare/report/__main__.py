"""Command line of the page of runs.

    prunex-jax report RUN [RUN ...] [--output=FILE.html]

Writes one HTML page of run folders, finished or not, side by side: curves, bytes by
axis and phase, what is kept per channel group, health, environment, command, settings.
It needs nothing else, and loads nothing. Default of FILE: report.html in the first RUN.
Exit code 0: written; 2: bad input.
"""

import sys
from collections.abc import Sequence

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.base.files import expanded
from prunex_jax.compare.report.run_report import write_runs

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
