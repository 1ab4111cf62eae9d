"""Transitions: the next method and the small network go on from the same consensus."""

import jax
import numpy as np
import pytest

from prunex_jax.base.trees import flatten_by_path
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.changes.transitions import (
    change_method,
    comparison_inputs,
    experiment_at,
    hand_over,
    network_of,
)
from prunex_jax.train.steps.clock import ClockTotals
from prunex_jax.train.steps.position import RunPosition
from tests.helpers.tiny_runs import merged, settings

SETTINGS = settings(
    data={"batch_size": 8},
    sparsity={
        "start_share": 0.1,
        "freeze_share": 0.2,
        "shrink_share": 0.5,
        "num_stairs": 1,
    },
    run={"steps": 40},
)


def experiment_of(**changes):
    config = resolve_config(merged(SETTINGS, changes))
    topology = make_topology("2", devices=jax.devices()[:4])
    return make_experiment(config, topology)


def assert_equal(found, wanted):
    found, wanted = flatten_by_path(found), flatten_by_path(wanted)
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, path)


def noisy(tree):
    """The same tree away from its birth; the same on all hosts and devices."""

    def moved(leaf):
        is_float = np.issubdtype(leaf.dtype, np.floating)
        return leaf * 1.25 + 0.125 if is_float else leaf

    return jax.tree.map(moved, tree)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("dense", "local_sgd"), ("local_sgd", "hsadmm"), ("topk", "diloco")],
)
def test_a_change_of_method_keeps_the_consensus(before, after):
    experiment = experiment_of(
        method={"schedule": (before, f"{after} @ 0.1")},
        sparsity={"shrink_share": 1.0, "start_share": 0.3, "freeze_share": 0.4},
    )
    state = experiment.current.programs.init(jax.random.key(0))
    state = state._replace(
        params=noisy(state.params), statistics=noisy(state.statistics)
    )
    old = network_of(experiment, state)
    changed, next_state = change_method(experiment, state, after)
    new = network_of(changed, next_state)
    assert changed.current.method.name == after and new.model == old.model
    assert_equal(new.params, old.params)
    assert_equal(new.statistics, old.statistics)
    assert int(next_state.step) == int(state.step)
    assert_equal(next_state.totals, state.totals)


@pytest.fixture(scope="module")
def cut():
    """A run before and after its cut."""
    experiment = experiment_of()
    programs = experiment.current.programs
    state = programs.init(jax.random.key(0))
    counts = tuple(sorted(experiment.channels.keep_counts.items()))
    state = programs.exchange(state, keep_counts=counts, kind="freeze")
    return experiment, state, *hand_over(experiment, state, 20, 0.25)


@pytest.mark.slow
def test_a_cut_keeps_the_consensus(cut):
    experiment, state, small, small_state, handover = cut
    old, new = network_of(experiment, state), network_of(small, small_state)
    images = comparison_inputs(experiment.task)
    difference = np.abs(np.asarray(old.logits(images)) - np.asarray(new.logits(images)))
    assert difference.max() < 1e-5 and handover.max_abs_error < 1e-5
    sizes = experiment.channels.sizes
    for name, mask in handover.masks(sizes).items():
        assert mask.sum() == experiment.channels.keep_counts[name]
    assert handover.step == 20 and handover.seconds_per_step_median == 0.25
    assert int(small_state.step) == int(state.step)
    assert_equal(small_state.totals, state.totals)


@pytest.mark.slow
def test_a_cut_changes_what_is_trained_and_nothing_else(cut):
    experiment, _, small, _, _ = cut
    for part in ("config", "task", "channels", "phases", "ledger", "topology"):
        assert getattr(small, part) is getattr(experiment, part), part
    assert small.current.method.name == experiment.current.method.name
    assert small.current.groups == () and small.num_params == experiment.num_params
    assert small.num_steps == experiment.num_steps


def test_a_checkpoint_says_which_run_it_belongs_to(cut):
    experiment, _, small, _, handover = cut
    counts = experiment.channels.keep_counts
    before = RunPosition(counts, step=19, clock=ClockTotals(1.0, 1.0, 19, (0.1,)))
    assert experiment_at(experiment, before) is experiment
    after = experiment_at(experiment, RunPosition(counts, step=20, handover=handover))
    assert after.current.model == small.current.model != experiment.task.model
    wanted = small.current.programs.abstract_state()
    found = after.current.programs.abstract_state()
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(
        lambda x: x.shape, wanted
    )


def test_a_later_phase_of_a_checkpoint_is_found():
    experiment = experiment_of(
        method={"schedule": ("dense", "local_sgd @ 0.5")},
        sparsity={"shrink_share": 1.0},
    )
    position = RunPosition(experiment.channels.sizes, step=25, phase=1)
    assert experiment_at(experiment, position).current.method.name == "local_sgd"
