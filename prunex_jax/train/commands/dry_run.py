"""Says what a run will need, before it is one: everything up to compilation.

Parameters and channels, arithmetic of batches, bytes per step and exchange, memory per
device as the compiler has planned it, and the size of a checkpoint. Nothing is written
into the run folder. The devices may be GPUs of which none is here.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from prunex_jax.base.environment import environment
from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import Collective, wire_bytes
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, described_topology, run_together
from prunex_jax.methods.traffic import dense_bytes
from prunex_jax.models import as_on_gpus
from prunex_jax.processes import LaunchFlags
from prunex_jax.tasks import Batch
from prunex_jax.train.build.config import ExperimentConfig, resolve_config
from prunex_jax.train.build.experiment import Experiment, make_experiment, with_method
from prunex_jax.train.build.fingerprints import fingerprints_of
from prunex_jax.train.build.joining import (
    check_same_reading,
    check_same_settings,
    join_processes,
    make_heartbeat,
)
from prunex_jax.train.build.work import seen_until
from prunex_jax.train.changes.ahead import exchanges_to_come
from prunex_jax.train.changes.repair import repairs, sent_by_repair
from prunex_jax.train.changes.transitions import saved_shapes
from prunex_jax.train.console import Console, start_screen
from prunex_jax.train.records.folder import holds_run
from prunex_jax.train.records.weights import find_weights
from prunex_jax.train.steps.compiled import Program
from prunex_jax.train.steps.position import RunPosition

COMPILE, MEASURE = "compile", "measure"
_TIMED_STEPS = 5
# So many reasons why channels stay are listed.
_MOST_REASONS = 3


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one host sends in one call of a program, all its devices together."""

    what: str  # The call, in words.
    host_bytes: float  # Over the host axis.
    device_bytes: float  # Over the device axis.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a program on one device, as its compiler has planned them."""

    program: str
    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # Outputs that lie where arguments were.

    @property
    def total(self) -> int:
        """Bytes at once."""
        return self.arguments + self.outputs + self.temporaries - self.aliased


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a run will need."""

    sent: tuple[Sent, ...]  # `dense` first, then this run's calls.
    params_bytes: int  # Of the parameters at full width on one device,
    state_bytes: int  # and of all that trains there, them included.
    memory: tuple[Memory, ...]  # Of its programs; empty where no compiler tells.
    checkpoint_bytes: int  # Of the arrays of the first checkpoint, over all hosts.
    # Median seconds of a local step, and of the exchange; None if not measured.
    step_seconds: float | None = None
    exchange_seconds: float | None = None


def dry_run(
    config: Mapping[str, Any] | ExperimentConfig,
    workdir: str | Path,
    *,
    how: str = COMPILE,
    launch: LaunchFlags | None = None,
) -> Needs:
    """Prepares a run as `train` does, compiles it, and prints what it will need.

    Args:
      config: Settings, as for `train`.
      workdir: The run folder; nothing is written there.
      how: "compile"; "measure" to run a few steps as well, on the first batch; or GPUs
        that are not here, to compile for them, as in "h100:2x8" for 2 hosts with 8
        H100 each.
      launch: How processes find each other; None detects it.
    Returns:
      What was found.
    Raises:
      UserError: As from `train` and `mesh.described_topology`.
    Collectives:
      With several processes, small gathers; if measured, those of the steps.
    """
    config = resolve_config(config)
    launch = launch or LaunchFlags()
    goes_on = holds_run(workdir)
    is_here = how in (COMPILE, MEASURE)
    if is_here:
        started, topology = join_processes(config, launch)
    else:
        _check_names_gpus(how)
        config, launch = _for_gpus(config), LaunchFlags(launcher="none")
        started, _ = join_processes(_on_this_machine(config), launch)
        topology = described_topology(how)

    def prepare() -> Experiment:
        weights = find_weights(config.model.weights, workdir)
        return make_experiment(config, topology, weights=weights, goes_on=goes_on)

    described = environment(topology.describe())
    with make_heartbeat(config, launch), Console(topology.is_primary) as console:
        check_same_settings(config)
        experiment = run_together(prepare)
        several = jax.process_count() > 1  # Alone, there is nothing to compare.
        read = fingerprints_of(experiment.task, experiment.config) if several else {}
        check_same_reading(experiment, read)
        console.line(
            start_screen(experiment, str(workdir), described, started.described)
        )
        console.line("\n".join(_arithmetic(experiment)))
        needs = find_needs(experiment, is_measured=how == MEASURE)
        console.line("\n".join(_in_words(needs)))
        console.line(f"dry run   nothing was written to {workdir}")
    return needs


def find_needs(experiment: Experiment, *, is_measured: bool = False) -> Needs:
    """Compiles the first local step and exchange of a run, and adds up its bytes."""
    batch = experiment.batch_shapes()
    current = experiment.current
    state, calls = current.programs.abstract_state(), _first_calls(experiment)
    memory = []
    for program, options in calls:
        is_step = program is current.programs.local_step
        args = (state, batch) if is_step else (state,)
        compiled = run_together(functools.partial(program.compile, *args, **options))
        memory += _memory_of(program.name, compiled.run)
    saved = saved_shapes(experiment, RunPosition(experiment.channels.sizes))
    found = Needs(
        sent=tuple(_what_is_sent(experiment)),
        params_bytes=bytes_per_device(state.params),
        state_bytes=bytes_per_device(state),
        memory=tuple(memory),
        checkpoint_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved)),
    )
    return _with_times(found, experiment) if is_measured else found


def _check_names_gpus(how: str) -> None:
    if ":" not in how:
        raise UserError(
            f"--dry_run={how} is none of {COMPILE}, {MEASURE} and GPUs to compile for, "
            f"as in h100:2x8{suggest(how, (COMPILE, MEASURE))}"
        )


def _on_this_machine(config: ExperimentConfig) -> ExperimentConfig:
    """The settings of a process whose devices do not matter."""
    topology = replace(config.topology, layout="1", cpu_devices=1, simulated="")
    return replace(config, topology=topology)


def _for_gpus(config: ExperimentConfig) -> ExperimentConfig:
    """The settings of a run on GPUs that are not here.

    Raises:
      UserError: It needs arrays on them.
    """
    if config.distill.teacher:
        raise UserError(
            f"distill.teacher={config.distill.teacher!r} has to lie on devices, and "
            "those of this dry run are not here; leave it empty"
        )
    return replace(config, model=as_on_gpus(config.model))


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of arrays on one device, by their shapes, types and shardings.

    Example:
      >>> import jax.numpy as jnp
      >>> bytes_per_device({'a': jnp.ones((2, 3))})
      24
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _first_calls(experiment: Experiment) -> list[tuple[Program, dict[str, Any]]]:
    """The first local step and the first exchange, if there is one."""
    current, sizes = experiment.current, experiment.channels.sizes
    calls = [(current.programs.local_step, current.step_options(0, sizes))]
    first = next(exchanges_to_come(experiment), None)
    if first is not None:
        calls.append((current.programs.exchange, first))
    return calls


def _memory_of(name: str, compiled: Any) -> list[Memory]:
    found = compiled.memory_analysis()
    if found is None:  # Not every platform tells.
        return []
    return [
        Memory(
            name,
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.temp_size_in_bytes,
            found.alias_size_in_bytes,
        )
    ]


def _what_is_sent(experiment: Experiment) -> Iterator[Sent]:
    """Bytes of a step of dense averaging, and of the calls of every phase."""
    shape = dict(experiment.mesh.shape)
    dense = dense_bytes(experiment.num_params, shape)
    yield Sent("a step of dense", dense[HOST_AXIS], dense[DEVICE_AXIS])
    is_one = len(experiment.phases) == 1
    for number, phase in enumerate(experiment.phases):
        there = experiment if number == 0 else with_method(experiment, phase.method)
        prefix = "" if is_one else f"{phase.method}: "
        for what, listed in _calls_of(there):
            sent = wire_bytes(listed, shape)
            yield Sent(prefix + what, sent[HOST_AXIS], sent[DEVICE_AXIS])


def _calls_of(experiment: Experiment) -> Iterator[tuple[str, list[Collective]]]:
    """What a step and the exchanges to come send, by the traces of their programs."""
    current, channels = experiment.current, experiment.channels
    method, programs = current.method, current.programs
    state, batch = programs.abstract_state(), experiment.batch_shapes()

    def step(options: dict[str, Any]) -> list[Collective]:
        return programs.local_step.collectives(state, batch, **options)

    last = experiment.num_steps - 1
    counts = channels.keep_counts if method.pruning.in_rounds else channels.sizes
    first_options = current.step_options(0, channels.sizes)
    last_options = current.step_options(last, counts)
    if first_options == last_options:
        yield "a step", step(first_options)
    else:
        yield "the first step", step(first_options)
        yield "the last step", step(last_options)
    total, before = sum(channels.sizes.values()), dict(channels.sizes)
    for options in exchanges_to_come(experiment):
        kept = dict(options["keep_counts"])
        share = sum(kept.values()) / total if total and kept else 1.0
        part = "all channels" if share == 1 else f"{share:.3g} of the channels"
        what = f"an exchange with {part}, {options['kind']}"
        yield what, programs.exchange.collectives(state, **options)
        if repairs(experiment) and kept != before:
            yield f"a repair with {part}", sent_by_repair(experiment, kept)
        before = kept


def _with_times(needs: Needs, experiment: Experiment) -> Needs:
    """Runs the compiled programs a few times, and takes the medians."""
    with experiment.batches() as batches:
        batch: Batch = next(batches)
    if experiment.teaching is not None:
        batch = experiment.teaching.taught(batch, 0, None)
    current, programs = experiment.current, experiment.current.programs
    state = programs.init(jax.random.key(experiment.config.seed))
    preparation = current.method.preparation
    if preparation is not None:
        state = programs.prepare(state, (batch,) * preparation.num_batches)
    (_, options), *exchange = _first_calls(experiment)
    seconds, state = _median_seconds(
        lambda state: programs.local_step(state, batch, **options)[0], state
    )
    exchange_seconds = None
    for program, static in exchange:
        exchange_seconds, state = _median_seconds(
            functools.partial(program, **static), state
        )
    return replace(needs, step_seconds=seconds, exchange_seconds=exchange_seconds)


def _median_seconds(call: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    """Median of a few calls after the first, and the state after the last."""
    seconds = []
    for _ in range(1 + _TIMED_STEPS):
        started = time.perf_counter()
        state = jax.block_until_ready(call(state))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), state


def _arithmetic(experiment: Experiment) -> list[str]:
    """Batches and channels, where the start screen says less."""
    config, mesh = experiment.config, experiment.mesh
    batch_size, parts = experiment.batch_size, config.optimizer.micro_batches
    per_host, per_device = batch_size // mesh.shape[HOST_AXIS], batch_size // mesh.size
    steps = experiment.num_steps
    at_end = RunPosition({}, step=steps, left_out=steps * experiment.left_out)
    seen = ", ".join(
        f"{count:,} {name.replace('_', ' ')}"
        for name, count in seen_until(experiment, at_end).items()
    )
    lines = [
        f"examples  {batch_size} a step, {per_host} per host, "
        f"{per_device} per device in {parts} micro "
        f"{'batch' if parts == 1 else 'batches'} of {per_device // parts}; "
        f"{steps} steps, {seen}"
    ]
    channels = experiment.channels
    sizes, counts = channels.sizes, experiment.final_counts
    whole = sum(counts[name] == size for name, size in sizes.items())
    lines.append(
        f"channels  {len(sizes)} groups with {sum(sizes.values())} prunable channels; "
        f"{sum(counts.values())} kept at the end, {whole} groups whole"
    )
    if experiment.prunes:
        lines += [
            f"          {counts[name]:>6} of {size:>6} kept of {name}"
            for name, size in sizes.items()
        ]
    reasons = list(dict.fromkeys(frozen.reason for frozen in channels.trace.frozen))
    lines += [f"          stays: {reason}" for reason in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"          and for {len(reasons) - _MOST_REASONS} more reasons")
    return lines


def _in_words(needs: Needs) -> list[str]:
    lines = ["bytes     sent by a host between hosts, and inside of it"]
    lines += [
        f"          {sent.host_bytes:>17,.0f} {sent.device_bytes:>17,.0f}  {sent.what}"
        for sent in needs.sent
    ]
    lines.append(
        f"memory    per device: {needs.params_bytes:,} of parameters, "
        f"{needs.state_bytes:,} of all that trains; "
        "arguments + outputs + temporaries - shared:"
    )
    lines += [
        f"          {each.total:>17,} = {each.arguments:,} + {each.outputs:,} + "
        f"{each.temporaries:,} - {each.aliased:,}  {each.program.replace('_', ' ')}"
        for each in needs.memory
    ]
    if not needs.memory:
        lines.append("          what the compiler of this platform does not tell")
    lines.append(
        f"disk      {needs.checkpoint_bytes:,} bytes per checkpoint at full width"
    )
    if needs.step_seconds is not None:
        said = f"time      {1000 * needs.step_seconds:.1f} ms per step"
        if needs.exchange_seconds is not None:
            said += f", {1000 * needs.exchange_seconds:.1f} ms per exchange"
        lines.append(said)
    return lines
