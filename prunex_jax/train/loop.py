"""The loop: restore or start; then step after step, and what may follow a step.

    for every step:
        prepare the method, where it is a new one
        local step on the next batch, and the exchange if one is due
        of `Loop._follow_ups`, in order, what is due:
            take the network into the run's own teacher, log, evaluate, take batch
            statistics anew, cut channels out, change the method, save
        what the caller has asked for

What must survive a crash is in `SavedRun` and `RunPosition`, which checkpoints hold;
everything else is rebuilt.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from prunex_jax.base.errors import UserError
from prunex_jax.base.signals import StopRequest
from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import HOST_AXIS, placed, run_together
from prunex_jax.methods import Method
from prunex_jax.processes import StepTimes
from prunex_jax.tasks import Batch
from prunex_jax.train.build.experiment import Experiment
from prunex_jax.train.build.rounds import Round
from prunex_jax.train.build.work import macs_left_out
from prunex_jax.train.changes.ahead import CompilerAhead, calls_to_come
from prunex_jax.train.changes.means import gather_own_teacher
from prunex_jax.train.changes.repair import repaired, repairs
from prunex_jax.train.changes.transitions import change_method, describe, hand_over
from prunex_jax.train.console import Console
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.folder import RunFolder
from prunex_jax.train.records.restoring import restore_run
from prunex_jax.train.records.rows import channel_sparsity, spent, training_row
from prunex_jax.train.records.scores import check_health, validate
from prunex_jax.train.records.summary import in_words
from prunex_jax.train.steps.clock import Clock
from prunex_jax.train.steps.compiled import Program, shapes_of
from prunex_jax.train.steps.in_flight import StepsInFlight
from prunex_jax.train.steps.position import RunPosition
from prunex_jax.train.steps.profiling import PROFILE, Profiler, profile_window
from prunex_jax.train.steps.programs import Report
from prunex_jax.train.steps.state import NetworkMean, SavedRun, TrainState

_FIRST_STEP = (
    "compiling the first step: seconds for a small network, a minute or two for a "
    "large one"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """How far a run is."""

    experiment: Experiment  # with the method and the network of now
    position: RunPosition

    @property
    def step(self) -> int:
        """Steps done."""
        return self.position.step


# Something that a caller does before the first step and after every one, outside the
# time of steps; alone, or with what says when.
Watch = Callable[[Progress, TrainState], None]
When = Callable[[Progress], bool]
AfterStep = Watch | tuple[When, Watch]


def every(num_steps: int) -> When:
    """After every so many steps; for `after_step` of `train`.

    Raises:
      UserError: Not at least one.
    Example:
      >>> when = every(100)
      >>> [when(Progress(None, RunPosition({}, step=step))) for step in (100, 150)]
      [True, False]
    """
    if num_steps < 1:
        raise UserError(f"every({num_steps}) must be at least 1 step")
    return lambda progress: progress.step % num_steps == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Surroundings:
    """What a run writes to and listens to."""

    folder: RunFolder
    checkpointer: Checkpointer
    console: Console
    stop: StopRequest  # asked after every step, on every process
    after_step: Sequence[AfterStep] = ()  # what one of them raises ends the run
    # Told what the run does, for those who wait for it: a phase, and perhaps a step.
    at: Callable[[str, int | None], None] = lambda phase, step: None
    # Given what says how long steps take, for those who wait for them.
    timed_by: Callable[[Callable[[], StepTimes]], None] = lambda measure: None


class FollowUp(NamedTuple):
    """Something that may follow a step."""

    is_due: Callable[[], bool]
    do: Callable[[], None]


class Loop:
    """One run from its newest checkpoint, or its beginning, to its end.

    Args:
      experiment: What runs; the attribute has the method and the network of now.
      around: What it writes to and listens to.
    Attributes:
      position: Where it is; its clock and ledger are those of `progress`.
      state: What it trains, once it has started.
      own_teacher: The mean of its networks that it learns from, if it has one by now.
      clock: Times its steps.
    """

    state: TrainState

    def __init__(self, experiment: Experiment, around: Surroundings) -> None:
        self.experiment = experiment
        self.position = RunPosition(keep_counts=experiment.channels.sizes)
        self.own_teacher: NetworkMean | None = None
        self.clock = Clock()
        self._around = around
        self._follow_ups = self._make_follow_ups()
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

    # ---- where the run is

    @property
    def num_steps(self) -> int:
        """Length of the run."""
        return self.experiment.num_steps

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.position.step >= self.num_steps

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        clock, ledger = self.clock.totals(), self.experiment.ledger.copy()
        position = dataclasses.replace(self.position, clock=clock, ledger=ledger)
        return Progress(self.experiment, position)

    def _move(self, **changes: Any) -> None:
        self.position = dataclasses.replace(self.position, **changes)

    # ---- from the beginning to the end

    def steps(self) -> Iterator[None]:
        """Trains, and stands still before the first step and after every one.

        The state is saved at the end, and where the run is asked to stop or whoever
        iterates goes away. `is_complete` says afterwards which it was.

        Raises:
          TrainingDivergedError: See `scores.check_health`.
        """
        self._restore_or_start()
        if self.is_complete:  # Nothing is to be done, or saved.
            return
        try:
            yield from self._train()
        except GeneratorExit:
            self._save(wait=True)
            raise
        self._save(wait=True)

    def _restore_or_start(self) -> None:
        around = self._around
        if around.checkpointer.latest_step() is None:
            around.folder.truncate_after(-1)
            self._start()
            return
        found = restore_run(around.checkpointer, self.experiment)
        self.state = found.run.state
        self.own_teacher = found.run.own_teacher
        self.position, self.experiment = found.position, found.experiment
        self.experiment.ledger.go_on_from(self.position.ledger)
        self.clock = Clock(self.position.clock)
        around.folder.truncate_after(self.position.step)
        self._tell(f"resumed at step {self.position.step} of {self.num_steps}")
        if found.regrouped:
            self._tell(found.regrouped)

    def _start(self) -> None:
        """Draws the first state; trained weights are scored before the first step."""
        experiment = self.experiment
        key = jax.random.key(experiment.config.seed)
        init = experiment.current.programs.init
        given: tuple[Any, ...] = ()
        if experiment.start is not None:
            given = (placed(experiment.start.arrays, experiment.mesh),)
        with self._busy("compiling what draws the parameters"):
            self.state = init(key, *given)
        if experiment.start is not None:
            self._validate()

    def _train(self) -> Iterator[None]:
        batches_from_here = self.experiment.batches(self.position.step)
        self._tell(_FIRST_STEP)
        with self._ahead, self._profiler, batches_from_here as batches:
            self._do_what_callers_want()
            yield
            while not self.is_complete:
                self._prepare_if_new()
                self._do_step(self._in_flight.next_of(batches))
                self._around.checkpointer.check()
                with self.clock.paused():
                    self._news = {}
                    for follow_up in self._follow_ups:
                        if follow_up.is_due():
                            follow_up.do()
                    self._do_what_callers_want()
                    yield
                    if self._around.stop.is_due() and not self.is_complete:
                        return

    def _make_follow_ups(self) -> tuple[FollowUp, ...]:
        """All that may follow a step, in this order."""
        config = self.experiment.config.run

        def after_every(num_steps: int) -> bool:
            return num_steps > 0 and self.position.step % num_steps == 0

        return (
            FollowUp(lambda: True, self._gather_own_teacher),
            FollowUp(
                lambda: self.is_complete or after_every(config.log_every_steps),
                self._log,
            ),
            FollowUp(
                lambda: not self.is_complete and after_every(config.eval_every_steps),
                self._validate,
            ),
            FollowUp(lambda: self.is_complete, self._reestimate),
            FollowUp(self._is_cut_due, self._cut),
            FollowUp(
                lambda: not self.is_complete and self._is_next_phase_due(),
                self._change_method,
            ),
            FollowUp(lambda: after_every(config.checkpoint_every_steps), self._save),
        )

    def _do_what_callers_want(self) -> None:
        asked = self._around.after_step
        if not asked:
            return
        progress = self.progress
        for each in asked:
            when, watch = each if isinstance(each, tuple) else (None, each)
            if when is None or when(progress):
                watch(progress, self.state)

    # ---- one step

    def _prepare_if_new(self) -> None:
        """Does what a method does before its first step, on the batches to come."""
        experiment, position = self.experiment, self.position
        method = experiment.current.method
        is_new = position.prepared_phase != position.phase
        self._move(prepared_phase=position.phase)
        if not is_new or method.preparation is None:
            return
        with (
            self.clock.paused(),
            self._busy(f"preparing {method.name}"),
            experiment.batches(position.step) as batches,
        ):
            coming = tuple(itertools.islice(batches, method.preparation.num_batches))
            self.state = experiment.current.programs.prepare(self.state, coming)
        if method.pruning.masks(self.state.opt_state):
            self._move(keep_counts=dict(experiment.channels.keep_counts))

    def _do_step(self, batch: dict[str, jax.Array]) -> None:
        """One local step, and the exchange that follows it."""
        local_step = self.experiment.current.programs.local_step
        options, taught = self._step_options(), self._taught
        if not local_step.is_compiled(**options):
            self._compile(local_step, taught(batch), **options)
        if self._ahead.is_new(self.experiment):
            self._foresee(shapes_of(taught(batch)), options)
        seconds_before = self.clock.seconds_in_steps
        self._around.at("step", self.position.step + 1)
        self._profiler.before_step(self.position.step)
        self.clock.resume()
        self.state, ticket = local_step(self.state, taught(batch), **options)
        self._count_step(sends="sends" in options)
        is_local = not local_step.sends_over(HOST_AXIS, **options)
        self._in_flight.started(ticket, is_local=is_local)
        self._exchange_if_due()
        self._in_flight.wait()
        self.clock.step_done()
        self._in_flight.step_done(self.clock.seconds_in_steps - seconds_before)
        self._profiler.after_step(self.position.step, ticket)

    def _foresee(self, batch: Batch, options: Mapping[str, Any]) -> None:
        """Starts to compile what is called after steps with this method and network."""
        experiment, shapes = self.experiment, shapes_of(self.state)
        calls = calls_to_come(experiment, self.position, shapes, batch, options)
        self._ahead.foresee(calls, experiment.current)

    def _step_options(self) -> dict[str, Any]:
        """Static arguments of the next step."""
        method = self.experiment.current.method
        early = method.step_options.early
        if self._settled_method is not method and early is not None:
            options = early(self.state.opt_state)
            if options is not None:
                return options
        self._settled_method = method
        position = self.position
        return self.experiment.current.step_options(position.step, position.keep_counts)

    def _taught(self, batch: Batch) -> Batch:
        """A batch with what its teacher says, where the run has one."""
        teaching = self.experiment.teaching
        if teaching is None:
            return batch
        return teaching.taught(batch, self.position.step, self.own_teacher)

    def _count_step(self, sends: bool) -> None:
        """Counts a step, and the part of a round that it has sent, if it has."""
        experiment, position = self.experiment, self.position
        left_out_macs = macs_left_out(experiment, position.step)
        self._move(
            step=position.step + 1,
            num_rounds=position.num_rounds + sends,
            left_out=position.left_out + experiment.left_out,
            left_out_macs=position.left_out_macs + left_out_macs,
        )

    def _exchange_if_due(self) -> None:
        current, position = self.experiment.current, self.position
        due = current.plan.round_after(position.step)
        if due is not None:
            self._exchange(due)
            return
        method = current.method
        if method.sync is None and method.payload.elements(position.keep_counts):
            self._move(num_rounds=position.num_rounds + 1)  # Every step is one.

    def _exchange(self, due: Round) -> None:
        kept_before = self.position.keep_counts
        self._move(num_rounds=self.position.num_rounds + 1)
        self._choose_counts(due.stage.density)
        has_removed = self.position.keep_counts != kept_before
        is_repaired = has_removed and repairs(self.experiment)
        current, counts = self.experiment.current, self.position.keep_counts
        exchange = current.programs.exchange
        options = current.exchange_options(counts, due.kind)
        self._compile(exchange, **options)
        before = current.programs.network(self.state) if is_repaired else None
        self._around.at("exchange", None)
        self._in_flight.exchanged()
        self.state = exchange(self.state, **options)
        if before is not None:
            self._repair(before)

    def _repair(self, before: tuple[PyTree, PyTree]) -> None:
        """Refits what reads the channels that a round has just removed."""
        text = "refitting what reads removed channels"
        with self.clock.paused(), self._busy(text, "compile"):
            step = self.position.step
            self.state = repaired(self.experiment, before, self.state, step)

    def _choose_counts(self, density: float) -> None:
        """Sets how many channels each group keeps, where the density has changed."""
        experiment, position = self.experiment, self.position
        current, budget = experiment.current, experiment.channels.budget
        if density == position.counts_density or not current.method.pruning.in_rounds:
            return
        with self.clock.paused():
            scores = None
            if experiment.config.sparsity.budget == "global":
                scores = jax.device_get(current.programs.scores(self.state))
            counts = budget.keep_counts_at(density, scores, position.keep_counts)
        self._move(keep_counts=counts, counts_density=density)

    def _compile(self, program: Program, *args: Any, **static: Any) -> None:
        """Compiles what is new, on all processes, outside the time of steps."""
        if not program.is_compiled(**static):
            name, args = program.name.replace("_", " "), (self.state, *args)
            with self.clock.paused(), self._busy(f"compiling the {name}", "compile"):
                # Alone, a process would count how long it waits for those that compile.
                run_together(lambda: program.compile(*args, **static))

    # ---- what may follow a step

    def _gather_own_teacher(self) -> None:
        step, own = self.position.step, self.own_teacher
        found = gather_own_teacher(own, self.experiment, step, self.state)
        self.own_teacher, news = found
        if news:
            self._tell(f"step {step}: {news}")

    def _log(self) -> None:
        programs = self.experiment.current.programs
        with self._busy("measuring the last steps"):
            report = jax.device_get(programs.report(self.state))
        self._check_health(report)
        row = training_row(self.experiment, self.position, self.clock, report)
        self._around.folder.append(row)
        self._news |= {name: row[name] for name in report.measures}
        batch_size = self.experiment.batch_size
        objective = self.experiment.task.objective
        self._around.console.progress(row, self.num_steps, batch_size, objective)
        self.state = programs.clear(self.state)

    def _check_health(self, report: Report) -> None:
        largest = self.experiment.config.run.max_host_drift
        last_good_step = self._around.checkpointer.newest_step()
        check_health(report, largest, self.position.step, last_good_step)

    def _validate(self) -> None:
        """Scores the network as it is now on the validation split."""
        with self._busy("evaluating", "evaluate"):
            measures = validate(self.experiment, self.state, self._around.stop.is_due)
        if measures is None:
            return
        step = self.position.step
        found = {f"validation_{name}": value for name, value in measures.items()}
        cost = spent(self.experiment, self.position, self.clock)
        self._around.folder.append({"step": step, **cost, **found})
        self._news |= found
        self._tell(f"step {step}: validation {in_words(measures)}")

    def _reestimate(self) -> None:
        """Takes batch statistics of the network that is left, from batches to come."""
        count = self.experiment.config.run.reestimate_batches
        if not count:
            return
        reestimate = self.experiment.current.programs.reestimate
        with (
            self._busy("taking batch statistics anew"),
            self.experiment.batches(self.position.step) as batches,
        ):
            for number, batch in enumerate(itertools.islice(batches, count)):
                self.state = reestimate(self.state, batch, number)

    def _is_cut_due(self) -> bool:
        return self.position.step == self.experiment.current.plan.shrink_step

    def _cut(self) -> None:
        """Goes on with the small network; steps are timed anew."""
        self._around.at("shrink", None)
        step, seconds = self.position.step, self.clock.seconds_per_step_median
        with self._busy("shrinking the network"):
            self.experiment, self.state, cut = hand_over(
                self.experiment,
                self.state,
                step,
                seconds,
                foreseen=self._ahead.take_small(),
            )
        self._move(handover=cut)
        self.clock.forget_steps()
        self._tell(f"step {step}: {describe(self.experiment, cut)}")
        self._reestimate()

    def _is_next_phase_due(self) -> bool:
        following = self.experiment.phases[self.position.phase + 1 :]
        step, news = self.position.step, self._news
        return bool(following) and following[0].trigger.is_due(step, news)

    def _change_method(self) -> None:
        """Ends a phase: its last exchange, what it has pruned, and the next method."""
        step = self.position.step
        last = self.experiment.current.plan.round_to_leave(step)
        if last is not None:
            self._exchange(last)
        is_pruned = channel_sparsity(self.experiment, self.position) > 0
        if self.position.handover is None and is_pruned:
            self._cut()
        self._move(phase=self.position.phase + 1)
        name = self.experiment.phases[self.position.phase].method
        self.experiment, self.state = change_method(self.experiment, self.state, name)
        self.clock.forget_steps()
        self._tell(f"step {step}: goes on with method {name}")

    def _save(self, wait: bool = False) -> None:
        """Saves a state that is known to be good."""
        self._around.at("save", None)
        report = self.experiment.current.programs.report(self.state)
        self._check_health(jax.device_get(report))
        position = self.progress.position.to_dict()
        saved = SavedRun(*self.state, self.own_teacher)
        with self._busy("saving a checkpoint"):
            self._around.checkpointer.save(position["step"], saved, position, wait=wait)

    # ---- what people and other processes are told

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


def _compiles_ahead(experiment: Experiment) -> bool:
    """Whether programs are compiled while steps run."""
    choice = experiment.config.run.compile_ahead
    if choice == "auto":  # Steps on CPU want all cores themselves.
        return experiment.mesh.devices.flat[0].platform != "cpu"
    return choice == "on"
