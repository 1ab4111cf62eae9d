"""Counts of a density are admissible, add up to it, and never starve a group."""

import itertools

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity.quanta import quantum_of
from tests.helpers.counts import global_keep_counts, uniform_keep_counts

RESNET20 = {f"{kind}{i}": 16 << i for kind in ("stream", "inner") for i in range(3)}
ODD = {"a": 3, "b": 7, "c": 24, "d": 70, "e": 100}


def random_scores(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.exponential(size=s) for n, s in sizes.items()}


@pytest.mark.parametrize("sizes", [RESNET20, ODD])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.3, 1 - 0.7, 0.5, 0.9, 0.999])
def test_uniform_counts_are_the_nearest_admissible(sizes, density):
    for name, kept in uniform_keep_counts(sizes, density).items():
        size, quantum = sizes[name], quantum_of(sizes[name])
        assert 1 <= kept <= size
        assert kept % quantum == 0 or kept == size
        assert abs(kept - density * size) <= max(quantum / 2, quantum - density * size)


def test_half_of_a_resnet_is_exactly_half():
    counts = uniform_keep_counts(RESNET20, 0.5)
    assert counts == {name: size // 2 for name, size in RESNET20.items()}


def test_uniform_density_does_not_depend_on_float_noise():
    for size in range(1, 300):
        for exact, noisy in ((0.3, 1 - 0.7), (0.1, 1 - 0.9)):
            counts = uniform_keep_counts({"a": size}, exact)
            assert uniform_keep_counts({"a": size}, noisy) == counts


def test_uniform_counts_never_grow_when_the_density_falls():
    densities = np.linspace(1, 0.01, 60)
    counts = [uniform_keep_counts(ODD, float(d)) for d in densities]
    for before, after in itertools.pairwise(counts):
        assert all(after[name] <= before[name] for name in ODD)


@pytest.mark.parametrize("sizes", [RESNET20, ODD])
def test_density_one_keeps_everything(sizes):
    assert uniform_keep_counts(sizes, 1.0) == sizes
    assert global_keep_counts(random_scores(sizes), 1.0) == sizes


def test_excluded_groups_stay_dense():
    for counts in (
        uniform_keep_counts(RESNET20, 0.25, exclude=("stream",)),
        global_keep_counts(random_scores(RESNET20), 0.25, exclude=("stream",)),
    ):
        inner = {n: c for n, c in counts.items() if "inner" in n}
        assert list(counts) == list(RESNET20)
        assert all(counts[n] == s for n, s in RESNET20.items() if "stream" in n)
        assert sum(inner.values()) == 28, "a quarter of the 112 that may be pruned"
    everything = global_keep_counts(random_scores(ODD), 0.5, exclude=("",))
    assert everything == ODD


@pytest.mark.parametrize("sizes", [RESNET20, ODD])
@pytest.mark.parametrize("density", [0.02, 0.2, 0.37, 0.5, 0.8])
def test_global_counts_are_admissible_and_meet_the_total(sizes, density):
    counts = global_keep_counts(random_scores(sizes), density)
    floors = uniform_keep_counts(sizes, min(density, 1 / 8))
    for name, kept in counts.items():
        assert floors[name] <= kept <= sizes[name]
        assert kept % quantum_of(sizes[name]) == 0 or kept == sizes[name]
    target = density * sum(sizes.values())
    least = min(quantum_of(size) for size in sizes.values())
    assert abs(sum(counts.values()) - target) <= max(
        least / 2, sum(floors.values()) - target
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("density", [0.15, 0.4, 0.77])
def test_global_counts_solve_the_stated_problem(seed, density):
    sizes = {"a": 5, "b": 17, "c": 34, "d": 9}
    scores = random_scores(sizes, seed)
    counts = global_keep_counts(scores, density)
    floors = uniform_keep_counts(sizes, min(density, 1 / 8))
    options = [
        sorted({*range(floors[n], s + 1, quantum_of(s)), s}) for n, s in sizes.items()
    ]
    target = density * sum(sizes.values())
    sums = {n: np.cumsum(np.sort(s)[::-1]) for n, s in scores.items()}

    def rank(choice):
        value = sum(sums[n][k - 1] for n, k in zip(sizes, choice, strict=True))
        return -abs(sum(choice) - target), sum(choice), value

    best = max(itertools.product(*options), key=rank)
    assert tuple(counts.values()) == best


def test_global_counts_follow_the_scores():
    scores = {"strong": np.linspace(3, 2, 64), "weak": np.linspace(1, 0, 64)}
    counts = global_keep_counts(scores, 0.5)
    assert counts == {"strong": 56, "weak": 8}, "floor of the weak group is 1/8"


def test_equal_scores_share_equally():
    scores = {name: np.ones(64) for name in "abcd"}
    assert global_keep_counts(scores, 0.5) == dict.fromkeys("abcd", 32)


@pytest.mark.parametrize("size", [3, 5, 16, 40, 64])
def test_a_single_group_gets_its_uniform_count(size):
    for density in np.linspace(0.125, 1, 36):
        counts = global_keep_counts(random_scores({"a": size}), float(density))
        assert counts == uniform_keep_counts({"a": size}, float(density))


def test_without_rounding_the_ranking_is_a_threshold():
    scores = random_scores({"a": 40, "b": 60}, seed=3)
    counts = global_keep_counts(scores, 0.5, round_to=1)
    threshold = np.sort(np.concatenate(list(scores.values())))[50]
    assert counts == {n: int((s >= threshold).sum()) for n, s in scores.items()}


def test_previous_counts_are_never_exceeded():
    first = global_keep_counts(random_scores(ODD, 0), 0.6)
    second = global_keep_counts(random_scores(ODD, 1), 0.4, previous=first)
    free = global_keep_counts(random_scores(ODD, 1), 0.4)
    assert any(free[n] > first[n] for n in ODD), "the case tests nothing"
    assert all(second[n] <= first[n] for n in ODD)
    assert abs(sum(second.values()) - 0.4 * sum(ODD.values())) <= 0.5


def test_scores_that_are_not_finite_rank_by_rule():
    scores = {
        "nan": np.full(64, np.nan),
        "inf": np.full(64, np.inf),
        "one": np.linspace(1.0, 0.5, 64),
    }
    counts = global_keep_counts(scores, 0.5)
    assert counts == {"nan": 8, "inf": 64, "one": 24}


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, float("nan")])
def test_impossible_densities_are_refused(density):
    text = rf"density {density:g} is outside \(0, 1\]"
    with pytest.raises(UserError, match=text):
        uniform_keep_counts(ODD, density)
    with pytest.raises(UserError, match=text):
        global_keep_counts(random_scores(ODD), density)


def test_other_bad_arguments_are_refused():
    with pytest.raises(UserError, match=r"round_to = 0 must be at least 1"):
        uniform_keep_counts(ODD, 0.5, round_to=0)
    with pytest.raises(UserError, match=r"no count for channel group 'b'"):
        global_keep_counts(random_scores(ODD), 0.5, previous={"a": 3})
