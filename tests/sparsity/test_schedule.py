"""Stages of a run, and the settings that are refused."""

import dataclasses
import itertools

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.sparsity import (
    Stage,
    check_excludes,
    density_stairs,
    stage_at,
    validate_sparsity,
)
from prunex_jax.sparsity.settings import SparsityConfig


def settings(**changes):
    return dataclasses.replace(SparsityConfig(), **changes)


@pytest.mark.parametrize("sparsity", [0.3, 0.7, 0.99])
@pytest.mark.parametrize(("start", "freeze"), [(0, 0), (0, 1), (0.1, 0.5), (1, 1)])
@pytest.mark.parametrize("num_stairs", [1, 8])
@pytest.mark.parametrize(
    "sync", [*map(SyncSchedule, (1, 4, 16)), SyncSchedule(2, (2, 4, 7, 12, 20, 1100))]
)
@pytest.mark.parametrize("total_steps", [16, 17, 45, 1000])
def test_laws(sparsity, start, freeze, num_stairs, sync, total_steps):
    config = settings(
        sparsity=sparsity,
        start_share=start,
        freeze_share=freeze,
        num_stairs=num_stairs,
    )
    stages = density_stairs(config, total_steps, sync)
    assert stages[0].start_step == 0
    for before, after in itertools.pairwise(stages):
        assert before.start_step < after.start_step
        assert before.density >= after.density
        assert not before.is_frozen
    assert all(sync.is_due(stage.start_step) for stage in stages[1:])
    assert stages[-1].is_frozen
    assert stages[-1].density == 1 - sparsity
    assert sync.end_of(stages[-1].start_step) <= total_steps, "no frozen round"
    assert len({s.density for s in stages} - {1.0}) <= num_stairs


def test_shape_of_an_ordinary_run():
    stages = density_stairs(settings(sparsity=0.8), 10_000, SyncSchedule(4))
    assert stages[0] == Stage(0, 1.0, False)
    assert [s.start_step for s in stages[1:]] == list(range(1000, 5001, 500))
    drops = [a.density - b.density for a, b in itertools.pairwise(stages[:-1])]
    assert drops == sorted(drops, reverse=True), "most channels go early"
    assert stages[-2].density == pytest.approx(0.2), "the last stair settles"
    # The cubic half way: 1 - 0.8 * (1 - 1/8).
    assert stages[4].density == pytest.approx(0.3)


def test_shares_do_not_slip_by_float_noise():
    config = settings(start_share=0.1, freeze_share=0.7)
    stages = density_stairs(config, 1000, SyncSchedule(1))
    assert (stages[1].start_step, stages[-1].start_step) == (100, 700)


def test_starts_are_rounded_up_to_rounds():
    stages = density_stairs(settings(num_stairs=1), 1000, SyncSchedule(16))
    assert [s.start_step for s in stages] == [0, 112, 512]


@pytest.mark.parametrize(
    ("config", "total_steps", "sync_period", "expected"),
    [
        # Nothing to prune: one stage, whatever the rest says.
        (settings(sparsity=0.0), 3, 16, (Stage(0, 1.0, True),)),
        # One shot.
        (
            settings(start_share=0.5, freeze_share=0.5),
            100,
            1,
            (Stage(0, 1.0, False), Stage(50, 0.5, True)),
        ),
        # From the first step on.
        (settings(start_share=0, freeze_share=0), 100, 1, (Stage(0, 0.5, True),)),
        # Room for a single round: it has to be the frozen one.
        (settings(), 7, 4, (Stage(0, 0.5, True),)),
        # The freeze at the very end leaves the last round frozen.
        (
            settings(start_share=1, freeze_share=1),
            100,
            8,
            (Stage(0, 1.0, False), Stage(88, 0.5, True)),
        ),
    ],
)
def test_degenerate_runs(config, total_steps, sync_period, expected):
    assert density_stairs(config, total_steps, SyncSchedule(sync_period)) == expected


def test_stage_lookup():
    stages = density_stairs(settings(num_stairs=2), 100, SyncSchedule(1))
    starts = [stage.start_step for stage in stages]
    for step in range(120):
        expected = max(start for start in starts if start <= step)
        assert stage_at(stages, step).start_step == expected
    with pytest.raises(UserError, match=r"step -1 is before the first stage"):
        stage_at(stages, -1)


@pytest.mark.parametrize(
    ("total_steps", "sync_period", "text"),
    [
        (0, 1, r"a run of 0 steps is empty"),
        (10, 0, r"sync_period = 0 must be at least 1"),
        (3, 4, r"a run of 3 steps has no round with sync_period = 4"),
    ],
)
def test_impossible_runs_are_refused(total_steps, sync_period, text):
    with pytest.raises(UserError, match=text):
        density_stairs(settings(), total_steps, SyncSchedule(sync_period))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sparsity": 1.0}, r"sparsity=1\.0 must lie in \[0, 1\)"),
        ({"sparsity": -0.1}, r"sparsity=-0\.1 must lie in \[0, 1\)"),
        ({"sparsity": float("nan")}, r"sparsity=nan must be a finite number"),
        ({"start_share": -0.1}, r"start_share=-0\.1 must lie in \[0, 1\]"),
        ({"freeze_share": 500}, r"freeze_share=500 must lie in \[0, 1\]"),
        ({"start_share": 0.6}, r"start_share = 0.6 is after .*freeze_share = 0.5"),
        ({"shrink_share": 1.5}, r"shrink_share=1\.5 must lie in \[0, 1\]"),
        ({"shrink_share": 0.4}, r"shrink_share = 0.4 is before .*freeze_share = 0.5"),
        ({"num_stairs": 0}, r"num_stairs=0 must lie in .1, 10000."),
        ({"round_to": 0}, r"round_to=0 must be at least 1"),
        ({"budget": "even"}, r"sparsity.budget='even' is not one of uniform, global"),
        ({"exclude": ("",)}, r"empty pattern"),
    ],
)
def test_contradictory_settings_are_refused(changes, text):
    with pytest.raises(UserError, match=text):
        validate_sparsity(settings(**changes))
    with pytest.raises(UserError, match=text):
        density_stairs(settings(**changes), 100, SyncSchedule(1))


def test_default_settings_are_valid():
    validate_sparsity(SparsityConfig())


def test_exclude_patterns_have_to_match():
    names = ["stages/0/conv1/kernel", "stem/kernel", *(f"g{i}" for i in range(9))]
    check_excludes(("conv1", "stem/"), names)
    check_excludes((), names)
    with pytest.raises(UserError, match=r"'konv1' .*, did you mean 'conv1'\?"):
        check_excludes(("stem", "konv1"), names)
    with pytest.raises(
        UserError, match=r"'zzz' .*; channel groups: g0, g1, .*, \.\.\."
    ):
        check_excludes(("zzz",), names)
