"""The loop: steps, exchanges, logging, evaluation, checkpoints, stopping.

What must survive a crash is in `TrainState` and `RunPosition`, which checkpoints hold;
everything else is rebuilt.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from prunex_jax.base.signals import StopRequest
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS, placed, run_together
from prunex_jax.methods import Method
from prunex_jax.models import AnyModel
from prunex_jax.processes import StepTimes
from prunex_jax.tasks import Batch
from prunex_jax.train.ahead import CompilerAhead
from prunex_jax.train.checkpoint import Checkpointer
from prunex_jax.train.clock import Clock
from prunex_jax.train.console import Console, in_words
from prunex_jax.train.evaluation import check_health, validate
from prunex_jax.train.experiment import Experiment, Setup
from prunex_jax.train.folder import RunFolder
from prunex_jax.train.network_mean import (
    STATISTICS_BATCHES,
    MeanPlan,
    NetworkMean,
    SavedRun,
    empty_mean,
    with_network,
    with_statistics,
)
from prunex_jax.train.position import RunPosition
from prunex_jax.train.profiling import PROFILE, Profiler, profile_window
from prunex_jax.train.program import Program
from prunex_jax.train.restoring import restore_run
from prunex_jax.train.rounds import Round
from prunex_jax.train.state import TrainState
from prunex_jax.train.step import Report
from prunex_jax.train.steps_in_flight import StepsInFlight
from prunex_jax.train.transitions import (
    change_method,
    describe,
    hand_over,
)
from prunex_jax.train.work import macs_left_out, seen_until, speed_of

Batches = Iterator[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """How far a run is, for those who watch it."""

    experiment: Experiment  # with the method and the network of now
    position: RunPosition

    @property
    def step(self) -> int:
        """Steps done."""
        return self.position.step


# Called before the first step and after every one, outside the time of steps.
Watch = Callable[[Progress, TrainState], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Surroundings:
    """What a run writes to and listens to."""

    folder: RunFolder
    checkpointer: Checkpointer
    console: Console
    stop: StopRequest  # asked after every step, on every process
    watch: Watch | None = None  # what it raises ends the run
    # Told what the run does, for those who wait for it: a phase, and perhaps a step.
    at: Callable[[str, int | None], None] = lambda phase, step: None
    # Given what says how long steps take, for those who wait for them.
    timed_by: Callable[[Callable[[], StepTimes]], None] = lambda measure: None
    exact_topology: bool = False  # refuses checkpoints of another mesh


class Loop:
    """One run from its newest checkpoint, or its beginning, to its end.

    Args:
      experiment: What runs; the attribute has the method and the network of now.
      around: What it writes to and listens to.
    Attributes:
      position: Where it is; its clock and ledger are those of `progress`.
      clock: Times its steps.
      final_mean: What the final network is, where it is not that of the state.
    """

    def __init__(self, experiment: Experiment, around: Surroundings) -> None:
        self.experiment = experiment
        self.position = RunPosition(keep_counts=experiment.channels.sizes)
        self.clock = Clock()
        self._around = around
        # The method that has said that its steps may be the usual ones.
        self._settled_method: Method | None = None
        # Metrics that became known after the last step.
        self._news: dict[str, float] = {}
        self._in_flight = StepsInFlight()
        around.timed_by(self._in_flight.times)
        self._ahead = CompilerAhead(_compiles_ahead(experiment))
        window = profile_window(experiment.config.run.profile_steps, self.num_steps)
        self._profiler = Profiler(
            window if around.folder.is_primary else None,
            around.folder.workdir / PROFILE,
            around.console.line,
        )
        # What it has been told to foresee.
        self._foreseen: Setup | None = None
        # Means of networks, each from its first one on.
        self._own_teacher: NetworkMean | None = None
        self.final_mean: NetworkMean | None = None

    @property
    def num_steps(self) -> int:
        """Length of the run."""
        return self.experiment.num_steps

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        clock, ledger = self.clock.totals(), self.experiment.ledger.copy()
        position = dataclasses.replace(self.position, clock=clock, ledger=ledger)
        return Progress(self.experiment, position)

    def run(self) -> tuple[TrainState, bool]:
        """Trains until the end or until asked to stop; saves the state either way.

        Returns:
          The state, and whether the run is complete.
        Raises:
          TrainingDivergedError: See `evaluation.check_health`.
        """
        state = self._restore_or_start()
        is_complete = self.position.step >= self.num_steps
        if not is_complete:
            state, is_complete = self._train(state)
        self._save(state, wait=True)
        return state, is_complete

    def _restore_or_start(self) -> TrainState:
        experiment, around = self.experiment, self._around
        if around.checkpointer.latest_step() is None:
            around.folder.truncate_after(-1)
            return self._start()

        found = restore_run(around.checkpointer, experiment)
        if around.exact_topology:
            found.check_same_mesh()
        self._own_teacher = found.run.own_teacher
        self.final_mean = found.run.final_mean
        self.position, self.experiment = found.position, found.experiment
        self.experiment.ledger.go_on_from(self.position.ledger)
        self.clock = Clock(self.position.clock)
        around.folder.truncate_after(self.position.step)
        self._tell(f"resumed at step {self.position.step} of {self.num_steps}")
        if found.regrouped:
            self._tell(found.regrouped)
        return found.run.state

    def _start(self) -> TrainState:
        """The state before the first step; trained weights are scored before it."""
        experiment = self.experiment
        key = jax.random.key(experiment.config.seed)
        init = experiment.current.programs.init
        given: tuple[Any, ...] = ()
        if experiment.start is not None:
            given = (placed(experiment.start.arrays, experiment.mesh),)
        with self._busy("compiling what draws the parameters"):
            state = init(key, *given)
        if experiment.start is None:
            return state
        self._validate(state)
        return state

    def _train(self, state: TrainState) -> tuple[TrainState, bool]:
        batches_from_here = self.experiment.batches(self.position.step)
        with self._ahead, self._profiler, batches_from_here as batches:
            self._show(state)
            while self.position.step < self.num_steps:
                state = self._prepare_if_new(state)
                state = self._do_step(state, self._in_flight.next_of(batches))
                self._around.checkpointer.check()
                with self.clock.paused():
                    state = self._do_what_is_due(state, batches)
                    self._show(state)
                    is_last = self.position.step == self.num_steps
                    if self._around.stop.is_due() and not is_last:
                        return state, False
        return state, True

    def _do_step(self, state: TrainState, batch: dict[str, jax.Array]) -> TrainState:
        """One local step, and the exchange that follows it."""
        local_step = self.experiment.current.programs.local_step
        options, taught = self._step_options(state), self._taught
        if not local_step.is_compiled(**options):
            self._compile(local_step, state, taught(batch), **options)
        if self._ahead.is_on and self._foreseen is not self.experiment.current:
            self._foreseen = self.experiment.current
            self._ahead.foresee(
                self.experiment, self.position, state, taught(batch), options
            )
        seconds_before = self.clock.seconds_in_steps
        self._around.at("step", self.position.step + 1)
        self._profiler.before_step(self.position.step)
        self.clock.resume()
        state, ticket = local_step(state, taught(batch), **options)
        num_rounds = self.position.num_rounds + ("sends" in options)
        self._move(num_rounds=num_rounds)
        self._count_step()
        is_local = not local_step.sends_over(HOST_AXIS, **options)
        self._in_flight.started(ticket, is_local=is_local)
        state = self._exchange_if_due(state)
        self._in_flight.wait()
        self.clock.step_done()
        self._in_flight.step_done(self.clock.seconds_in_steps - seconds_before)
        self._profiler.after_step(self.position.step, ticket)
        return state

    def _count_step(self) -> None:
        experiment, position = self.experiment, self.position
        left_out_macs = macs_left_out(experiment, position.step)
        self._move(
            step=position.step + 1,
            left_out=position.left_out + experiment.left_out,
            left_out_macs=position.left_out_macs + left_out_macs,
        )

    def _do_what_is_due(self, state: TrainState, batches: Batches) -> TrainState:
        """All that may follow a step, in this order."""
        config, step = self.experiment.config.run, self.position.step
        is_last = step == self.num_steps
        self._news = {}
        self._gather_means(state)
        if step % config.log_every_steps == 0 or is_last:
            state = self._log(state)
        if _is_due(step, config.eval_every_steps) and not is_last:
            self._validate(state)
        if is_last:
            state = self._reestimate(state, batches)
        plan = self.experiment.current.plan
        if step == plan.next_cut_after(step - 1):
            state = self._shrink(state, is_last=step == plan.shrink_step)
        if self._is_next_phase_due() and not is_last:
            state = self._change_method(state)
        if _is_due(step, config.checkpoint_every_steps):
            self._save(state)
        return state

    def _taught(self, batch: Batch) -> Batch:
        """A batch with what its teacher says, where the run has one."""
        teaching = self.experiment.teaching
        if teaching is None:
            return batch
        return teaching.taught(batch, self.position.step, self._own_teacher)

    def _gather_means(self, state: TrainState) -> None:
        """Keeps the means of networks that the run learns from, and ends with."""
        experiment, step = self.experiment, self.position.step
        teaching, final = experiment.teaching, experiment.final_mean
        if teaching is not None and teaching.own is not None:
            model = experiment.task.model
            own = self._gathered(teaching.own, model, self._own_teacher, state)
            if own is not None and step == teaching.own.complete:
                count = round(float(own.num_networks))
                text = f"learns from the mean of its last {count} networks"
                self._tell(f"step {step}: {text}")
            self._own_teacher = own if teaching.holds_own_after(step) else None
        if final is not None:
            model = experiment.current.model
            self.final_mean = self._gathered(final, model, self.final_mean, state)

    def _gathered(
        self,
        plan: MeanPlan,
        model: AnyModel,
        mean: NetworkMean | None,
        state: TrainState,
    ) -> NetworkMean | None:
        """A mean, with the network of now where it is one of its networks."""
        experiment, step = self.experiment, self.position.step
        programs = experiment.current.programs
        if plan.gathers_after(step):
            if mean is None:
                mean = empty_mean(model, experiment.mesh)
            mean = with_network(mean, programs, state)
        if mean is not None and step == plan.complete:
            with experiment.batches(step) as batches:
                coming = itertools.islice(batches, STATISTICS_BATCHES)
                mean = with_statistics(mean, programs, state, coming)
        return mean

    def _move(self, **changes: Any) -> None:
        self.position = dataclasses.replace(self.position, **changes)

    def _tell(self, text: str) -> None:
        self._around.console.line(text)

    def _busy(
        self, text: str, phase: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Says that something goes on, here and to those who wait for this process."""
        self._in_flight.drained()
        if phase:
            self._around.at(phase, None)
        return self._around.console.busy(text)

    def _show(self, state: TrainState) -> None:
        if self._around.watch is not None:
            self._around.watch(self.progress, state)

    def _prepare_if_new(self, state: TrainState) -> TrainState:
        """Does what a method does before its first step, on the batches to come."""
        experiment, position = self.experiment, self.position
        method = experiment.current.method
        is_new = position.prepared_phase != position.phase
        self._move(prepared_phase=position.phase)
        if not is_new or method.prepare is None:
            return state
        with (
            self.clock.paused(),
            self._busy(f"preparing {method.name}"),
            experiment.batches(position.step) as batches,
        ):
            coming = tuple(itertools.islice(batches, method.prepare_batches))
            state = experiment.current.programs.prepare(state, coming)
        if method.masks(state.opt_state):
            self._move(keep_counts=dict(experiment.channels.keep_counts))
        return state

    def _step_options(self, state: TrainState) -> dict[str, Any]:
        """Static arguments of the next step."""
        method = self.experiment.current.method
        if self._settled_method is not method and method.early_options is not None:
            options = method.early_options(state.opt_state)
            if options is not None:
                return options
        self._settled_method = method
        position = self.position
        return self.experiment.current.step_options(position.step, position.keep_counts)

    def _compile(self, program: Program, *args: Any, **static: Any) -> None:
        """Compiles what is new, on all processes, outside the time of steps."""
        if not program.is_compiled(**static):
            name = program.name.replace("_", " ")
            with self.clock.paused(), self._busy(f"compiling the {name}", "compile"):
                # Alone, a process would count how long it waits for those that compile.
                run_together(lambda: program.compile(*args, **static))

    def _exchange_if_due(self, state: TrainState) -> TrainState:
        current, position = self.experiment.current, self.position
        due = current.plan.round_after(position.step)
        if due is not None:
            return self._exchange(state, due)
        method = current.method
        if not method.sync_period and method.payload_elements(position.keep_counts):
            self._move(num_rounds=position.num_rounds + 1)  # Every step is one.
        return state

    def _exchange(self, state: TrainState, due: Round) -> TrainState:
        self._move(num_rounds=self.position.num_rounds + 1)
        self._choose_counts(state, due.stage.density)
        current, counts = self.experiment.current, self.position.keep_counts
        exchange = current.programs.exchange
        options = current.exchange_options(counts, due.kind)
        self._compile(exchange, state, **options)
        self._around.at("exchange", None)
        self._in_flight.exchanged()
        return exchange(state, **options)

    def _choose_counts(self, state: TrainState, density: float) -> None:
        """Sets how many channels each group keeps, where the density has changed."""
        experiment, position = self.experiment, self.position
        current, budget = experiment.current, experiment.channels.budget
        if density == position.counts_density or not current.method.prunes:
            return
        with self.clock.paused():
            scores = None
            if experiment.config.sparsity.budget == "global":
                scores = jax.device_get(current.programs.scores(state))
            counts = budget.keep_counts_at(density, scores, position.keep_counts)
        self._move(keep_counts=counts, counts_density=density)

    def _shrink(self, state: TrainState, is_last: bool = True) -> TrainState:
        """Goes on with the small network; steps are timed anew."""
        self._around.at("shrink", None)
        step, seconds = self.position.step, self.clock.seconds_per_step_median
        with self._busy("shrinking the network"):
            self.experiment, state, cut = hand_over(
                self.experiment,
                state,
                step,
                seconds,
                before=self.position.handover,
                is_last=is_last,
                foreseen=self._ahead.take_small(),
            )
        self._move(handover=cut)
        self.clock.forget_steps()
        self._tell(f"step {step}: {describe(self.experiment, cut)}")
        if not self.experiment.config.run.reestimate_batches:
            return state
        with self.experiment.batches(step) as batches:
            return self._reestimate(state, batches)

    def _reestimate(self, state: TrainState, batches: Batches) -> TrainState:
        """Takes batch statistics of the network that is left, from batches to come."""
        reestimate = self.experiment.current.programs.reestimate
        count = self.experiment.config.run.reestimate_batches
        with self._busy("taking batch statistics anew"):
            for number, batch in enumerate(itertools.islice(batches, count)):
                state = reestimate(state, batch, number)
        return state

    def _is_next_phase_due(self) -> bool:
        following = self.experiment.phases[self.position.phase + 1 :]
        step, news = self.position.step, self._news
        return bool(following) and following[0].trigger.is_due(step, news)

    def _change_method(self, state: TrainState) -> TrainState:
        """Ends a phase: its last exchange, what it has pruned, and the next method."""
        step = self.position.step
        last = self.experiment.current.plan.round_to_leave(step)
        if last is not None:
            state = self._exchange(state, last)
        cut = self.position.handover
        if (cut is None or not cut.is_last) and self._channel_sparsity() > 0:
            state = self._shrink(state)
        self._move(phase=self.position.phase + 1)
        name = self.experiment.phases[self.position.phase].method
        self.experiment, state = change_method(self.experiment, state, name)
        self.clock.forget_steps()
        self._tell(f"step {step}: goes on with method {name}")
        return state

    def _log(self, state: TrainState) -> TrainState:
        programs = self.experiment.current.programs
        with self._busy("measuring the last steps"):
            report = jax.device_get(programs.report(state))
        self._check_health(report)
        row = self._row(report)
        self._around.folder.append(row)
        self._news |= {name: row[name] for name in report.measures}
        batch_size = self.experiment.batch_size
        objective = self.experiment.task.objective
        self._around.console.progress(row, self.num_steps, batch_size, objective)
        return programs.clear(state)

    def _check_health(self, report: Report) -> None:
        largest = self.experiment.config.run.max_host_drift
        last_good_step = self._around.checkpointer.newest_step()
        check_health(report, largest, self.position.step, last_good_step)

    def _spent(self) -> dict[str, float]:
        """What the run has cost so far, and in which of its phases it is."""
        sent = self.experiment.ledger.wire_bytes
        return {
            "phase": self.position.phase,
            "host_wire_bytes": sent.get(HOST_AXIS, 0.0),
            "device_wire_bytes": sent.get(DEVICE_AXIS, 0.0),
            "seconds_in_steps": self.clock.seconds_in_steps,
        }

    def _row(self, report: Report) -> dict[str, Any]:
        experiment, step, spent = self.experiment, self.position.step, self._spent()
        per_step = experiment.dense_host_bytes_per_step
        dense_bytes = self.position.dense_bytes(per_step)
        return {
            "step": step,
            **jax.tree.map(float, report.measures),
            "learning_rate": float(experiment.learning_rate(step - 1)),
            "sparsity": self._channel_sparsity(),
            **spent,
            "host_wire_ratio": (
                spent["host_wire_bytes"] / dense_bytes if dense_bytes else 0.0
            ),
            **seen_until(experiment, self.position),
            "seconds_per_step_median": self.clock.seconds_per_step_median,
            **speed_of(experiment, self.clock.seconds_per_step_median),
            **jax.tree.map(float, report.health),
        }

    def _channel_sparsity(self) -> float:
        """Share of the prunable channels that are removed now."""
        total = sum(self.experiment.channels.sizes.values())
        return 1.0 - sum(self.position.keep_counts.values()) / max(total, 1)

    def _validate(self, state: TrainState) -> None:
        """Scores the network as it is now on the validation split."""
        with self._busy("evaluating", "evaluate"):
            result = validate(self.experiment, state, self._around.stop.is_due)
        if result is None:
            return
        step, measures = self.position.step, result.measures
        found = {f"validation_{name}": value for name, value in measures.items()}
        self._around.folder.append({"step": step, **self._spent(), **found})
        self._news |= found
        self._tell(f"step {step}: validation {in_words(measures)}")

    def _save(self, state: TrainState, wait: bool = False) -> None:
        """Saves a state that is known to be good."""
        self._around.at("save", None)
        report = self.experiment.current.programs.report(state)
        self._check_health(jax.device_get(report))
        position = self.progress.position.to_dict()
        saved = SavedRun(*state, self._own_teacher, self.final_mean)
        with self._busy("saving a checkpoint"):
            self._around.checkpointer.save(position["step"], saved, position, wait=wait)


def _compiles_ahead(experiment: Experiment) -> bool:
    """Whether programs are compiled while steps run."""
    choice = experiment.config.run.compile_ahead
    if choice == "auto":  # Steps on CPU want all cores themselves.
        return experiment.mesh.devices.flat[0].platform != "cpu"
    return choice == "on"


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
