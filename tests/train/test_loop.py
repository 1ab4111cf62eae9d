"""The loop: what happens in which order, and that a run may stop anywhere in it."""

import contextlib
import dataclasses
import io
from pathlib import Path

import jax
import numpy as np
import pytest

from prunex_jax.base.errors import TrainingDivergedError, UserError
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.console import Console
from prunex_jax.train.loop import Loop, Surroundings, every
from prunex_jax.train.records.scores import check_health
from prunex_jax.train.steps.programs import Report
from tests.helpers.tiny_runs import merged, settings

BASE = settings(
    topology={"layout": "2"},
    data={"batch_size": 8},
    run={"steps": 6, "log_every_steps": 2, "checkpoint_every_steps": 3},
)


class Folder:
    """Keeps rows in memory."""

    is_primary, workdir = True, Path("never-written")

    def __init__(self, events):
        self.events, self.rows = events, []

    def append(self, row):
        kind = "validate" if "validation_loss" in row else "log"
        self.events.append((kind, row["step"]))
        self.rows.append(row)

    def truncate_after(self, step):
        self.rows = [row for row in self.rows if row["step"] <= step]


class Checkpoints:
    """Keeps what is saved in memory, as host arrays and plain values."""

    def __init__(self, events):
        self.events, self.saved = events, {}

    def latest_step(self):
        return max(self.saved, default=None)

    newest_step = latest_step

    def check(self):
        """No save fails here."""

    def save(self, step, state, position, *, wait=False):
        self.events.append(("save", step))
        self.saved.setdefault(step, (jax.device_get(state), position))

    def restore(self, make_abstract_state, step=None):
        del step
        state, position = self.saved[self.latest_step()]
        abstract = make_abstract_state(position, {})
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        return jax.device_put(state, shardings), position


class Stop:
    """Asks a run to stop once it has been asked so often."""

    def __init__(self, after=None):
        self.after, self.asked = after, 0

    def is_due(self):
        self.asked += 1
        return self.asked == self.after


def experiment_of(**changes):
    config = resolve_config(merged(BASE, changes))
    topology = make_topology(config.topology.layout, devices=jax.devices()[:2])
    return make_experiment(config, topology)


def around_of(checkpoints, folder=None, stop=None, watchers=(), shown=None):
    """What a loop needs, without files."""
    console = Console(True, shown or io.StringIO())
    folder, stop = folder or Folder([]), stop or Stop()
    return Surroundings(folder, checkpoints, console, stop, watchers)


def run_one(experiment, checkpoints=None, stop=None, watch=None, shown=None):
    """Runs from what the checkpoints hold; gives loop, state, and how it went."""
    events = []
    folder = Folder(events)
    checkpoints = checkpoints or Checkpoints(events)
    checkpoints.events = events
    watchers = [] if watch is None else [watch]
    loop = Loop(experiment, around_of(checkpoints, folder, stop, watchers, shown))
    for _ in loop.steps():
        pass
    return loop, loop.state, loop.is_complete, events, folder.rows


@pytest.fixture(scope="module")
def dense():
    """One experiment, whose programs are compiled once."""
    return experiment_of(method={"name": "dense"}, run={"eval_every_steps": 3})


@pytest.mark.slow
def test_what_follows_a_step_comes_in_order(dense):
    events = []

    def watch(progress, state):
        events.append(("watch", progress.step))
        assert int(state.step) == progress.step == progress.position.clock.num_steps

    checkpoints = Checkpoints(events)
    loop, _, is_complete, _, _ = run_one(dense, checkpoints, watch=watch)
    # Rows and saves go to the list of the run; watchers to that of the test.
    assert events == [("watch", step) for step in range(7)]
    assert is_complete and loop.position.step == 6
    assert checkpoints.events == [
        ("log", 2),
        ("validate", 3),
        ("save", 3),
        ("log", 4),
        ("log", 6),
        ("save", 6),
        ("save", 6),
    ]


def test_watchers_come_after_the_checkpoint_of_their_step(dense):
    checkpoints, seen = Checkpoints([]), {}

    def watch(progress, state):
        seen[progress.step] = checkpoints.latest_step()

    run_one(dense, checkpoints, watch=watch)
    assert seen == {0: None, 1: None, 2: None, 3: 3, 4: 3, 5: 3, 6: 6}


def test_what_callers_ask_for_comes_when_they_say(dense):
    seen = []
    pair = every(3), lambda progress, state: seen.append(progress.step)
    run_one(dense, watch=pair)
    assert seen == [0, 3, 6]
    with pytest.raises(UserError, match=r"every\(0\) must be at least 1 step"):
        every(0)


def test_a_loop_that_is_left_saves_where_it_stands(dense):
    checkpoints = Checkpoints([])
    loop = Loop(dense, around_of(checkpoints))
    with contextlib.closing(loop.steps()) as steps:
        for _ in steps:
            if loop.position.step == 4:
                break
        assert checkpoints.latest_step() == 3
    assert checkpoints.latest_step() == 4
    _, state, is_complete, _, _ = run_one(dense, checkpoints)
    assert is_complete and same_bits(state, run_one(dense)[1])


