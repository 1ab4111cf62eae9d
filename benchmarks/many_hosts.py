"""A run of many hosts on one machine: does it start, agree, save, and go on with fewer?

Every host is a process with one CPU device, and all of them share the cores, so the
seconds say where processes wait, and nothing of real hosts. The network is small. The
run is stopped twice and started again, the last time on half of the hosts. Prints what
processes measured, and bytes as the loopback interface has counted them beside those of
the formula.

    make benchmark-many-hosts
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compression import write
from benchmarks.links.kernel import interface_bytes, peak_memory
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.compare.drill.trainee import digest_of_state, network
from prunex_jax.compare.subprocesses import free_port
from prunex_jax.mesh import HOST_AXIS
from prunex_jax.processes import LaunchFlags
from prunex_jax.train.loop import Progress
from prunex_jax.train.run import train
from prunex_jax.train.steps.state import TrainState

STEPS_PER_START = 24
NUM_STEPS = 1000
PERIOD = 4  # Steps from one exchange to the next.
WIDTHS = (64, 512, 10)
# Processes share the memory of what they import.
_FORKED = multiprocessing.get_context("forkserver")
# What all hosts have to say alike.
SAME = ("steps", "consensus", "sent")
# Processes that share two cores keep each other waiting for minutes.
PATIENCE = 1800
# What a process of many is to be content with.
SMALL = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0",
}


def settings_of(batch_size: int) -> dict[str, Any]:
    """The run; its batches are the same on fewer hosts."""
    return {
        "topology": {"cpu_devices": 1, "layout": "process"},
        "data": {"name": "digits", "batch_size": batch_size},
        "method": {
            "name": "hsadmm",
            "wire_dtype": "int8",
            "hsadmm": {"sync_period": PERIOD},
        },
        "optimizer": {"learning_rate": 0.01},
        # One form of exchange, as compiling takes most of the memory.
        "sparsity": {"sparsity": 0.5, "start_share": 0.0, "freeze_share": 0.0},
        "run": {
            "steps": NUM_STEPS,
            "log_every_steps": 100,
            "join_seconds": PATIENCE,
            "silence_seconds": float(PATIENCE),
        },
    }


class Watch:
    """Notes when this process was where, and what it has of the consensus.

    Stops the run after so many steps, as a scheduler does.
    """

    def __init__(self, began: float) -> None:
        self.first_step = -1
        self.seen: dict[str, Any] = {}
        self._sent_before = 0.0
        self._began = began

    def __call__(self, progress: Progress, state: TrainState) -> None:
        """Called before the first step and after every one."""
        now = time.time() - self._began
        position = progress.position
        sent = position.ledger.wire_bytes.get(HOST_AXIS, 0.0)
        if self.first_step < 0:
            self.first_step, self._sent_before = position.step, sent
            self.seen["until the state is there"] = now
        elif position.step == self.first_step + 1:
            self.seen["until the first step is done"] = now
        elif position.step == self.first_step + STEPS_PER_START:
            self.seen[f"until {STEPS_PER_START} steps are done"] = now
            self.seen["consensus"] = consensus_of(state.opt_state)
            os.kill(os.getpid(), signal.SIGUSR1)
        self.seen["steps"] = [self.first_step, position.step]
        self.seen["sent"] = sent - self._sent_before


def consensus_of(opt_state: Any) -> str:
    """What this process has of the consensus, to the bit, in a few letters."""
    arrays = flatten_by_path(opt_state).items()
    return digest_of_state({k: x for k, x in arrays if "consensus" in k})[:12]


def train_as(asked: Mapping[str, Any]) -> None:
    """Trains as one of the processes, and writes down what it has seen."""
    notes, number = Path(asked["notes"]), asked["number"]
    with notes.with_suffix(".log").open("a") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    watch = Watch(asked["started"])
    train(
        settings_of(asked["batch_size"]),
        asked["workdir"],
        model=network(WIDTHS),
        launch=LaunchFlags(
            asked["coordinator"], asked["hosts"], number, owns_process=True
        ),
        after_step=[watch],
    )
    watch.seen |= {
        "until the end": time.time() - asked["started"],
        "peak_bytes": peak_memory(),
    }
    notes.write_text(json.dumps(watch.seen), encoding="utf-8")


def start(hosts: int, batch_size: int, workdir: Path) -> None:
    """Starts all processes, waits for them, and prints what they have seen."""
    coordinator = f"127.0.0.1:{free_port()}"
    notes = [workdir / f"process_{number}.json" for number in range(hosts)]
    (_, before), processes = interface_bytes()["lo"], []
    for number, note in enumerate(notes):
        note.unlink(missing_ok=True)
        asked = {
            "number": number,
            "hosts": hosts,
            "batch_size": batch_size,
            "workdir": str(workdir / "run"),
            "coordinator": coordinator,
            "notes": str(note),
            "started": time.time(),
        }
        processes.append(_FORKED.Process(target=train_as, args=(asked,), daemon=True))
        processes[-1].start()
    for process in processes:
        process.join()
    sent = interface_bytes()["lo"][1] - before
    if not all(note.exists() for note in notes):
        codes = [process.exitcode for process in processes]
        sys.exit(f"processes have failed: exit codes {codes}; see {workdir}/*.log")
    report([json.loads(note.read_text(encoding="utf-8")) for note in notes], sent)


def report(seen: Sequence[Mapping[str, Any]], sent: int) -> None:
    """Prints what the processes of a start have seen; ends where they disagree."""
    forms = {json.dumps([each[key] for key in SAME]) for each in seen}
    if len(forms) != 1:
        sys.exit(f"hosts disagree about {SAME}: {forms}")
    first, last = seen[0]["steps"]
    write(
        f"\n{len(seen)} hosts, steps {first} to {last}: all have the same consensus "
        f"({seen[0]['consensus']})"
    )
    for name in (name for name in seen[0] if name.startswith("until")):
        each = [process[name] for process in seen]
        write(
            f"  seconds {name}: {statistics.median(each):.0f}, "
            f"{min(each):.0f} to {max(each):.0f}"
        )
    peaks = [process["peak_bytes"] / 1e6 for process in seen]
    write(f"  megabytes of a process at its peak: {statistics.median(peaks):.0f}")
    write(
        f"  bytes of a host: {seen[0]['sent']:,.0f} by the formula; "
        f"{sent / len(seen):,.0f} over the loopback, whatever for"
    )


def main() -> None:
    """Starts the run, goes on with it, and then on half of its hosts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--workdir", type=Path, required=True)
    arguments = parser.parse_args()
    if (arguments.workdir / "run").exists():
        parser.error(f"{arguments.workdir}/run is there: give another folder")
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    hosts = arguments.hosts
    os.environ.update(SMALL)
    _FORKED.set_forkserver_preload(["prunex_jax.train.run"])
    for count in (hosts, hosts, hosts // 2):
        start(count, hosts, arguments.workdir)


if __name__ == "__main__":
    main()
