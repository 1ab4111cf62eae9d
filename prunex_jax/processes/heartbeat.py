"""Tells what every process of a run does, and ends all of them when one is lost.

A collective waits for ever for a process that has failed, stopped or lost its link. So
a thread of every process writes into a table that all share (`store`) how far it is.
Process 0 reads what all have written, and writes a verdict when one of them has failed
or has been silent for too long; everyone reads the verdict, says it, and ends. Who does
not hear of process 0 any more concludes that it is lost.

Nothing here is a collective, and no step waits for it: a beat is two small messages
every few seconds, whatever the number of processes.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import jax

from prunex_jax.base.command import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_STALLED,
    warn,
)
from prunex_jax.base.errors import AGREED, UserError, one_line
from prunex_jax.processes.store import Store, StoreError
from prunex_jax.processes.stragglers import NO_STEP_TIMES, StepTimes, Stragglers

# Beats within the time after which a silent process counts as lost.
_BEATS = 12
# A phase may take so many times its median so far, where that is more than the limit.
_PATIENCE = 20
# Runs of one program, in order, so that they do not read each other's entries.
_runs = itertools.count()
# Until a traceback is given up that cannot be written.
_WRITE_SECONDS = 3.0
_REMEDY = "start the run again with the same command; it goes on from its checkpoint"


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a process is lost, and when a phase has come to a halt; seconds."""

    silence: float  # Without a beat until a process counts as lost.
    stall: float  # Shortest time until a phase counts as halted; 0 for never.

    @property
    def interval(self) -> float:
        """Between two beats."""
        return self.silence / _BEATS

    @property
    def suspicion(self) -> float:
        """Without a beat until a process is lost for which others wait in vain."""
        return 4 * self.interval


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process says of itself."""

    number: int
    machine: str
    phase: str
    step: int
    # What it has failed of; of that it only waited for others, if `is_victim`.
    error: str = ""
    is_victim: bool = False
    times: StepTimes = NO_STEP_TIMES  # What its steps took.

    @classmethod
    def from_text(cls, text: str) -> "Beat":
        """Reads what `to_text` wrote."""
        content = json.loads(text)
        return cls(**{**content, "times": StepTimes(**content["times"])})

    def to_text(self) -> str:
        """As the table holds it."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"at step {self.step}, phase {self.phase}"

    def failure(self, process: int) -> str:
        """Says that its process has failed."""
        return f"process {process} on {self.machine} failed {self.place}: {self.error}"


class Judge:
    """Finds out from the beats of all processes which of them is lost.

    Args:
      limits: When.
      num_processes: Of the run.
      now: Seconds of the start, by any clock.
    """

    def __init__(self, limits: Limits, num_processes: int, now: float) -> None:
        self._limits = limits
        self._beats: dict[int, Beat] = {}
        self._heard = dict.fromkeys(range(num_processes), now)

    def hear(self, process: int, beat: Beat, now: float) -> None:
        """Takes note of the newest beat of a process."""
        known = self._beats.get(process)
        if known is None or known.number != beat.number:
            self._heard[process] = now
        self._beats[process] = beat

    def verdict(self, now: float) -> str:
        """Which process is lost, since when and where it was; empty if none is."""
        for process, beat in sorted(self._beats.items()):
            if beat.error and not beat.is_victim:
                return beat.failure(process)
        victims = [beat for beat in self._beats.values() if beat.is_victim]
        # Who waits for others in vain says that somebody is lost: then it is who has
        # missed a few beats.
        limit = self._limits.suspicion if victims else self._limits.silence
        for process, heard in sorted(self._heard.items()):
            if now - heard > limit:
                return silent(self._name(process), now - heard, self._place(process))
        if victims and all(beat.is_victim for beat in self._beats.values()):
            return f"the processes have lost each other: {victims[0].error}"
        return ""

    def times(self) -> dict[int, tuple[str, StepTimes]]:
        """The machine and the steps of every process that has been heard of."""
        return {p: (beat.machine, beat.times) for p, beat in self._beats.items()}

    def places(self) -> str:
        """How far every process is, those first that are behind."""
        behind = sorted(self._beats.items(), key=lambda item: item[1].step)
        return "; ".join(f"{self._name(p)} {beat.place}" for p, beat in behind[:8])

    def _name(self, process: int) -> str:
        beat = self._beats.get(process)
        return f"process {process}" + (f" on {beat.machine}" if beat else "")

    def _place(self, process: int) -> str:
        beat = self._beats.get(process)
        return beat.place if beat else "before its first step"


