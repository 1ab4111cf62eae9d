"""A host of a study that runs this package: one process, its devices, and its gates.

It owns what a process does between gates: training as `python -m prunex_jax.train`
does, or the dense exchange alone. It leaves links and counters to the runner.

    python -m prunex_jax.bench.links.jax_host --spec=FILE --gate=W,R
        --coordinator=HOST:PORT --num_processes=N --process_id=I
"""

import contextlib
import gc
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.bench.cost_model.step_time import steady_traffic
from prunex_jax.bench.links.gates import Gate, Gatekeeper, Spec, read_specs
from prunex_jax.bench.links.kernel import forget_peak_memory, share_cores
from prunex_jax.comm import Wire, count_hops, mean_over_mesh
from prunex_jax.mesh import (
    HOST_AXIS,
    LaunchFlags,
    MeshAxes,
    make_topology,
    map_over,
    return_freed_memory,
    sharding_on,
    start_processes,
    vary,
)
from prunex_jax.train.command import LAUNCH_FLAGS, given_launch
from prunex_jax.train.config import resolve_config
from prunex_jax.train.evaluation import validate
from prunex_jax.train.experiment import Experiment, make_experiment
from prunex_jax.train.loop import Progress
from prunex_jax.train.program import Program
from prunex_jax.train.run import train
from prunex_jax.train.state import TrainState

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("spec", "", "What to run, written by the runner.", is_required=True),
        Flag("gate", "", "Pipes to the runner.", is_required=True),
        *LAUNCH_FLAGS,
    ),
)


def run_spec(spec: Spec, gate: Gatekeeper, launch: LaunchFlags) -> None:
    """Runs it on this process, with all others.

    Args:
      spec: The same on all processes.
      gate: Where they wait.
      launch: How they find each other.
    """
    jax.clear_caches()
    gc.collect()
    return_freed_memory()
    forget_peak_memory()
    if spec.exchange_only:
        _exchange(spec, gate, launch)
    else:
        watch = _Watch(spec, gate)
        # The last boundary ends a run of which only steps are wanted.
        with contextlib.suppress(_AllMeasuredError):
            train(spec.config, spec.workdir, fresh=True, launch=launch, watch=watch)
    gate.arrive(event="done")


class _AllMeasuredError(Exception):
    """The last boundary was passed, and nothing is to come after it."""


class _Watch:
    """Times steps to the end of their exchange, and stops at gates."""

    def __init__(self, spec: Spec, gate: Gatekeeper) -> None:
        self.spec = spec
        self.gate = gate
        self.seconds: list[float] = []
        self.clock_seconds = 0.0
        self.traced_bytes = 0.0

    def __call__(self, progress: Progress, state: TrainState) -> None:
        """Called by the loop between steps."""
        if progress.step:
            self._time(progress, state)
        if progress.step in self.spec.boundaries:
            jax.block_until_ready(state)
            self._stop_at_gate(progress, state)

    def _time(self, progress: Progress, state: TrainState) -> None:
        start = time.perf_counter()
        # The loop does not wait for exchanges between rounds: the next step would.
        jax.block_until_ready(state)
        time.sleep(self.spec.stand_in_seconds)
        waited = time.perf_counter() - start
        clock_seconds = progress.position.clock.seconds_in_steps
        self.seconds.append(clock_seconds - self.clock_seconds + waited)
        self.clock_seconds = clock_seconds

    def _stop_at_gate(self, progress: Progress, state: TrainState) -> None:
        experiment, steps = progress.experiment, len(self.seconds)
        kept = progress.position.keep_counts
        counts = {g.name: kept[g.name] for g in experiment.current.groups}
        method, mesh_shape = experiment.current.method, dict(experiment.mesh.shape)
        traffic = steady_traffic(method, mesh_shape, counts)
        self.gate.arrive(
            event="pause",
            step=progress.step,
            seconds=self.seconds,
            traced_bytes=self._bytes_so_far(progress) - self.traced_bytes,
            formula_bytes=steps * traffic.host_bytes,
            hops=steps * traffic.hops,
            dense_bytes=experiment.dense_host_bytes_per_step,
        )
        accuracy = None
        if self.spec.evaluates:
            result = validate(experiment, state)
            accuracy = result and result.accuracy
        self.gate.arrive(event="resume", accuracy=accuracy)
        self.seconds = []
        self.traced_bytes = self._bytes_so_far(progress)
        if progress.step == self.spec.boundaries[-1] and not self.spec.evaluates:
            raise _AllMeasuredError

    def _bytes_so_far(self, progress: Progress) -> float:
        return progress.experiment.ledger.wire_bytes.get(HOST_AXIS, 0.0)


def _exchange(spec: Spec, gate: Gatekeeper, launch: LaunchFlags) -> None:
    """Averages as many numbers as the network has parameters, and nothing else."""
    config = resolve_config(spec.config)
    start_processes(config.topology, launch)
    experiment = make_experiment(config, make_topology(config.topology.layout))
    program, values = _mean_program(experiment)
    compiled = program.compile(values)
    hops = count_hops(compiled.collectives, HOST_AXIS)
    sent = compiled.sent[HOST_AXIS]
    done, seconds = 0, list[float]()
    for boundary in spec.boundaries:
        while done < boundary:
            start = time.perf_counter()
            values = jax.block_until_ready(program(values))
            seconds.append(time.perf_counter() - start)
            done += 1
        steps = len(seconds)
        gate.arrive(
            event="pause",
            step=done,
            seconds=seconds,
            traced_bytes=steps * sent,
            formula_bytes=steps * experiment.dense_host_bytes_per_step,
            hops=steps * hops,
            dense_bytes=experiment.dense_host_bytes_per_step,
        )
        gate.arrive(event="resume", accuracy=None)
        seconds = []


def _mean_program(experiment: Experiment) -> tuple[Program, jax.Array]:
    """The mean over the mesh of one array per device, and such an array."""
    mesh = experiment.mesh
    wire = Wire(bucket_bytes=experiment.config.method.bucket_bytes)
    axes = MeshAxes()
    spec = jax.P(axes.names)

    def mean(values: jax.Array) -> jax.Array:
        return vary(mean_over_mesh(values[0], axes, wire), axes.names)[None]

    run = map_over(mesh, mean, spec, spec)
    program = Program(
        "mean", lambda: run, dict(mesh.shape), experiment.ledger, donate=(0,)
    )
    shape = (mesh.size, experiment.num_params)
    born = jax.jit(lambda: jnp.ones(shape), out_shardings=sharding_on(mesh, spec))
    return program, born()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one process of a study.

    Args:
      arguments: The command line without the program's name; None takes the real one.
    Returns:
      The exit code.
    """
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, rest: list[str]) -> None:
    del rest
    launch = given_launch(values)
    share_cores(launch.process_id, launch.num_processes)
    gate = Gate.of(values.gate)
    for spec in read_specs(values.spec):
        run_spec(spec, gate, launch)


if __name__ == "__main__":
    sys.exit(main())