def test_a_watcher_sees_what_a_checkpoint_would_hold(dense):
    checkpoints, seen = Checkpoints([]), {}

    def watch(progress, state):
        seen[progress.step] = progress.position

    run_one(dense, checkpoints, watch=watch)
    saved = checkpoints.saved[3][1]
    shown = seen[3].to_dict()
    for position in (saved, shown):
        position["clock"] = position["clock"] | {"seconds_total": 0.0}
    assert shown == saved
    assert seen[6].ledger.wire_bytes["host"] > seen[3].ledger.wire_bytes["host"] > 0


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_run_that_is_asked_to_stop_saves_and_ends(dense, after):
    without_evaluation = dataclasses.replace(
        dense.config, run=dataclasses.replace(dense.config.run, eval_every_steps=0)
    )
    experiment = dataclasses.replace(dense, config=without_evaluation)
    loop, state, is_complete, events, _ = run_one(experiment, stop=Stop(after))
    assert not is_complete
    assert int(state.step) == loop.position.step == after
    assert events[-1] == ("save", after)


def test_the_last_step_is_not_stopped_but_ended(dense):
    _, _, is_complete, events, _ = run_one(dense, stop=Stop(6))
    assert is_complete and events[-1] == ("save", 6)


def test_a_run_that_has_ended_does_nothing_again(dense):
    checkpoints = Checkpoints([])
    _, state, _, _, _ = run_one(dense, checkpoints)
    shown = io.StringIO()
    loop, again, is_complete, events, rows = run_one(dense, checkpoints, shown=shown)
    assert is_complete and events == [] and rows == []
    assert shown.getvalue() == "resumed at step 6 of 6\n"
    assert same_bits(again, state) and loop.position.clock.num_steps == 6


def same_bits(found, wanted):
    found, wanted = flatten_by_path(found), flatten_by_path(wanted)
    assert found.keys() == wanted.keys()
    for path, leaf in found.items():
        assert np.asarray(leaf).tobytes() == np.asarray(wanted[path]).tobytes(), path
    return True


# Three methods, and two transitions: exchanges every 4 steps from step 4 on; masks
# freeze in the round that ends at step 12 and dead channels are cut out at step 16.
LONG = {
    "sparsity": {
        "start_share": 0.2,
        "freeze_share": 0.4,
        "shrink_share": 0.75,
        "num_stairs": 1,
    },
    "method": {
        "schedule": ("dense", "hsadmm @ step 4", "local_sgd @ step 18"),
        "local_sgd": {"sync_period": 2},
        "rounds": {"outer": "law"},
    },
    "run": {"steps": 21, "log_every_steps": 4, "checkpoint_every_steps": 1},
}


@pytest.fixture(scope="module")
def long_run():
    """A run that saves after every step, and what it leaves behind."""
    experiment, checkpoints = experiment_of(**LONG), Checkpoints([])
    loop, state, _, _, rows = run_one(experiment, checkpoints)
    return experiment, checkpoints.saved, loop.progress.position, state, rows


def without_times(position):
    """What a run determines of its position: all but times and recompilations."""
    cut = {**position["handover"], "seconds_per_step_median": None}
    ledger = {**position["ledger"], "num_compilations": None}
    return {**position, "handover": cut, "ledger": ledger, "clock": None}


def timeless(rows):
    return [
        {key: value for key, value in row.items() if "second" not in key}
        for row in rows
    ]


# Within a round, and where a phase begins after the cut.
BOUNDARIES = (6, 18)
# Within a phase, where one begins, at the end of a round, where masks are settled, at
# the cut, after it, and before the last step.
MORE_BOUNDARIES = (1, 4, 8, 12, 16, 17, 20)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        *BOUNDARIES,
        *(pytest.param(step, marks=pytest.mark.slow) for step in MORE_BOUNDARIES),
    ],
)
def test_a_run_resumed_anywhere_is_the_one_never_stopped(long_run, step):
    experiment, saved, position, state, rows = long_run
    checkpoints = Checkpoints([])
    checkpoints.saved = {step: saved[step]}
    loop, resumed, is_complete, _, later_rows = run_one(experiment, checkpoints)
    assert is_complete and same_bits(resumed, state)
    found = loop.progress.position.to_dict()
    assert without_times(found) == without_times(position.to_dict())
    expected = [row for row in rows if row["step"] > step]
    assert timeless(later_rows) == timeless(expected)


@pytest.mark.slow
def test_every_step_of_the_long_run_says_where_it_is(long_run):
    _, saved, position, _, _ = long_run
    phases = [saved[step][1]["phase"] for step in range(1, 22)]
    assert phases == [0] * 3 + [1] * 14 + [2] * 4
    assert position.handover is not None and position.handover.step == 16
    assert [saved[step][1]["handover"] is None for step in (15, 16)] == [True, False]
    # Every step of dense; steps 8, 12, 16 and 18 of hsadmm; then 20 and 21.
    assert position.num_rounds == 4 + 4 + 2


def apart(state):
    """Share of the entries that are not the same on all hosts."""
    flat = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    return sum(np.sum(x[0] != x[1]) for x in flat) / sum(x[0].size for x in flat)


