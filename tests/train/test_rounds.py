"""Every step belongs to a round, and the rounds of a run make sense together."""

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.sync import SyncSchedule
from prunex_jax.sparsity.settings import SparsityConfig
from prunex_jax.train.build.rounds import make_round_plan

CASES = [
    (SparsityConfig(), 607, 4),
    (SparsityConfig(num_stairs=1), 100, 8),
    (SparsityConfig(start_share=0.0, freeze_share=0.0), 50, 4),
    (SparsityConfig(start_share=0.5, freeze_share=1.0), 33, 4),
    (SparsityConfig(sparsity=0.0), 20, 4),
    (SparsityConfig(), 40, 1),
    (
        SparsityConfig(num_stairs=4),
        100,
        SyncSchedule(2, (*range(2, 61, 2), 70, 88, 130)),
    ),
]


def sync_of(period):
    """Rounds of so many steps; 0 for none."""
    if isinstance(period, SyncSchedule):
        return period
    return SyncSchedule(period) if period else None


@pytest.mark.parametrize(("config", "num_steps", "period"), CASES)
def test_rounds_of_a_run(config, num_steps, period):
    sync = sync_of(period)
    plan = make_round_plan(config, num_steps, sync)
    rounds = {s: plan.round_after(s) for s in range(1, num_steps + 1)}
    due = {step: found for step, found in rounds.items() if found is not None}
    whole = {step for step in range(1, num_steps + 1) if sync.is_due(step)}
    assert set(due) == whole | {num_steps}, "whole rounds, and one at the end"
    kinds = [found.kind for found in due.values()]
    densities = [found.stage.density for found in due.values()]
    assert densities == sorted(densities, reverse=True), "density never rises"
    assert densities[-1] == 1 - config.sparsity
    if config.sparsity:
        assert kinds.count("freeze") == 1, "masks are chosen for the last time once"
        after = kinds[kinds.index("freeze") + 1 :]
        assert set(after) <= {"frozen"}
        for kind, density in zip(kinds, densities, strict=True):
            if density == 1.0:
                assert kind == "frozen", "dense rounds have nothing to choose"
    else:
        assert set(kinds) == {"frozen"}


def test_what_is_left_to_exchange_where_another_method_takes_over():
    plain = make_round_plan(SparsityConfig(), 10, sync_of(4), prunes=False)
    assert [plain.round_to_leave(step) is None for step in (7, 8, 9)] == [0, 1, 0]


def test_no_exchange_no_rounds():
    plan = make_round_plan(SparsityConfig(), 10, None)
    assert all(plan.round_after(step) is None for step in range(11))


@pytest.mark.parametrize(
    ("config", "num_steps", "period", "expected"),
    [
        (SparsityConfig(), 100, 4, None),
        (SparsityConfig(shrink_share=0.5), 100, 4, 56),  # the freezing round: 52 to 56
        (SparsityConfig(shrink_share=0.61), 100, 4, 64),  # rounded up to a round
        (SparsityConfig(freeze_share=0.0, start_share=0.0, shrink_share=0.0), 9, 4, 4),
        (SparsityConfig(shrink_share=0.5), 100, 0, None),  # no rounds, no masks
        (SparsityConfig(shrink_share=0.5, sparsity=0.0), 100, 4, None),
    ],
)
def test_the_small_network_takes_over_after_a_round(
    config, num_steps, period, expected
):
    plan = make_round_plan(config, num_steps, sync_of(period))
    assert plan.shrink_step == expected
    if expected is not None:
        kinds = [
            found.kind
            for step in range(1, num_steps + 1)
            if (found := plan.round_after(step)) and step <= expected
        ]
        assert plan.round_after(expected) is not None, "between two rounds"
        assert kinds.count("freeze") == 1, "masks are settled"


def test_a_cut_that_leaves_no_step_is_refused():
    with pytest.raises(UserError, match=r"cut out after step 100 of 100"):
        make_round_plan(SparsityConfig(shrink_share=0.99), 100, sync_of(4))
