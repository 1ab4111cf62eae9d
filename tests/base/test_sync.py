"""Rounds follow each other without a gap, and become rarer as the rate falls."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule, quadratic_schedule

COSINE = [0.1 * (1 + np.cos(np.pi * step / 500)) for step in range(500)]
WARM = [*np.linspace(0, 0.2, 40), *COSINE]
SCHEDULES = [
    SyncSchedule(1),
    SyncSchedule(8),
    SyncSchedule(3, (3, 7, 12, 13)),
    quadratic_schedule(COSINE, 4),
]


@pytest.mark.parametrize("sync", SCHEDULES)
def test_every_step_belongs_to_one_round(sync):
    steps = range(-9, 700)
    assert all(sync.start_of(step) <= step < sync.end_of(step) for step in steps)
    for step, after in itertools.pairwise(steps):
        same = sync.start_of(step) == sync.start_of(after)
        assert same == (sync.end_of(step) == sync.end_of(after))
        assert same or sync.start_of(after) == sync.end_of(step) == after


@pytest.mark.parametrize("sync", SCHEDULES)
def test_rounds_are_due_where_they_end(sync):
    due = [step for step in range(700) if sync.is_due(step)]
    assert due == sorted({sync.end_of(step) for step in range(700)} & set(range(700)))
    if sync.ends:
        assert due[: len(sync.ends)] == [end for end in sync.ends if end < 700]
    in_program = sync.is_due_after(jnp.arange(1, 700))
    assert np.flatnonzero(in_program).tolist() == [step - 1 for step in due]
    for step in range(700):
        assert sync.at_or_after(step) == min(
            end for end in (0, *due, sync.end_of(700)) if end >= step
        )


def test_listed_rounds_at_equal_distances_are_those_of_a_period():
    listed, equal = SyncSchedule(4, (4, 8, 12)), SyncSchedule(4)
    for step in range(-5, 40):
        assert listed.start_of(step) == equal.start_of(step)
        assert listed.end_of(step) == equal.end_of(step)
    assert listed.rounds_per_step == equal.rounds_per_step


def test_a_constant_rate_has_equal_rounds():
    assert quadratic_schedule([0.3] * 50, 7).ends == tuple(range(7, 57, 7))


@pytest.mark.parametrize("rates", [COSINE, WARM], ids=["cosine", "warm-up"])
@pytest.mark.parametrize(("period", "alpha"), [(2, None), (4, 0.5), (16, 0.3)])
def test_rounds_are_as_long_as_the_rule_says(rates, period, alpha):
    sync = quadratic_schedule(rates, period, alpha)
    starts = [0, *sync.ends[:-1]]
    growth = max(rates) * period**0.5 if alpha is None else alpha
    for start, end in zip(starts, sync.ends, strict=True):
        wanted = max(period, (growth / max(rates[start:])) ** 2)
        assert end - start == pytest.approx(min(wanted, len(rates)), abs=1)
    assert sync.ends[-1] >= len(rates) > sync.ends[-2]
    lengths = [end - start for start, end in zip(starts, sync.ends, strict=True)]
    assert lengths == sorted(lengths), "rates that only fall make rounds only rarer"


def test_under_a_cosine_three_eighths_of_the_rounds_are_left():
    """The mean of (rate / peak)^2; (1 + cos)^2 / 4 has the mean 3 / 8."""
    long = [0.1 * (1 + np.cos(np.pi * step / 20_000)) for step in range(20_000)]
    num_rounds = len(quadratic_schedule(long, 16).ends)
    assert num_rounds / (20_000 / 16) == pytest.approx(3 / 8, rel=0.04)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SyncSchedule(0), "sync_period = 0 must be at least 1"),
        (lambda: SyncSchedule(2, (2, 2)), "rounds end one after the other"),
        (lambda: quadratic_schedule([], 4), "needs a learning rate above 0"),
        (lambda: quadratic_schedule([0.0], 4), "needs a learning rate above 0"),
        (lambda: quadratic_schedule([0.1], 4, 0.0), "alpha=0 of the quadratic rule"),
    ],
)
def test_rules_without_rounds_are_refused(make, text):
    with pytest.raises(UserError, match=text):
        make()
