"""Compiles what a run will need later, on another thread, while its steps run.

A run meets new programs on its way: an exchange per density, the small network after a
cut, reports and evaluation. Settings say which, unless channels of all layers compete
for one budget: then scores will. What fails here is left to the run, which meets the
same error where it needs the program.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from prunex_jax.base.trees import PyTree
from prunex_jax.data import VALID
from prunex_jax.tasks import TEACHER, TEACHER_WEIGHT
from prunex_jax.train.build.experiment import Experiment, Setup
from prunex_jax.train.changes.transitions import foresee_small
from prunex_jax.train.steps.compiled import Program, shapes_on
from prunex_jax.train.steps.position import RunPosition


class Call(NamedTuple):
    """A call of a program that will come."""

    program: Program
    args: tuple[PyTree, ...]  # Shapes, types and shardings of its arguments.
    static: Mapping[str, Any]  # Its static arguments.
    small: Experiment | None = None  # The run after its cut, where it belongs to that.


class CompilerAhead:
    """One thread that compiles programs in the order in which they will be called."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._thread = futures.ThreadPoolExecutor(1, "compiler_ahead")
        # The run after its cut, and what is being compiled; None before either.
        self._small: Experiment | None = None
        self._calls: Iterable[Call] | None = None
        self._foreseen: Setup | None = None  # What it was told last.

    def __enter__(self) -> Self:
        """Has nothing to do yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends with what is being compiled; the rest is dropped.

        An error does not wait for it: it has to reach the other processes first. Python
        itself waits for the thread at its end, after it has printed the error.
        """
        self._calls = None
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def is_new(self, experiment: Experiment) -> bool:
        """Whether it compiles, and was not yet told what this run trains now."""
        return self.is_on and self._foreseen is not experiment.current

    def foresee(self, calls: Iterable[Call], setup: Setup | None = None) -> None:
        """Starts on what a run will call, and drops what it was told before."""
        self._foreseen = setup
        if self.is_on:
            self._calls = calls
            self._thread.submit(self._compile, calls, _ThreadSettings())

    def take_small(self) -> Experiment | None:
        """The run after its cut, if it is foreseen by now; drops what is left to do."""
        self._calls = None
        return self._small

    def _compile(self, calls: Iterable[Call], wanted: "_ThreadSettings") -> None:
        # What `with jax.default_matmul_precision(...)` and its like say holds for the
        # thread that says it: programs of this one would be others.
        is_same = wanted.are_here()
        for call in calls:
            if self._calls is not calls or not is_same:
                return
            self._small = call.small
            with contextlib.suppress(Exception):  # The run will meet it.
                call.program.compile_ahead(*call.args, **call.static)


def calls_to_come(
    experiment: Experiment,
    position: RunPosition,
    state: PyTree,
    batch: PyTree,
    options: Mapping[str, Any],
) -> Iterator[Call]:
    """Foresees the calls after a local step, about in their order."""
    current, programs = experiment.current, experiment.current.programs
    exchanges = exchanges_to_come(experiment, position)
    last = next(exchanges, None)
    if last is not None:
        yield Call(programs.exchange, (state,), last)
    yield Call(programs.report, (state,), {})
    yield Call(programs.clear, (state,), {})
    if experiment.config.run.eval_every_steps:
        yield Call(programs.network, (state,), {})
        yield Call(programs.evaluate, _evaluated(experiment, batch), {})
    for last in exchanges:
        yield Call(programs.exchange, (state,), last)
    cut_step = current.plan.shrink_step
    is_known = experiment.config.sparsity.budget != "global"
    if current.groups and cut_step and last and is_known:
        small = foresee_small(experiment, dict(last["keep_counts"]))
        programs = small.current.programs
        state = programs.abstract_state()
        yield Call(programs.local_step, (state, batch), options, small)
        for static in exchanges_to_come(small, replace(position, step=cut_step)):
            yield Call(programs.exchange, (state,), static, small)


class _ThreadSettings:
    """What jax's context managers say on the thread that makes it."""

    def __init__(self) -> None:
        self._num_traces = 0
        self._probe = jax.jit(self._count)
        self._probe()

    def _count(self) -> int:
        self._num_traces += 1
        return 0

    def are_here(self) -> bool:
        """Whether they say the same on this thread: then nothing is traced anew."""
        self._probe()
        return self._num_traces == 1


def exchanges_to_come(
    experiment: Experiment, position: RunPosition | None = None
) -> Iterator[dict[str, Any]]:
    """Static arguments of the exchanges to come with this network and method.

    From its beginning, or a position; each once, as far as they are known: a global
    budget chooses counts by scores, when their time comes.
    """
    position = position or RunPosition(keep_counts=experiment.channels.sizes)
    current, budget = experiment.current, experiment.channels.budget
    counts, density, seen = position.keep_counts, position.counts_density, set()
    for step in range(position.step + 1, _last_step(experiment, position) + 1):
        due = current.plan.round_after(step)
        if due is None or (due.stage.density, due.kind) in seen:
            continue
        seen.add((due.stage.density, due.kind))
        if current.method.pruning.in_rounds and due.stage.density != density:
            if experiment.config.sparsity.budget == "global":
                return
            density = due.stage.density
            counts = budget.keep_counts_at(density, None, counts)
        yield current.exchange_options(counts, due.kind)


def _last_step(experiment: Experiment, position: RunPosition) -> int:
    """The last step with this network and method, as far as it is known."""
    steps = [experiment.num_steps]
    cut_step = experiment.current.plan.shrink_step
    if experiment.current.groups and cut_step is not None:
        steps.append(cut_step)
    for phase in experiment.phases[position.phase + 1 :][:1]:
        if phase.trigger.step is not None:
            steps.append(phase.trigger.step)
    return min(steps)


def _evaluated(experiment: Experiment, batch: Mapping[str, Any]) -> tuple[PyTree, ...]:
    """Shapes of what an evaluation takes: parameters, statistics and a batch."""
    mesh, rows = experiment.mesh, experiment.eval_batch_size
    shapes = jax.eval_shape(experiment.current.model.init, jax.random.key(0))
    network = shapes_on(mesh, jax.P(), shapes)
    read = {k: x for k, x in batch.items() if k not in (TEACHER, TEACHER_WEIGHT)}
    like = jax.tree.map(
        lambda x: _shape((rows, *x.shape[1:]), x.dtype, x.sharding), read
    )
    placed = jax.tree.leaves(like)[0].sharding
    return *network, {**like, VALID: _shape((rows,), np.float32, placed)}


def _shape(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
