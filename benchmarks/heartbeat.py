"""What watching over the processes of a run costs its steps: two processes, one run.

Blocks of steps with and without a heartbeat take turns, in changing order, so that a
machine whose speed drifts slows both. Every block begins with a beat, so that there are
more of them than in a run. Prints the ratio of their times, and what the thread that
starts the steps does for it.

    make benchmark-heartbeat
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from unittest import mock

from benchmarks.pairs import describe_pairs
from prunex_jax.base.timing import Timing
from prunex_jax.processes import Heartbeat, LaunchFlags, Limits
from prunex_jax.train.loop import Progress
from prunex_jax.train.run import train
from prunex_jax.train.steps.in_flight import StepsInFlight
from prunex_jax.train.steps.state import TrainState
from tests.helpers.common import ROOT, free_port

NUM_PAIRS = 60
STEPS_PER_BLOCK = 150
WARM_UP = 50
LIMITS = Limits(silence=60.0, stall=3600.0)  # As by default.
SETTINGS = {
    "topology": {"cpu_devices": 1, "layout": "process"},
    "data": {"name": "digits", "batch_size": 32},
    "model": {"name": "resnet20", "width": 0.25},
    "run": {
        "steps": WARM_UP + 2 * NUM_PAIRS * STEPS_PER_BLOCK,
        "checkpoint_every_steps": 0,
        "log_every_steps": STEPS_PER_BLOCK,
    },
    "method": {"name": "local_sgd"},
}


class Blocks:
    """Has a heartbeat in every other block of steps, and keeps what the blocks took."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.calls: list[float] = []  # Seconds of the calls of one step.
        self._heartbeat: Heartbeat | None = None
        self._in_flight = StepsInFlight()
        self._began = 0.0

    def watch(self, progress: Progress, state: TrainState) -> None:
        """Called after every step, outside of its time."""
        del state
        began = time.perf_counter()
        if self._heartbeat is not None:
            self._heartbeat.at("step", progress.step)
            self._heartbeat.at("exchange")
        self._in_flight.step_done(0.01)
        self.calls.append(time.perf_counter() - began)
        block, rest = divmod(progress.step - WARM_UP, STEPS_PER_BLOCK)
        if rest or block < 0:
            return
        now = progress.position.clock.seconds_in_steps
        if block:
            self.seconds[self._heartbeat is not None].append(now - self._began)
        self._began = now
        if self._heartbeat is not None:
            self._heartbeat.__exit__(None, None, None)
            self._heartbeat = None
        # Off, on; on, off; and so on.
        if block < 2 * NUM_PAIRS and (block // 2 + block) % 2:
            self._heartbeat = Heartbeat(LIMITS, ends_process=False)
            self._heartbeat.timed_by(self._in_flight.times)
            self._heartbeat.__enter__()


def main() -> None:
    """Starts both processes; the first one prints."""
    coordinator = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as workdir:
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.heartbeat"),
                    *(coordinator, str(index), f"{workdir}/run"),
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for index in range(2)
        ]
        try:
            code = processes[0].wait()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    sys.exit(code)


def take_steps(coordinator: str, process: int, workdir: str) -> None:
    """Trains as one of two processes."""
    blocks = Blocks()
    flags = LaunchFlags(coordinator, 2, process, owns_process=True)

    def still(config: object, launch: LaunchFlags) -> Heartbeat:
        del config, launch
        return Heartbeat(Limits(silence=1e6, stall=0.0), ends_process=False)

    with mock.patch("prunex_jax.train.run.make_heartbeat", still):
        train(SETTINGS, workdir, launch=flags, after_step=[blocks.watch])
    if process == 0:
        sys.stdout.write(f"{describe(blocks)}\n")


def describe(blocks: Blocks) -> str:
    """The ratio of blocks with and without a heartbeat, pair by pair."""
    on, off = blocks.seconds[True], blocks.seconds[False]
    ratios = sorted(a / b for a, b in zip(on, off, strict=True))
    # Ranks between which the median of all pairs lies in 95 of 100 cases.
    around, far = len(ratios) / 2, 1.96 * len(ratios) ** 0.5 / 2
    low, high = ratios[int(around - far)], ratios[int(around + far)]
    return (
        f"{STEPS_PER_BLOCK} steps with a heartbeat / as many without: "
        f"{describe_pairs(Timing(tuple(on)), Timing(tuple(off)))}; the median is "
        f"{low:.3f} to {high:.3f} (95 %); calls of a step: "
        f"{1e6 * statistics.median(blocks.calls):.1f} us"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        take_steps(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        main()
