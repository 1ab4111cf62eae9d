"""What a GPU takes: steps, compaction, exchanges and memory, each beside its bound.

    steps        local steps of H-SADMM against what one would write with optax alone
    compaction   taking channels, and putting them back, against copies of as many
    exchanges    what a host computes in an exchange, against its local step
    memory       bytes in use against what the compiler has planned

Steps, copies and exchanges are timed in turn. Prints a row per measurement.

    make benchmark-gpu
    python -m benchmarks gpu --parts=steps --networks=resnet50
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from benchmarks.compression import (
    draw,
    make_recipe,
    method_call,
    no_communication,
    write,
)
from benchmarks.memory_table import METHODS, NETWORKS, config_of
from benchmarks.pairs import describe_pairs
from prunex_jax.base.timing import Timing, time_in_turn
from prunex_jax.base.trees import PyTree
from prunex_jax.channels import layouts_of, put_channels, take_channels
from prunex_jax.mesh import make_topology
from prunex_jax.methods import Recipe
from prunex_jax.train.build.config import ExperimentConfig
from prunex_jax.train.build.experiment import Experiment, make_experiment
from prunex_jax.train.build.optimizer import make_inner
from prunex_jax.train.changes.ahead import exchanges_to_come
from prunex_jax.train.commands.dry_run import bytes_per_device, find_needs

# Examples of a step that is timed. Memory is measured with those of the table of
# docs/results/memory.md.
EXAMPLES = {"resnet50": 64, "gpt-125m": 8}
STEPS_PER_CALL = 10
CALLS = 15
NUM_HOSTS = 2
# Of a loop on the device, so that starting kernels from Python does not count.
ROUNDS = 100
EXCHANGES = ("hsadmm", "hsadmm-paper", "hsadmm-top-k", "diloco")
IN_MEMORY = tuple(
    itertools.product(
        ("resnet50", "gpt-125m", "gpt-1.3b"), ("dense", "hsadmm", "diloco")
    )
)
IMAGE_SHAPE = (224, 224, 3)
NUM_CLASSES = 1000

Call = Callable[[], Any]


def main() -> None:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("steps", "compaction", "exchanges", "memory")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--networks", nargs="+", choices=EXAMPLES, default=[*EXAMPLES])
    parser.add_argument("--workdir", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    if arguments.memory_of:
        write(json.dumps(memory_of(*arguments.memory_of, arguments.workdir)))
        return
    if "memory" in arguments.parts:
        report_memory(arguments.workdir)
    write(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for network in arguments.networks:
        if "steps" in arguments.parts:
            report_steps(network, arguments.workdir)
        if "exchanges" in arguments.parts:
            report_exchanges(network, arguments.workdir)
    if "compaction" in arguments.parts:
        report_compaction()


def prepare(network: str, method: str, workdir: Path, examples: int) -> Experiment:
    """A run of one GPU, which takes so many examples in a step."""
    config = settings_of(network, method, workdir, examples)
    return make_experiment(config, make_topology("1", jax.devices()[:1]))


def settings_of(
    network: str, method: str, workdir: Path, examples: int
) -> ExperimentConfig:
    """The settings of such a run: those of the table of memory, for one host."""
    tokens = workdir / "tokens.npy"
    numbers = np.random.default_rng(0).integers(0, 32_000, 200_000)
    np.save(tokens, numbers.astype(np.uint16))
    config = config_of(NETWORKS[network], method, 1, "none", tokens)
    data = dataclasses.replace(config.data, batch_size=examples)
    return dataclasses.replace(config, data=data)


class Run:
    """The state of a run, which calls of its programs replace."""

    def __init__(self, experiment: Experiment) -> None:
        self._current, sizes = experiment.current, experiment.channels.sizes
        with experiment.batches() as batches:
            self.batch = next(batches)
        self.state = self._current.programs.init(jax.random.key(0))
        self._options = self._current.step_options(0, sizes)
        self._exchange = next(exchanges_to_come(experiment), None)

    def steps(self, count: int = STEPS_PER_CALL) -> jax.Array:
        """Local steps, and what is ready when they are done."""
        for _ in range(count):
            self.state, ticket = self._current.programs.local_step(
                self.state, self.batch, **self._options
            )
        return ticket

    def exchange(self) -> jax.Array:
        """The first exchange of the run, which has one."""
        assert self._exchange is not None
        self.state = self._current.programs.exchange(self.state, **self._exchange)
        return self.state.step


def plain_steps(experiment: Experiment, batch: PyTree) -> Call:
    """What one would write with optax alone, with the same optimizer and metrics.

    The batch is a constant of this program, which can only make it faster.
    """
    model, objective = experiment.task.model, experiment.task.objective
    optimizer = make_inner(experiment.config.optimizer, experiment.learning_rate)

    def loss_of(params: PyTree, statistics: PyTree) -> tuple[jax.Array, PyTree]:
        inputs = objective.inputs(batch)
        outputs, statistics = model.apply_train(params, statistics, inputs)
        counted = objective.count(outputs, batch)
        return objective.loss(outputs, batch), (statistics, counted)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: PyTree) -> tuple[PyTree, PyTree]:
        params, statistics, opt_state = state
        grads, (statistics, counted) = jax.grad(loss_of, has_aux=True)(
            params, statistics
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, statistics, opt_state), counted

    params, statistics = jax.jit(model.init)(jax.random.key(0))
    state = (params, statistics, jax.jit(optimizer.init)(params))

    def steps() -> PyTree:
        nonlocal state
        for _ in range(STEPS_PER_CALL):
            state, counted = update(state)
        return counted

    return steps


def report_steps(network: str, workdir: Path) -> None:
    """A local step of H-SADMM over a plain one."""
    experiment = prepare(network, "hsadmm", workdir, EXAMPLES[network])
    run = Run(experiment)
    calls = {"ours": run.steps, "plain": plain_steps(experiment, run.batch)}
    timings = time_in_turn(calls, CALLS)
    write(
        f"{network}, {STEPS_PER_CALL} steps of {EXAMPLES[network]} examples: H-SADMM / "
        f"plain optax {describe_pairs(timings['ours'], timings['plain'])}"
    )


def report_exchanges(network: str, workdir: Path) -> None:
    """What a host computes in exchanges, over a local step; nothing travels."""
    experiment = prepare(network, "hsadmm", workdir, EXAMPLES[network])
    trace = experiment.channels.trace
    run = Run(experiment)
    for method in EXCHANGES:
        config = settings_of(network, method, workdir, EXAMPLES[network]).method
        recipe = Recipe(
            config=config,
            inner=optax.identity(),
            learning_rate=experiment.learning_rate,
            groups=trace.groups,
            keep_counts=experiment.channels.keep_counts,
            shapes=trace.shapes,
            total_steps=experiment.num_steps,
        )
        with no_communication(NUM_HOSTS):
            exchange, _ = method_call(recipe, config)
            exchange()
        timings = time_in_turn({"exchange": exchange, "steps": run.steps}, CALLS)
        steps = _divided(timings["steps"], STEPS_PER_CALL)
        write(
            f"{network}, {METHODS[method][0]}: what a host computes in an exchange / "
            f"its local step {describe_pairs(timings['exchange'], steps)}"
        )


def report_compaction() -> None:
    """Taking half of the channels of ResNet-50, and putting them back, over copies."""
    recipe = make_recipe("resnet50", "float32", IMAGE_SHAPE, NUM_CLASSES)
    layouts = layouts_of(recipe.groups, recipe.shapes)
    kept = dict(chosen_channels(recipe))
    tree = draw(recipe.shapes, 0)
    small = jax.jit(lambda tree: take_channels(tree, layouts, kept))(tree)
    message = ravel_pytree(small)[0]

    def moved(by: jax.Array) -> PyTree:
        # The compiler does not know that these are the same in every round.
        return {name: places + jnp.minimum(by, 0) for name, places in kept.items()}

    def take(i: jax.Array, tree: PyTree) -> PyTree:
        return take_channels(tree, layouts, moved(i))

    def put(i: jax.Array, small: PyTree) -> PyTree:
        return put_channels(small, layouts, moved(i))

    def copy(i: jax.Array, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x + jnp.minimum(i, 0).astype(x.dtype), tree)

    def into_a_message(move: Callable[..., PyTree]) -> Callable[..., jax.Array]:
        return lambda i, tree: ravel_pytree(move(i, tree))[0]

    calls = {
        "take": _in_loop(take, small, tree),
        "copy of what is taken": _in_loop(copy, small, small),
        "take into a message": _in_loop(into_a_message(take), message, tree),
        "copy into a message": _in_loop(into_a_message(copy), message, small),
        "put": _in_loop(put, tree, small),
        "copy of all": _in_loop(copy, tree, tree),
        "copy of the message": _in_loop(copy, message, message),
    }
    timings = time_in_turn(calls, CALLS)
    timings = {name: _divided(timing, ROUNDS) for name, timing in timings.items()}
    write(
        f"ResNet-50, {len(tree)} arrays, {message.nbytes:,} bytes taken: a copy of as "
        f"many in one array takes {1e6 * timings['copy of the message'].median:.0f} us"
    )
    names = list(calls)
    for name, reference in zip(names[0:6:2], names[1:6:2], strict=True):
        write(
            f"{name} / {reference}: {describe_pairs(timings[name], timings[reference])}"
        )


def chosen_channels(recipe: Recipe) -> Iterator[tuple[str, jax.Array]]:
    """Half of the channels of every group, drawn at random."""
    for i, group in enumerate(recipe.groups):
        drawn = jax.random.permutation(jax.random.key(i), group.size)
        yield group.name, jnp.sort(drawn[: recipe.keep_counts[group.name]])


def _in_loop(body: Callable[..., PyTree], result: PyTree, argument: PyTree) -> Call:
    """A call that computes a result again and again from the same argument."""

    @jax.jit
    def run(result: PyTree, argument: PyTree) -> PyTree:
        return jax.lax.fori_loop(0, ROUNDS, lambda i, _: body(i, argument), result)

    return lambda: run(result, argument)


def _divided(timing: Timing, count: int) -> Timing:
    return Timing(tuple(seconds / count for seconds in timing.seconds))


def report_memory(workdir: Path) -> None:
    """Bytes in use and planned bytes, each in a process of its own, so from nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--memory-of"]
    for case in IN_MEMORY:
        folder = workdir / "-".join(case)
        found = subprocess.run(
            [*command, *case, f"--workdir={folder}"],
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdout=subprocess.PIPE,
            text=True,
        )
        if found.returncode:
            raise SystemExit(f"{' '.join(case)} failed with {found.returncode}")
        write(found.stdout.strip().splitlines()[-1])


def memory_of(network: str, method: str, workdir: Path) -> dict[str, Any]:
    """Bytes of one device: of what trains, and at the peak of what was done so far."""
    experiment = prepare(network, method, workdir, NETWORKS[network].examples)
    planned = {each.program: each.total for each in find_needs(experiment).memory}
    abstract = experiment.current.programs.abstract_state()
    used = {"planned": {"state": bytes_per_device(abstract), **planned}}
    device = jax.devices()[0]

    def note(name: str) -> None:
        found = device.memory_stats()
        assert found is not None, f"{device} does not count its memory"
        used[name] = {key: found[key] for key in ("bytes_in_use", "peak_bytes_in_use")}

    run = Run(experiment)
    jax.block_until_ready(run.state)
    note("init")
    jax.block_until_ready(run.steps(2))
    note("local_step")
    if "exchange" in planned:
        jax.block_until_ready(run.exchange())
        note("exchange")
    return {"network": network, "method": method, **used}


if __name__ == "__main__":
    main()
