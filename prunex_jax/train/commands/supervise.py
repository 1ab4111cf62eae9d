"""Starts a command again when its process is lost, on every host of a run.

    prunex-jax supervise [--restarts=10] [--pause=5] -- COMMAND ...

Run it in place of the command on every host, as in

    srun --no-kill --kill-on-bad-exit=0 --wait=0 \\
        prunex-jax supervise -- python -m prunex_jax.train --config=... --workdir=...

A process that fails, stalls, is killed or has lost another one ends with an exit code
that says so; then COMMAND is started again, up to --restarts times, and goes on from
the last checkpoint of its run folder. Ended, diverged, refused and stopped runs are not
started again; their exit code is that of this command. Signals go on to COMMAND, which
is not started again after one.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from prunex_jax.base.command import (
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_STALLED,
    Command,
    Flag,
    Values,
    run_command,
    warn,
)
from prunex_jax.base.errors import UserError
from prunex_jax.base.signals import STOPPING, handling

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("restarts", 10, "How often to start again.", at_least=0),
        Flag(
            "pause",
            5,
            "Seconds before that, in which the other processes end too.",
            at_least=0,
        ),
    ),
)
# What a new start may help with; so does any signal that has killed the process.
_LOST = (EXIT_LOST, EXIT_FAILED, EXIT_STALLED)
_HANDED_ON = (signal.SIGINT, *STOPPING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and supervises."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[split + 1 :]

    def supervised(values: Values, settings: list[str]) -> int:
        del settings
        if not command:
            raise UserError("there is no command after --; --help shows an example")
        return supervise(command, values.restarts, values.pause)

    return run_command(COMMAND, supervised, arguments[:split])


def supervise(command: Sequence[str], restarts: int, pause: float) -> int:
    """Runs a command, again where its process was lost.

    Returns:
      Its last exit code; 128 and the number of the signal that has killed it.
    Raises:
      UserError: There is no such program.
    """
    heard: list[int] = []
    for start in range(restarts + 1):
        code = _run(command, heard)
        if heard or not (code in _LOST or code < 0) or start == restarts:
            break
        warn(
            f"supervise: the command ended with {_named(code)}; start {start + 2} of "
            f"at most {restarts + 1} in {pause:g} s"
        )
        time.sleep(pause)
    return code if code >= 0 else 128 - code


def _run(command: Sequence[str], heard: list[int]) -> int:
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r} ({error.strerror})") from error

    def hear(number: int, frame: object) -> None:
        del frame
        heard.append(number)
        process.send_signal(number)

    with process, handling(_HANDED_ON, hear):
        return process.wait()


def _named(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
