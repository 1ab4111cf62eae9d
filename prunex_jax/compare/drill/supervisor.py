"""Starts one process of the runs of a drill, does faults to it, records how it ended.

Supervisors of one drill, threads of one machine or processes of a cluster, do not talk
to each other: each writes a record into the folder that they share when its process has
ended, and starts the next one when the records of all are there. Whoever has done a
fault writes its record last, when it has taken the fault back.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prunex_jax.base.files import write_json
from prunex_jax.compare.drill.crew import Crew, DrillFailedError, Record
from prunex_jax.compare.drill.plan import FAULTS, HANG, LINK, MOVED, STOP, Plan, Start
from prunex_jax.compare.subprocesses import environment_of_process

_LOOK_SECONDS = 0.02
# A process that hangs is ended by its own limit, which compiling must not reach.
_STALL_SECONDS = 40
# For a stopped process that goes on again, until it ends by itself.
_BACK_SECONDS = 90.0
_RESUMED = re.compile(r"resumed at step (\d+)")


class Supervisor:
    """Runs process `process` of every start of a drill."""

    def __init__(self, process: int, crew: Crew, say: Callable[[str], None]) -> None:
        self._process, self._crew, self._say = process, crew, say
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, plans: Sequence[Plan]) -> None:
        """Runs all that is not recorded yet, while the other supervisors go on."""
        for plan in plans:
            for start in plan.starts:
                if not self._crew.is_recorded(start):
                    self._run_start(start)

    def kill(self) -> None:
        """Ends the process that runs, with all that it has started."""
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _run_start(self, start: Start) -> None:
        blow = start.blow
        own = blow if blow and blow.process == self._process else None
        deadline = time.monotonic() + self._crew.limit_seconds
        progress = self._crew.record_file(start, self._process).with_suffix(".step")
        with self._running(start, progress) as child:
            acted = None
            if own and _wait_for_step(own.step, progress, child, deadline):
                acted = time.time()
                self._act(start, own.fault, child)
            if own and own.fault == STOP:
                # It may come back when all others have ended.
                self._wait_for_others(start, deadline + _BACK_SECONDS)
                child.send_signal(signal.SIGCONT)
                deadline = time.monotonic() + _BACK_SECONDS
            code = _wait_for_end(child, deadline)
            ended = time.time()
            self.kill()
            left_over = _end_session(child.pid)
        step, digest = _read_progress(progress)
        log = self._crew.log(start, self._process).read_text(errors="replace")
        resumed = _RESUMED.search(log)
        record = Record(
            self._process,
            code,
            step,
            ended,
            acted,
            resumed=int(resumed[1]) if resumed else 0,
            digest=digest,
            left_over=left_over,
        )
        limit = time.monotonic() + self._crew.limit_seconds + 2 * _BACK_SECONDS
        if own:
            self._wait_for_others(start, limit)
            self._take_back(start, own.fault)
        write_json(
            self._crew.record_file(start, self._process), dataclasses.asdict(record)
        )
        self._wait_for_others(start, limit)
        if self._process == 0:
            self._say(_line(start, self._crew.records(start)))

    @contextlib.contextmanager
    def _running(self, start: Start, progress: Path) -> Any:
        """The process of a start, whose output goes to its log."""
        crew, log = self._crew, self._crew.log(start, self._process)
        for file in (log, progress):
            file.parent.mkdir(parents=True, exist_ok=True)
        command = crew.hosts.command(self._process, self._command(start, progress))
        with log.open("wb", buffering=0) as output:
            # Through a pipe, which limits of file sizes do not reach.
            child = self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=environment_of_process(),
                start_new_session=True,
            )
            assert child.stdout is not None
            streams = (child.stdout, output)
            copier = threading.Thread(
                target=shutil.copyfileobj, args=streams, daemon=True
            )
            copier.start()
            try:
                yield child
            finally:
                self.kill()
                copier.join(10)

    def _command(self, start: Start, progress: Path) -> list[str]:
        crew, blow = self._crew, start.blow
        command = [
            *(sys.executable, "-m", "prunex_jax.compare.drill.trainee"),
            f"--method={start.plan.method}",
            f"--workdir={crew.run_folder(start)}",
            f"--steps={start.plan.num_steps}",
            f"--progress={progress}",
            f"--silence_seconds={crew.silence_seconds}",
            f"--coordinator={crew.coordinator(start)}",
            f"--num_processes={crew.num_processes}",
            f"--process_id={self._process}",
            # The flags say all, and GPUs are not wanted.
            "--launcher=none",
        ]
        if blow is None:
            return command
        command.append(f"--at={blow.step}")
        if blow.fault == HANG:
            command.append(f"--stall_seconds={_STALL_SECONDS}")
        if blow.process == self._process and FAULTS[blow.fault].is_own:
            command.append(f"--fault={blow.fault}")
        return command

    def _act(self, start: Start, fault: str, child: "subprocess.Popen[bytes]") -> None:
        number = FAULTS[fault].number
        if number is not None:
            child.send_signal(number)
        elif fault == MOVED:
            folder = self._crew.run_folder(start)
            folder.rename(_away(folder))
        elif fault == LINK:
            self._crew.hosts.set_link(self._process, False)

    def _take_back(self, start: Start, fault: str) -> None:
        folder = self._crew.run_folder(start)
        if fault == MOVED and _away(folder).exists():
            # What processes have written in its place.
            shutil.rmtree(folder, ignore_errors=True)
            _away(folder).rename(folder)
        elif fault == LINK:
            self._crew.hosts.set_link(self._process, True)

    def _wait_for_others(self, start: Start, deadline: float) -> None:
        others = set(range(self._crew.num_processes)) - {self._process}
        files = {n: self._crew.record_file(start, n) for n in others}
        while missing := [n for n, file in sorted(files.items()) if not file.exists()]:
            if time.monotonic() > deadline:
                raise DrillFailedError(
                    f"process {missing[0]} of the drill has not said how {start.name} "
                    f"of {start.plan.method} ended: it does not run, or does not see "
                    f"{self._crew.workdir}"
                )
            time.sleep(_LOOK_SECONDS)


def _away(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}_moved_away")


def _wait_for_step(
    step: int, progress: Path, child: "subprocess.Popen[bytes]", deadline: float
) -> bool:
    """Waits until it is time for a fault; False if the process ends before."""
    while child.poll() is None and time.monotonic() < deadline:
        if _read_progress(progress)[0] >= step:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _wait_for_end(child: "subprocess.Popen[bytes]", deadline: float) -> int | None:
    try:
        return child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _read_progress(file: Path) -> tuple[int, str]:
    """Steps done, and the digest at the end; 0 before the first one."""
    try:
        words = file.read_text().split()
    except OSError:
        return 0, ""
    return int(words[0]) if words else 0, words[1] if len(words) > 1 else ""


def _end_session(session: int) -> int:
    """Kills what is left of a session, and counts it."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile.
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if os.getsid(pid) == session and pid != session:
                os.kill(pid, signal.SIGKILL)
                found += 1
    return found


def _line(start: Start, records: Sequence[Record]) -> str:
    what = "to its end"
    if start.blow is not None:
        blow = start.blow
        what = f"{blow.fault} of process {blow.process} at step {blow.step}"
    codes = ", ".join("killed" if r.code is None else str(r.code) for r in records)
    return f"{start.plan.method} {start.name}: {what}; exit codes {codes}"
