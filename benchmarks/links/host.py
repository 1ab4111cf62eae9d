"""One process of a study, and what it does between its gates.

It trains as `python -m prunex_jax.train` does, or runs the dense exchange alone; with
PyTorch, `benchmarks.torch` does the same.

    python -m benchmarks links.host --spec=FILE --gate=W,R
        --coordinator=HOST:PORT --num_processes=N --process_id=I
        [--runtime=torch --interface=NAME]
"""

import contextlib
import ctypes
import gc
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.links.gates import Gate, Gatekeeper, Spec, read_specs
from benchmarks.links.kernel import forget_peak_memory, share_cores
from benchmarks.links.part import part_of
from benchmarks.study import check_goal
from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import AgreedStopError, TrainingDivergedError
from prunex_jax.base.imports import need_package
from prunex_jax.comm import Wire, count_hops, mean_over_mesh
from prunex_jax.compare.step_time import steady_traffic
from prunex_jax.mesh import HOST_AXIS, MeshAxes, map_over, sharding_on, vary
from prunex_jax.processes import LaunchFlags
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.build.joining import join_processes
from prunex_jax.train.commands.command import LAUNCH_FLAGS, given_launch
from prunex_jax.train.loop import Progress
from prunex_jax.train.records.scores import evaluate_split
from prunex_jax.train.run import train
from prunex_jax.train.steps.compiled import Program
from prunex_jax.train.steps.state import TrainState

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("spec", "", "What to run, written by the runner.", is_required=True),
        Flag("gate", "", "Pipes to the runner.", is_required=True),
        Flag("runtime", "jax", "What runs it.", choices=("jax", "torch")),
        Flag("interface", "", "Network interface over which torch exchanges."),
        *LAUNCH_FLAGS,
    ),
)


def free_memory() -> None:
    """Frees what an earlier run of this process has left, and forgets its peak."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # Of glibc.
        library.malloc_trim(0)
    forget_peak_memory()


def run_spec(spec: Spec, gate: Gatekeeper, launch: LaunchFlags) -> None:
    """Runs it on this process, with all others."""
    jax.clear_caches()
    free_memory()
    if spec.exchange_only:
        _exchange(spec, gate, launch)
    else:
        watch = _Watch(spec, gate)
        # The last boundary ends a run of which only steps are wanted.
        with contextlib.suppress(_AllMeasuredError):
            train(
                spec.config, spec.workdir, fresh=True, launch=launch, after_step=[watch]
            )
    gate.arrive(event="done")


class _AllMeasuredError(AgreedStopError):
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
        shapes = experiment.current.shapes
        traffic = steady_traffic(method, shapes, mesh_shape, counts)
        self.gate.arrive(
            event="pause",
            step=progress.step,
            seconds=self.seconds,
            traced_bytes=self._bytes_so_far(progress) - self.traced_bytes,
            formula_bytes=steps * traffic.host_bytes,
            hops=steps * traffic.hops,
            dense_bytes=experiment.dense_host_bytes_per_step,
        )
        value = None
        if self.spec.metric:
            value = self._score(experiment, state)
        self.gate.arrive(event="resume", value=value)
        self.seconds = []
        self.traced_bytes = self._bytes_so_far(progress)
        if progress.step == self.spec.boundaries[-1] and not self.spec.metric:
            raise _AllMeasuredError

    def _score(self, experiment: Experiment, state: TrainState) -> float | None:
        """The metric on the validation split; None if that is empty."""
        programs, dataset = experiment.current.programs, experiment.task.dataset
        split = part_of(dataset.validation, self.spec.scored_examples)
        network = programs.network(state)
        result = evaluate_split(experiment, programs.evaluate, network, split)
        return None if result is None else metric_of(result, self.spec.metric)

    def _bytes_so_far(self, progress: Progress) -> float:
        return progress.experiment.ledger.wire_bytes.get(HOST_AXIS, 0.0)


def metric_of(measures: Mapping[str, Any], metric: str) -> float:
    """What a study is after, of what its task measures.

    Raises:
      UserError: The task does not measure it.
    Example:
      >>> metric_of({'loss': 2.0, 'perplexity': 7.4}, 'perplexity')
      7.4
    """
    check_goal(metric, measures)
    return float(measures[metric])


def pass_gates(
    spec: Spec,
    gate: Gatekeeper,
    step: Callable[[], float],
    facts: Callable[[int], Mapping[str, Any]],
    score: Callable[[], float | None] = lambda: None,
) -> None:
    """Takes timed steps and stops at the gates between them.

    A pause that stands for computation comes before the real one: what PyTorch hides
    behind its backward pass it hides behind the real one only.

    Args:
      spec: Where the gates are.
      gate: Is told the loss of every step on this process, too.
      step: Takes one and returns its loss.
      facts: Number of steps since the last gate -> what else the gate is told.
      score: The metric of the network; called if the spec asks for it.
    Raises:
      TrainingDivergedError: A loss is not finite.
    """
    done = 0
    for boundary in spec.boundaries:
        seconds, losses = list[float](), list[float]()
        while done < boundary:
            start = time.perf_counter()
            time.sleep(spec.stand_in_seconds)
            losses.append(step())
            seconds.append(time.perf_counter() - start)
            done += 1
        if not all(map(math.isfinite, losses)):
            raise TrainingDivergedError(f"the loss is not finite at step {done}")
        more = facts(len(seconds))
        gate.arrive(event="pause", step=done, seconds=seconds, losses=losses, **more)
        found = score() if spec.metric else None
        gate.arrive(event="resume", value=found)


def _exchange(spec: Spec, gate: Gatekeeper, launch: LaunchFlags) -> None:
    """Averages as many numbers as the network has parameters, and nothing else."""
    config = resolve_config(spec.config)
    _, topology = join_processes(config, launch)
    experiment = make_experiment(config, topology)
    program, values = _mean_program(experiment)
    compiled = program.compile(values)
    hops = count_hops(compiled.collectives, HOST_AXIS)

    def step() -> float:
        nonlocal values
        values = jax.block_until_ready(program(values))
        return 0.0

    def facts(steps: int) -> Mapping[str, float]:
        return {
            "traced_bytes": steps * compiled.sent[HOST_AXIS],
            "formula_bytes": steps * experiment.dense_host_bytes_per_step,
            "hops": steps * hops,
            "dense_bytes": experiment.dense_host_bytes_per_step,
        }

    pass_gates(spec, gate, step, facts)


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
    """Runs one process of a study."""
    return run_command(COMMAND, _run, arguments)


def _run(values: Values, rest: list[str]) -> None:
    del rest
    launch, specs = given_launch(values), read_specs(values.spec)
    share_cores(launch.process_id, launch.num_processes)
    if values.runtime == "torch":
        need_package("torch", "torch", "--runtime=torch")
        from benchmarks.torch.training import run_specs

        run_specs(specs, Gate.of(values.gate), launch, values.interface)
        return
    gate = Gate.of(values.gate)
    for spec in specs:
        run_spec(spec, gate, launch)


if __name__ == "__main__":
    sys.exit(main())
