"""The loop: steps, exchanges, logging, evaluation, checkpoints, stopping.

It owns the order in which these happen and nothing else. State that must survive a
crash is in `TrainState` and in `extra` of the checkpoint; everything else is rebuilt.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from prunex_jax.base.signals import StopRequest
from prunex_jax.data import place_batch
from prunex_jax.mesh import HOST_AXIS, run_together
from prunex_jax.methods import Method
from prunex_jax.train.checkpoint import Checkpointer
from prunex_jax.train.evaluation import Result, evaluate_split
from prunex_jax.train.experiment import Experiment
from prunex_jax.train.folder import RunFolder
from prunex_jax.train.health import check_health
from prunex_jax.train.program import Program
from prunex_jax.train.progress import Clock, format_progress, progress_of
from prunex_jax.train.rounds import Round
from prunex_jax.train.screen import Screen
from prunex_jax.train.state import TrainState
from prunex_jax.train.step import Report
from prunex_jax.train.transitions import (
    Handover,
    change_method,
    describe,
    experiment_at,
    hand_over,
    saved_handover,
)

# Steps started ahead of the one that is waited for. On CPU the devices share threads,
# and collectives of several steps at once could wait for each other for ever.
_STEPS_IN_FLIGHT = {"cpu": 0}
_DEFAULT_STEPS_IN_FLIGHT = 2


# Called before the first step and after every one, outside the time of steps.
Watch = Callable[["Loop", TrainState], None]


class Loop:
    """One run from its newest checkpoint, or its beginning, to its end.

    Args:
      experiment: What runs.
      folder: Where metrics go.
      checkpointer: Where the state goes.
      stop: Asked after every step.
      screen: Where lines for people go.
      watch: Called between steps on every process; what it raises ends the run.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        checkpointer: Checkpointer,
        stop: StopRequest,
        screen: Screen,
        watch: Watch = lambda loop, state: None,
    ) -> None:
        self.experiment = experiment
        self.folder = folder
        self.checkpointer = checkpointer
        self.stop = stop
        self.screen = screen
        self.watch = watch
        self.clock = Clock()
        self.step = 0
        self.keep_counts = dict(experiment.sizes)
        self.counts_density = 1.0
        self.handover: Handover | None = None
        self.phase = 0
        # The phase whose method has done what it does before its first step.
        self.prepared_phase = -1
        # The method that has said that its steps may be the usual ones.
        self.ready_method: Method | None = None
        self.num_rounds = 0
        # Metrics that became known after the last step.
        self.news: dict[str, float] = {}
        self.tickets: collections.deque[jax.Array] = collections.deque()

    @property
    def num_steps(self) -> int:
        """Length of the run."""
        return self.experiment.plan.total_steps

    def run(self) -> tuple[TrainState, bool]:
        """Trains until the end or until asked to stop; saves the state either way.

        Returns:
          The state, and whether the run is complete.
        Raises:
          TrainingDivergedError: See `health.check_health`.
        """
        state = self._restore_or_start()
        is_complete = self.step >= self.num_steps
        if not is_complete:
            state, is_complete = self._train(state)
        self._save(state, wait=True)
        return state, is_complete

    def _restore_or_start(self) -> TrainState:
        experiment = self.experiment
        if self.checkpointer.latest_step() is None:
            self.folder.truncate_after(-1)
            key = jax.random.key(experiment.config.seed)
            return experiment.programs.init(key)
        state, extra = self.checkpointer.restore(
            lambda extra: experiment_at(experiment, extra).programs.abstract_state()
        )
        self.experiment = experiment_at(experiment, extra)
        self.handover = saved_handover(extra)
        self.phase = int(extra["phase"])
        self.prepared_phase = int(extra["prepared_phase"])
        self.num_rounds = int(extra["num_rounds"])
        self.step = int(extra["step"])
        self.keep_counts = dict(extra["keep_counts"])
        self.counts_density = float(extra["counts_density"])
        self.clock = Clock(state=extra["clock"])
        for field, value in extra["ledger"].items():
            setattr(experiment.ledger, field, value)
        self.folder.truncate_after(self.step)
        self.screen.line(f"resumed at step {self.step} of {self.num_steps}")
        return state

    def _train(self, state: TrainState) -> tuple[TrainState, bool]:
        config = self.experiment.config.run
        with self._batches() as batches:
            self.watch(self, state)
            while self.step < self.num_steps:
                state = self._prepare_if_new(state)
                batch, programs = next(batches), self.experiment.programs
                options, taught = self._step_options(state), self.experiment.taught
                if not programs.local_step.is_compiled(**options):
                    shown = taught(batch)
                    self._compile(programs.local_step, state, shown, **options)
                self.clock.resume()
                state, ticket = programs.local_step(state, taught(batch), **options)
                self.step += 1
                state = self._exchange_if_due(state)
                self._wait_for(ticket)
                self.clock.step_done()
                is_last = self.step == self.num_steps
                with self.clock.paused():
                    self.news = {}
                    if self.step % config.log_every_steps == 0 or is_last:
                        state = self._log(state)
                    if _is_due(self.step, config.eval_every_steps) and not is_last:
                        self._validate(state)
                    if is_last:
                        state = self._reestimate(state, batches)
                    if self.step == self.experiment.plan.shrink_step:
                        state = self._shrink(state)
                    if self._is_next_phase_due() and not is_last:
                        state = self._change_method(state)
                    if _is_due(self.step, config.checkpoint_every_steps):
                        self._save(state)
                    self.watch(self, state)
                    if self.stop.is_due() and not is_last:
                        return state, False
        return state, True

    def _prepare_if_new(self, state: TrainState) -> TrainState:
        """Does what a method does before its first step, on the batches to come."""
        experiment, method = self.experiment, self.experiment.method
        is_new = self.prepared_phase != self.phase
        self.prepared_phase = self.phase
        if not is_new or method.prepare is None:
            return state
        with self.clock.paused(), self._batches() as batches:
            coming = tuple(itertools.islice(batches, method.prepare_batches))
            state = experiment.programs.prepare(state, coming)
        if method.masks(state.opt_state):
            self.keep_counts = dict(experiment.keep_counts)
        return state

    def _step_options(self, state: TrainState) -> dict[str, Any]:
        """Static arguments of the next step."""
        method = self.experiment.method
        if self.ready_method is not method and method.is_ready is not None:
            if not np.asarray(method.is_ready(state.opt_state)):
                return dict(method.unready_options)
        self.ready_method = method
        return method.step_options(self.step)

    @contextlib.contextmanager
    def _batches(self) -> Iterator[Iterator[dict[str, jax.Array]]]:
        """Batches from the current step on, on the mesh."""
        experiment = self.experiment
        with experiment.make_loader().batches(self.step) as batches:
            yield (
                place_batch(batch, experiment.mesh, experiment.rows)
                for batch in batches
            )

    def _wait_for(self, ticket: jax.Array) -> None:
        """Keeps few steps in flight, so that what is timed is what happened."""
        self.tickets.append(ticket)
        platform = jax.default_backend()
        ahead = _STEPS_IN_FLIGHT.get(platform, _DEFAULT_STEPS_IN_FLIGHT)
        while len(self.tickets) > ahead:
            jax.block_until_ready(self.tickets.popleft())

    def _compile(self, program: Program, *args: Any, **static: Any) -> None:
        """Compiles what is new, on all processes, outside the time of steps."""
        if not program.is_compiled(**static):
            with self.clock.paused():
                # Alone, a process would count how long it waits for those that compile.
                run_together(lambda: program.compile(*args, **static))

    def _exchange_if_due(self, state: TrainState) -> TrainState:
        method, plan = self.experiment.method, self.experiment.plan
        due = plan.round_after(self.step)
        if due is not None:
            return self._exchange(state, due)
        if not method.sync_period and method.payload_elements(self.keep_counts):
            self.num_rounds += 1  # every step is one
        return state

    def _exchange(self, state: TrainState, due: Round) -> TrainState:
        self.num_rounds += 1
        self._choose_counts(state, due)
        program = self.experiment.programs.exchange
        names = sorted(group.name for group in self.experiment.groups)
        static = {
            "keep_counts": tuple((name, self.keep_counts[name]) for name in names),
            "kind": due.kind,
        }
        self._compile(program, state, **static)
        return program(state, **static)

    def _choose_counts(self, state: TrainState, due: Round) -> None:
        """Sets how many channels each group keeps, where the density has changed."""
        density = due.stage.density
        if density == self.counts_density or not self.experiment.method.prunes:
            return
        experiment = self.experiment
        with self.clock.paused():
            scores = None
            if experiment.config.sparsity.budget == "global":
                raw = experiment.programs.scores(state)
                scores = {name: np.asarray(score) for name, score in raw.items()}
            self.keep_counts = experiment.budget.keep_counts_at(
                density, scores, self.keep_counts
            )
        self.counts_density = density

    def _shrink(self, state: TrainState) -> TrainState:
        """Goes on with the small network; steps are timed anew."""
        self.experiment, state, self.handover = hand_over(
            self.experiment, state, self.step, self.clock.seconds_per_step_median
        )
        self.clock.forget_steps()
        self.screen.line(
            f"step {self.step}: {describe(self.experiment, self.handover)}"
        )
        return state

    def _reestimate(self, state: TrainState, batches: Iterator[Any]) -> TrainState:
        """Takes batch statistics of the network that is left, from batches to come."""
        count = self.experiment.config.run.reestimate_batches
        for number, batch in enumerate(itertools.islice(batches, count)):
            state = self.experiment.programs.reestimate(state, batch, number)
        return state

    def _is_next_phase_due(self) -> bool:
        phases = self.experiment.phases
        if self.phase + 1 == len(phases):
            return False
        return phases[self.phase + 1].trigger.is_due(self.step, self.news)

    def _change_method(self, state: TrainState) -> TrainState:
        """Ends a phase: its last exchange, what it has pruned, and the next method."""
        experiment, plan = self.experiment, self.experiment.plan
        if plan.sync_period and plan.round_after(self.step) is None:
            state = self._exchange(state, plan.round_at(self.step))
        if self.handover is None and self.channel_sparsity() > 0:
            state = self._shrink(state)
        self.phase += 1
        name = experiment.phases[self.phase].method
        self.experiment, state = change_method(self.experiment, state, name)
        self.clock.forget_steps()
        self.screen.line(f"step {self.step}: goes on with method {name}")
        return state

    def _log(self, state: TrainState) -> TrainState:
        programs = self.experiment.programs
        report = jax.device_get(programs.report(state))
        self._check_health(report)
        row = self._row(report)
        self.folder.append(row)
        self.news |= {"loss": row["loss"], "accuracy": row["accuracy"]}
        config = self.experiment.config
        progress = progress_of(row, self.num_steps, config.data.batch_size)
        self.screen.line(format_progress(progress))
        return programs.clear(state)

    def _check_health(self, report: Report) -> None:
        largest = self.experiment.config.run.max_host_drift
        check_health(report, largest, self.step, self.checkpointer.latest_step())

    def _spent(self) -> dict[str, float]:
        """What the run has cost so far."""
        return {
            "host_wire_bytes": self.experiment.ledger.wire_bytes.get(HOST_AXIS, 0.0),
            "seconds_in_steps": self.clock.seconds_in_steps,
        }

    def _row(self, report: Report) -> dict[str, Any]:
        experiment, spent = self.experiment, self._spent()
        dense_bytes = experiment.dense_host_bytes_per_step * self.step
        return {
            "step": self.step,
            "loss": float(report.loss),
            "accuracy": float(report.accuracy),
            "learning_rate": float(experiment.learning_rate(self.step - 1)),
            "sparsity": self.channel_sparsity(),
            **spent,
            "host_wire_ratio": (
                spent["host_wire_bytes"] / dense_bytes if dense_bytes else 0.0
            ),
            "seconds_per_step_median": self.clock.seconds_per_step_median,
            **jax.tree.map(float, report.health),
        }

    def channel_sparsity(self) -> float:
        """Share of the prunable channels that are removed now."""
        total = sum(self.experiment.sizes.values())
        return 1.0 - sum(self.keep_counts.values()) / max(total, 1)

    def _validate(self, state: TrainState) -> None:
        """Scores the network as it is now on the validation split."""
        result = self.validation_result(state)
        if result is None:
            return
        found = {
            "validation_loss": result.loss,
            "validation_accuracy": result.accuracy,
        }
        self.folder.append({"step": self.step, **self._spent(), **found})
        self.news |= found
        self.screen.line(
            f"step {self.step}: validation accuracy {result.accuracy:.4f}, "
            f"loss {result.loss:.4f}"
        )

    def validation_result(self, state: TrainState) -> Result | None:
        """Scores on the validation split; None if it is empty or the run must stop."""
        experiment = self.experiment
        params, statistics = experiment.programs.network(state)
        return evaluate_split(
            experiment.programs.evaluate,
            params,
            statistics,
            experiment.dataset.validation,
            mesh=experiment.mesh,
            batch_size=experiment.eval_batch_size,
            rows=experiment.eval_rows,
            num_workers=experiment.config.data.num_workers,
            should_stop=self.stop.is_due,
        )

    def _save(self, state: TrainState, wait: bool = False) -> None:
        """Saves a state that is known to be good."""
        self._check_health(jax.device_get(self.experiment.programs.report(state)))
        extra = {
            "step": self.step,
            "keep_counts": self.keep_counts,
            "counts_density": self.counts_density,
            "phase": self.phase,
            "prepared_phase": self.prepared_phase,
            "num_rounds": self.num_rounds,
            "handover": self.handover and dataclasses.asdict(self.handover),
            "clock": self.clock.state_dict(),
            "ledger": dataclasses.asdict(self.experiment.ledger),
        }
        self.checkpointer.save(self.step, state, extra, wait=wait)


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