@pytest.mark.slow
def test_the_law_goes_on_with_the_movement_that_a_cut_has_left(long_run):
    _, saved, _, _, rows = long_run
    before, after = (saved[step][0].opt_state.consensus.movements for step in (15, 16))
    sizes = [sum(x.size for x in jax.tree.leaves(x.last)) for x in (before, after)]
    left = saved[16][0].opt_state.global_consensus
    assert sizes[1] == sum(x.size for x in jax.tree.leaves(left)) < 0.4 * sizes[0]
    assert float(before.average) != 0.5 != float(after.average)
    assert any(np.any(x) for x in jax.tree.leaves(after.last))
    logged = {row["step"]: row for row in rows if "round_cosine" in row}
    assert sorted(logged) == [8, 12, 16, 20, 21]
    assert all(0.15 <= row["outer_step"] <= 1.5 for row in logged.values())
    assert logged[16]["round_cosine"] == pytest.approx(float(after.cosine))


# All that go do so at once, after a tenth of the run.
EARLY = {"start_share": 0.1, "freeze_share": 0.2, "num_stairs": 1}


def sent_by_step(rows):
    """Bytes of every step, by its number."""
    return dict(enumerate(np.diff([0, *(row["host_wire_bytes"] for row in rows)]), 1))


@pytest.mark.rotates
def test_a_streamed_run_resumes_between_fragments():
    """Whole rounds until masks are frozen, then fragments; whole at cut and end."""
    experiment = experiment_of(
        method={
            "name": "hsadmm",
            "hsadmm": {"sync_period": 4, "preset": "reset"},
            "rounds": {"fragments": 2, "delay": 1},
        },
        sparsity={**EARLY, "shrink_share": 0.6},
        run={"steps": 19, "log_every_steps": 1, "checkpoint_every_steps": 1},
    )
    checkpoints = Checkpoints([])
    loop, state, _, _, rows = run_one(experiment, checkpoints)
    states = {step: saved for step, (saved, _) in checkpoints.saved.items()}
    # The freeze is at step 8 and the cut at step 12. What the step right after a whole
    # round sends has not moved, and is not applied.
    sent = sent_by_step(rows)
    exchanged = [step for step in sent if sent[step] > 1000]
    assert exchanged == [4, 8, 9, 11, 12, 13, 15, 17, 19]
    # Together, the fragments of a period are a round.
    # But for what every step sends for the log.
    assert sent[9] + sent[11] - sent[10] == sent[12]
    assert sent[15] + sent[17] - sent[18] == sent[19]
    assert apart(state) == 0 and apart(states[18]) > 0.9
    assert loop.position.num_rounds == len(exchanged)
    checkpoints.saved = {17: checkpoints.saved[17]}
    assert same_bits(run_one(experiment, checkpoints)[1], state)


@pytest.mark.rotates
@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "delay": 1}])
def test_rounds_become_rarer_as_the_learning_rate_falls(streaming):
    experiment = experiment_of(
        optimizer={"schedule": "linear", "warmup_share": 0.1},
        method={
            "name": "hsadmm",
            "hsadmm": {"sync_period": 2, "preset": "reset"},
            "rounds": {"sync_rule": "quadratic", **streaming},
        },
        sparsity={**EARLY, "shrink_share": 0.5},
        run={"steps": 24, "log_every_steps": 1, "checkpoint_every_steps": 1},
    )
    plan = experiment.current.plan
    # The rate at step t is 1 - (t - 2) / 22 of its peak, from step 2 on.
    assert plan.sync.ends == (2, 4, 6, 8, 11, 16, 31)
    assert (plan.stages[-1].start_step, plan.shrink_step) == (6, 16)
    checkpoints = Checkpoints([])
    loop, state, _, _, rows = run_one(experiment, checkpoints)
    sent = sent_by_step(rows)
    exchanged = [step for step in sent if sent[step] > 1000]
    # Fragments are sent in the step behind that which their part of a round ends with.
    streamed = [2, 4, 6, 8, 9, 10, 12, 14, 16, 17, 24]
    assert exchanged == (streamed if streaming else [*plan.sync.ends[:-1], 24])
    assert loop.position.num_rounds == len(exchanged)
    assert apart(state) == 0
    checkpoints.saved = {13: checkpoints.saved[13]}
    assert same_bits(run_one(experiment, checkpoints)[1], state)


@pytest.mark.parametrize("bad_step", [-2, 0, 41])
def test_a_step_that_cannot_be_is_a_wrong_sum_and_no_divergence(bad_step):
    report = Report({"loss": 1.0}, np.int32(bad_step), {})
    said = f"by step 40: the first bad step is said to be {bad_step}; the checkpoint of"
    with pytest.raises(RuntimeError, match=said) as raised:
        check_health(report, 0.0, 40, 20)
    assert not isinstance(raised.value, TrainingDivergedError)


def test_a_step_that_was_is_a_divergence():
    report = Report({"loss": 1.0}, np.int32(40), {})
    with pytest.raises(TrainingDivergedError, match="not finite since step 40"):
        check_health(report, 0.0, 40, 20)
