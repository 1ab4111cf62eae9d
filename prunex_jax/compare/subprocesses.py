"""Processes that this one starts: their environment, their ports, how they end."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prunex_jax.base.signals import STOPPING, handling
from prunex_jax.base.timing import meanwhile


def environment_of_process() -> dict[str, str]:
    """Environment of a process that is started: their output can be followed."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A TCP port of this machine that nobody listens at."""
    with socket.socket() as asked:
        asked.bind(("", 0))
        return int(asked.getsockname()[1])


def last_lines(log: Path, count: int) -> list[str]:
    """The end of what a process has printed; [] if it never began."""
    if not log.exists():
        return []
    return log.read_text(errors="replace").splitlines()[-count:]


@contextlib.contextmanager
def following(
    log: Path, say: Callable[[str], None], seconds: float = 10
) -> Iterator[None]:
    """Says the newest line of a log every few seconds, where there is a new one.

    What writes the log need not have begun; `say` is called on another thread.
    """
    said = last_lines(log, 1)

    def follow() -> None:
        nonlocal said
        newest = last_lines(log, 1)
        if newest and newest != said:
            said = newest
            say(newest[0].strip())

    with meanwhile("following", follow, lambda: seconds):
        yield


def run_process(command: Sequence[str], log: Path) -> int:
    """Runs a command, appends its output to a file, and returns its exit code.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 are handed to it as SIGTERM, so that it can
    save and end; then this process ends. If it went on alone, it would be in the way of
    the next one.
    """
    heard: list[int] = []
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment_of_process()
        ) as process,
    ):

        def hear(number: int, frame: object) -> None:
            del frame
            heard.append(number)
            process.terminate()

        with handling((signal.SIGINT, *STOPPING), hear):
            code = process.wait()
    if heard:
        signal.raise_signal(heard[0])
    return code