def silent(name: str, seconds: float, place: str) -> str:
    """Says that a process does not answer."""
    return f"{name} has not answered for {seconds:.0f} s; it was {place}"


class Heartbeat:
    """The beats of this process, while it is entered.

    Args:
      limits: When processes are lost, and phases halted.
      ends_process: Whether this process may be ended, as that of a command may; in a
        program of somebody else's only warnings are printed, and errors raised.
      table: For tests; None takes the store of the run's processes.
    """

    def __init__(
        self, limits: Limits, *, ends_process: bool, table: Store | None = None
    ) -> None:
        self._limits, self._ends_process = limits, ends_process
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        self._table = table
        if table is None and self._num_processes > 1:
            self._table = Store(str(next(_runs)))
        self._beat = Beat(0, socket.gethostname(), "start", 0)
        self._phase_began = self._answered = time.monotonic()
        self._durations: dict[str, list[float]] = {}
        self._is_warned = False
        # What process 0 has said last.
        self._last_number = 0
        self._place_of_first, self._places = "before its first step", ""
        self._judge = Judge(limits, self._num_processes, self._answered)
        self._measure: Callable[[], StepTimes] = StepTimes
        self._stragglers = Stragglers(self._answered)
        self._over = threading.Event()
        self._verdict = ""
        self._folder: Path | None = None
        self._threads = [
            threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True)
        ]
        if self._table is not None:
            self._threads.append(
                threading.Thread(target=self._talk, name="heartbeat-talk", daemon=True)
            )
        self._abort: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._num_processes > 1 and ends_process:
            self._abort = _heard_abort(self._aborted)

    def __enter__(self) -> Self:
        self._abort.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, trace
        if error is not None:
            self.fail(error)
        self._over.set()
        self._abort.__exit__(None, None, None)

    def at(self, phase: str, step: int | None = None) -> None:
        """Says what this process does from now on, as in `at('save', 40)`."""
        now, before = time.monotonic(), self._beat
        took = self._durations.setdefault(before.phase, [])
        took.append(now - self._phase_began)
        del took[:-100]
        self._phase_began, self._is_warned = now, False
        self._beat = dataclasses.replace(
            before, phase=phase, step=before.step if step is None else step
        )

    def timed_by(self, measure: Callable[[], StepTimes]) -> None:
        """Takes what every beat asks how long steps take."""
        self._measure = measure

    def writes_into(self, folder: Path) -> None:
        """Takes the folder for what is too long for people."""
        self._folder = folder

    def fail(self, error: BaseException) -> None:
        """Tells the other processes of an error, which they all wait for in vain.

        Where this process may be ended, it ends here; otherwise this returns. Errors
        that all processes raise at the same time are left to their own exit.
        """
        if self._table is None or isinstance(error, AGREED) or self._beat.error:
            return
        is_user_error = isinstance(error, UserError)
        said = " ".join(str(error).split()) if is_user_error else one_line(error)
        is_victim = _is_of_links(error)
        if not is_victim:
            if not is_user_error:
                traceback.print_exception(error)
            whole = dataclasses.replace(self._beat, error=said)
            warn(f"error: {whole.failure(self._process)}")
        self._beat = dataclasses.replace(
            self._beat, error=said[:500], is_victim=is_victim
        )
        self._wait_for_verdict()
        if self._ends_process:
            if is_victim:
                reason = self._verdict or f"the links broke: {said}"
                self._end(f"{reason}{self._kept(error)}", EXIT_LOST)
            _leave(EXIT_BAD_INPUT if is_user_error else EXIT_FAILED)

    def _kept(self, error: BaseException) -> str:
        """Writes down what the runtime says of a lost process, and says where.

        Pages of it would hide the one line that matters; they are printed in front of
        it where there is no file.
        """
        text = "".join(traceback.format_exception(error))
        if self._folder is not None:
            file = self._folder / f"traceback-{self._process}.txt"
            # The folder may lie on the machine that is lost, and then this never ends.
            thread = threading.Thread(target=_write, args=(file, text), daemon=True)
            thread.start()
            thread.join(_WRITE_SECONDS)
            if not thread.is_alive() and file.is_file():
                return f" (traceback in {file})"
        warn(text)
        return ""

    def _wait_for_verdict(self) -> None:
        """Gives the others the time to hear of the error."""
        deadline = time.monotonic() + self._limits.silence + 2 * self._limits.interval
        while not self._verdict and time.monotonic() < deadline:
            self._over.wait(self._limits.interval / 4)
        # Process 0 keeps the table, from which the others have to read the verdict.
        self._over.wait((3 if self._process == 0 else 1) * self._limits.interval)

    def _talk(self) -> None:
        """Writes beats and reads verdicts; a call may wait for long."""
        assert self._table is not None
        for number in itertools.count(1):
            beat = dataclasses.replace(self._beat, number=number, times=self._measure())
            with contextlib.suppress(StoreError):
                self._table.write(f"beats/{self._process}", beat.to_text())
                if self._process == 0:
                    self._judge_all(number)
                self._read_verdict()
            if self._over.wait(self._limits.interval):
                return

    def _judge_all(self, number: int) -> None:
        assert self._table is not None
        beats, now = self._table.read_all("beats"), time.monotonic()
        for process, text in beats.items():
            self._judge.hear(int(process), Beat.from_text(text), now)
        content = {
            "number": number,
            "text": self._judge.verdict(now),
            "place": self._beat.place,
            "places": self._judge.places(),
        }
        self._table.write("verdict/0", json.dumps(content))
        for text in self._stragglers.news(self._judge.times(), now):
            warn(f"warning: {text}")

    def _read_verdict(self) -> None:
        assert self._table is not None
        text = self._table.read_all("verdict").get("0")
        if text is None:
            return
        content = json.loads(text)
        if content["number"] != self._last_number:
            self._last_number, self._answered = content["number"], time.monotonic()
        self._place_of_first = content["place"]
        self._places = content["places"]
        self._verdict = content["text"]

    def _watch(self) -> None:
        """Acts on verdicts, on a silent process 0 and on phases that do not end."""
        while not self._over.wait(self._limits.interval / 2):
            silence = time.monotonic() - self._answered
            is_victim, limits = self._beat.is_victim, self._limits
            limit = limits.suspicion if is_victim else limits.silence
            if self._table is not None and not self._verdict and silence > limit:
                self._verdict = silent("process 0", silence, self._place_of_first)
            # What is read meanwhile may be without one, as where this process was
            # stopped, and the others have left.
            verdict = self._verdict
            if verdict and not self._beat.error:
                if self._process == 0:
                    self._over.wait(3 * self._limits.interval)
                self._end(verdict, EXIT_LOST)
            self._check_phase()

    def _check_phase(self) -> None:
        phase, spent = self._beat.phase, time.monotonic() - self._phase_began
        if not self._limits.stall or self._beat.error:
            return
        usual = statistics.median(self._durations.get(phase) or [0.0])
        limit = max(self._limits.stall, _PATIENCE * usual)
        told = f"{self._beat.place} for {spent:.0f} s (usually {usual:.1f} s)"
        if spent > limit / 2 and not self._is_warned:
            self._is_warned = True
            said = f"process {self._process} is {told}; {self._places}".rstrip("; ")
            warn(f"warning: {said}")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if spent > limit:
            self._end(
                f"process {self._process} is {told}; {self._places}", EXIT_STALLED
            )

    def _aborted(self) -> None:
        """What is said where the runtime gives up: mostly, that process 0 is gone."""
        seconds = time.monotonic() - self._answered
        lost = silent("process 0", seconds, self._place_of_first)
        self._end(self._verdict or f"{lost} (the runtime has given up)", EXIT_LOST)

    def _end(self, reason: str, code: int) -> None:
        if self._over.is_set():
            return
        warn(
            f"error: {reason.rstrip('; ')}; this is process {self._process} on "
            f"{self._beat.machine} {self._beat.place}; {_REMEDY}"
        )
        if self._ends_process:
            _leave(code)
        self._over.set()


def _is_of_links(error: BaseException) -> bool:
    """Whether an error comes from a collective, and so from another process.

    A save that waits for others in vain fails like one that finds no space; what it was
    raised from tells them apart.
    """
    if isinstance(error, UserError):
        told = error.__cause__
        words: tuple[str, ...] = ("Gloo ", "NCCL ", "UNAVAILABLE:", "DEADLINE_EXCEEDED")
        return isinstance(told, RuntimeError | ValueError) and any(
            word in one_line(told) for word in words
        )
    words = ("Gloo", "gloo", "NCCL", "Connection", "UNAVAILABLE", "DEADLINE_EXCEEDED")
    words = (*words, "coordination", "Barrier", "barrier")
    return any(word in one_line(error) for word in words)


def _write(file: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        file.write_text(text)


def _leave(code: int) -> NoReturn:
    """Ends this process without the exit of jax, which waits for all others."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _heard_abort(act: Callable[[], Any]) -> Iterator[None]:
    """Runs something where a library aborts the process, in the aborting thread.

    Python's own handlers run on its main thread, which an abort never reaches.
    """
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda number: act())
    before = library.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        library.signal(signal.SIGABRT, before)
