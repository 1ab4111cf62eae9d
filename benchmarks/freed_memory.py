"""What keeping freed memory saves: steps of two processes, of which one keeps it.

Both train the same ResNet-20 on 4 simulated hosts. They take steps in turn, so that a
machine whose speed drifts slows both. Prints one line of ratios.

    make benchmark-freed-memory
"""

import functools
import os
import subprocess
import sys

import jax
import numpy as np

from benchmarks.pairs import describe_pairs
from prunex_jax.base.timing import time_in_turn
from prunex_jax.mesh import make_topology
from prunex_jax.processes import LaunchFlags, start_processes
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment

NUM_HOSTS = 4
BATCH_SIZE = 128
WARM_UP = 5
NUM_PAIRS = 60

SETTINGS = {
    "topology": {"layout": str(NUM_HOSTS), "cpu_devices": NUM_HOSTS},
    "data": {"name": "synthetic", "image_size": 32, "batch_size": BATCH_SIZE},
    "run": {"steps": 1000},
    "method": {"name": "hsadmm"},
}
# Sets what glibc does anyway: the user has decided, so the process keeps nothing.
GLIBC_AS_IT_IS = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}


def main() -> None:
    """Times steps of both processes in turn and prints the ratio, pair by pair."""
    processes = keeps, returns = _start({}), _start(GLIBC_AS_IT_IS)
    try:
        calls = {
            "returns": functools.partial(_wait_for_step, returns),
            "keeps": functools.partial(_wait_for_step, keeps),
        }
        timings = time_in_turn(calls, NUM_PAIRS, WARM_UP)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    sys.stdout.write(
        "step that keeps freed memory / step that does not: "
        f"{describe_pairs(timings['keeps'], timings['returns'])}\n"
    )


def _start(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.freed_memory", "--steps"],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    if not process.stdout.readline():
        raise RuntimeError("a process that takes steps has ended")


def take_steps() -> None:
    """Takes a training step for every line that is read, and answers by one."""
    config = resolve_config(SETTINGS)
    start_processes(config.topology, LaunchFlags(owns_process=True))
    topology = make_topology(config.topology.layout)
    programs = make_experiment(config, topology).current.programs
    sharding = jax.sharding.NamedSharding(topology.mesh, jax.P(("host", "device")))
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(BATCH_SIZE, 32, 32, 3)).astype(np.float32),
        "label": rng.integers(0, 10, BATCH_SIZE).astype(np.int32),
    }
    batch = jax.device_put(batch, sharding)
    state = programs.init(jax.random.key(0))
    for _ in sys.stdin:
        state, ticket = programs.local_step(state, batch)
        jax.block_until_ready((state, ticket))
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    take_steps() if sys.argv[1:] == ["--steps"] else main()
