"""Processes that are measured: starting them, meeting them at gates, ending them.

`Processes` has the runner's end of the gates, a time limit and the logs. One process
that dies or takes too long ends the others, and what it wrote is shown.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.links.kernel import peak_memory
from prunex_jax.compare.subprocesses import last_lines

# Seconds that a process has to end after it was asked to, before it is killed.
_GRACE_SECONDS = 3.0


class ProcessFailedError(RuntimeError):
    """A process died, or a run took too long; says what the log ends with."""


@dataclasses.dataclass(eq=False)
class _Process:
    """One process and the runner's end of its gate."""

    child: subprocess.Popen[bytes]
    news: int
    orders: int
    log: Path
    unread: bytes = b""


class Processes:
    """The processes of one run; leaving the context ends all that still live.

    Args:
      commands: One per process. `{gate}` in an argument is replaced by the numbers of
        the pipes that it inherits.
      logs: Folder for what they print.
      environ: Environment variables.
      limit_seconds: After that, waiting for them fails.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        logs: Path,
        environ: Mapping[str, str],
        limit_seconds: float,
    ) -> None:
        self._commands = commands
        self._logs = logs
        self._environ = environ
        self._limit = limit_seconds
        self._deadline = 0.0
        self._all: list[_Process] = []

    def __enter__(self) -> "Processes":
        """Starts them all."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._deadline = time.monotonic() + self._limit
        try:
            for number, command in enumerate(self._commands):
                self._all.append(self._start(number, command))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends those that still live."""
        self._end()

    def meet(self, event: str) -> list[dict[str, Any]]:
        """Waits until all are at a gate.

        Raises:
          ProcessFailedError: One died, said something else, or time is over.
        """
        lines: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._all):
                selector.register(process.news, selectors.EVENT_READ, number)
            while len(lines) < len(self._all):
                ready = selector.select(self._remaining(event))
                for key, _ in ready:
                    process = self._all[key.data]
                    chunk = os.read(process.news, 1 << 16)
                    if not chunk:
                        raise self._end_of(key.data, f"ended before {event!r}")
                    process.unread += chunk
                    line, newline, rest = process.unread.partition(b"\n")
                    if newline:
                        lines[key.data], process.unread = line, rest
                        selector.unregister(process.news)
        facts = [dict(json.loads(lines[n])) for n in range(len(self._all))]
        for number, said in enumerate(facts):
            if said["event"] != event:
                raise self._failure(number, f"said {said['event']!r}, not {event!r}")
        return facts

    def release(self) -> None:
        """Lets all go on from the gate."""
        for number, process in enumerate(self._all):
            try:
                os.write(process.orders, b"\n")
            except BrokenPipeError:
                raise self._end_of(number, "ended at a gate") from None

    def wait(self) -> None:
        """Waits until all have ended well.

        Raises:
          ProcessFailedError: One ended with another exit code than 0, or too late.
        """
        for number, process in enumerate(self._all):
            try:
                code = process.child.wait(self._remaining("the end"))
            except subprocess.TimeoutExpired:
                raise self._failure(number, "did not end in time") from None
            if code:
                raise self._failure(number, f"ended with exit code {code}")

    def peak_memory(self) -> int:
        """Largest resident set of a process so far, in bytes; 0 if all have ended."""
        peaks = [peak_memory(process.child.pid) for process in self._all]
        return max(peaks, default=0)

    def _start(self, number: int, command: Sequence[str]) -> _Process:
        with contextlib.ExitStack() as theirs:
            news, their_news = os.pipe()
            theirs.callback(os.close, their_news)
            their_orders, orders = os.pipe()
            theirs.callback(os.close, their_orders)
            log = self._logs / f"process_{number}.log"
            output = theirs.enter_context(open(log, "wb"))
            gate = f"{their_news},{their_orders}"
            child = subprocess.Popen(
                [part.replace("{gate}", gate) for part in command],
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(their_news, their_orders),
                # A Ctrl-C is for the runner, which then ends them.
                start_new_session=True,
            )
        return _Process(child, news, orders, log)

    def _remaining(self, what: str) -> float:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise ProcessFailedError(
                f"{what!r} was not reached within {self._limit:g} s; the logs are in "
                f"{self._logs}, and the study's limit_seconds can be raised"
            )
        return seconds

    def _end_of(self, number: int, what: str) -> ProcessFailedError:
        # Its gate closes while an error leaves it, which is before it prints the error.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._all[number].child.wait(_GRACE_SECONDS)
        return self._failure(number, what)

    def _failure(self, number: int, what: str) -> ProcessFailedError:
        log = self._all[number].log
        shown = "\n".join(f"  | {line}" for line in last_lines(log, 25))
        return ProcessFailedError(f"process {number} {what}; {log} ends with\n{shown}")

    def _end(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            alive = [p for p in self._all if p.child.poll() is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.child.pid, sent)
            deadline = time.monotonic() + _GRACE_SECONDS
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.child.wait(max(0.0, deadline - time.monotonic()))
        for process in self._all:
            os.close(process.news)
            os.close(process.orders)
        self._all = []
