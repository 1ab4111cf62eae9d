"""What every group keeps whatever the budget: the most it may lose, and the scope."""

import itertools

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity import Budget, limits_of, validate_sparsity
from prunex_jax.sparsity.quanta import quantum_of
from prunex_jax.sparsity.settings import SparsityConfig
from tests.helpers.counts import (
    global_keep_counts,
    ranked_family,
    uniform_family,
    uniform_keep_counts,
)

SIZES = {"stem": 16, "a": 3, "b": 40, "c": 64, "d": 100, "one": 1}
INNER = {"a", "b", "c"}
# So uneven that a ranking alone would empty some groups.
SCORES = {
    name: np.random.default_rng(i).exponential(size=size) * 10.0**i
    for i, (name, size) in enumerate(SIZES.items())
}


def least_of(sizes, **settings):
    return limits_of(SparsityConfig(**settings), sizes).least


def families(**limits):
    return uniform_family(SIZES, **limits), ranked_family(SCORES, **limits)


def all_counts(density, least, **limits):
    """What both budgets and both families keep, at about a density."""
    limits["least"] = least
    yield uniform_keep_counts(SIZES, density, **limits)
    yield global_keep_counts(SCORES, density, **limits)
    for family in families(**limits):
        yield family.counts(int(density * (len(family) - 1)))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("density", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("round_to", [1, 8])
def test_no_group_loses_more_than_its_share(share, density, round_to):
    least = least_of(SIZES, max_group_sparsity=share)
    for counts in all_counts(density, least, round_to=round_to):
        for name, kept in counts.items():
            size, quantum = SIZES[name], quantum_of(SIZES[name], round_to)
            assert size - kept <= share * size + 1e-9
            assert kept % quantum == 0 or kept == size


def test_a_limit_that_does_not_bind_changes_nothing():
    least = least_of(SIZES, max_group_sparsity=0.9)
    free = least_of(SIZES)
    assert set(free.values()) == {0}
    for density in (0.3, 0.5, 0.9):
        plain = uniform_keep_counts(SIZES, density)
        assert uniform_keep_counts(SIZES, density, least=least) == plain
        plain = global_keep_counts(SCORES, density)
        assert global_keep_counts(SCORES, density, least=free) == plain
    for free_family, plain in zip(families(least=free), families(), strict=True):
        assert free_family == plain or free_family.steps == plain.steps


def test_a_ranking_gives_elsewhere_what_a_limit_keeps():
    """The total is met as without the limit, and the weakest group is at its floor."""
    sizes = {"weak": 64, "strong": 64, "other": 64}
    scores = {n: np.linspace(1, 2, 64) * 10.0**i for i, n in enumerate(sizes)}
    free = global_keep_counts(scores, 0.5)
    least = least_of(sizes, max_group_sparsity=0.5)
    kept = global_keep_counts(scores, 0.5, least=least)
    assert free["weak"] == 8 and kept["weak"] == 32
    assert sum(kept.values()) == sum(free.values()) == 96


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_families_are_nested_and_hold_all_uniform_counts(share):
    config = SparsityConfig(max_group_sparsity=share, scope="inner")
    least = limits_of(config, SIZES, INNER).least
    for family in families(least=least):
        counts = [family.counts(i) for i in range(len(family))]
        assert counts[-1] == SIZES
        for less, more in itertools.pairwise(counts):
            assert all(less[name] <= more[name] for name in SIZES)
            assert sum(less.values()) < sum(more.values())
    found = [counts for counts in all_counts(0.0001, least)]
    assert found[0] == found[2] == found[3], "the least is the same everywhere"
    uniform = uniform_family(SIZES, least=least)
    members = [uniform.counts(i) for i in range(len(uniform))]
    for density in np.linspace(0.001, 1.0, 200):
        assert uniform_keep_counts(SIZES, float(density), least=least) in members


@pytest.mark.parametrize("budget", ["uniform", "global"])
def test_only_groups_in_scope_lose_channels(budget):
    """And the density is that of those groups, as if the others were excluded."""
    config = SparsityConfig(
        scope="inner", budget=budget, exclude=("b",), max_group_sparsity=0.75
    )
    budget = Budget(config, limits_of(config, SIZES, INNER))
    counts = budget.keep_counts_at(0.5, SCORES)
    for name, size in SIZES.items():
        assert (counts[name] < size) == (name in ("a", "c"))
    assert abs(counts["a"] + counts["c"] - 33.5) <= 4, "half of 67"


def test_a_scope_without_groups_is_refused():
    with pytest.raises(UserError, match=r"'inner' leaves nothing .* all 6 groups"):
        limits_of(SparsityConfig(scope="inner"), SIZES)


def test_more_than_every_group_may_lose_is_refused():
    config = SparsityConfig(sparsity=0.8, max_group_sparsity=0.75)
    with pytest.raises(UserError, match=r"= 0\.8 .*max_group_sparsity = 0\.75"):
        validate_sparsity(config)
    validate_sparsity(SparsityConfig(sparsity=0.75, max_group_sparsity=0.75))
    # Of a kernel, every group takes its own share: three quarters of the work go.
    work = SparsityConfig(sparsity=0.7, unit="macs", max_group_sparsity=0.5)
    validate_sparsity(work)
    with pytest.raises(UserError, match=r"max_group_sparsity=0 must lie in \(0, 1\]"):
        validate_sparsity(SparsityConfig(max_group_sparsity=0))


COSTS = {"a": 1.0, "b": 4.0, "c": 2.0}


def ranking_budget(criterion, unit="macs"):
    sizes = dict.fromkeys(COSTS, 32)
    config = SparsityConfig(
        budget="global", criterion=criterion, unit=unit, round_to=1, sparsity=0.5
    )
    cost = {unit: lambda counts: sum(COSTS[name] * n for name, n in counts.items())}
    return Budget(config, limits_of(config, sizes), cost if unit != "channels" else {})


def test_equal_damage_goes_where_it_saves_most():
    scores = {name: np.linspace(1.0, 2.0, 32) for name in COSTS}
    counts = ranking_budget("taylor").keep_counts_at(0.3, scores)
    assert counts["b"] < counts["c"] < counts["a"] == 32
    # Of channels all cost the same, and so they do where scores are no damage.
    assert set(
        ranking_budget("taylor", "channels").keep_counts_at(0.5, scores).values()
    ) == {16}
    even = ranking_budget("norm").keep_counts_at(0.5, scores).values()
    assert max(even) - min(even) <= 1


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_scale_of_damages_does_not_matter(scale):
    rng = np.random.default_rng(0)
    scores = {name: rng.exponential(size=32) for name in COSTS}
    budget = ranking_budget("taylor")
    wanted = budget.keep_counts_at(0.5, scores)
    found = budget.keep_counts_at(0.5, {n: scale * s for n, s in scores.items()})
    assert found == wanted
    after = budget.keep_counts_at(0.25, scores, wanted)
    assert all(after[name] <= wanted[name] for name in COSTS)


def test_damages_compare_between_groups_and_norms_do_not():
    scores = {name: np.full(32, 1.0 if name == "a" else 1e-3) for name in COSTS}
    damage = ranking_budget("taylor", "channels").keep_counts_at(0.5, scores)
    assert damage["a"] == 32
    norm = ranking_budget("norm", "channels").keep_counts_at(0.5, scores)
    assert set(norm.values()) == {16}
