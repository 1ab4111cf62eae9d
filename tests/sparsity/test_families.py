"""Families of kept counts: nested, complete, and what densities choose."""

import itertools

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity.quanta import quantum_of
from tests.helpers.counts import (
    global_keep_counts,
    ranked_family,
    uniform_family,
    uniform_keep_counts,
)

RESNET20 = {f"{kind}{i}": 16 << i for kind in ("stream", "inner") for i in range(3)}
ODD = {"a": 3, "b": 7, "c": 24, "d": 70, "e": 100, "f": 1}


def random_scores(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.exponential(size=s) for n, s in sizes.items()}


def members(family):
    return [family.counts(i) for i in range(len(family))]


def is_inside(less, more):
    return all(less[name] <= more[name] for name in less)


@pytest.mark.parametrize("sizes", [RESNET20, ODD])
@pytest.mark.parametrize("round_to", [1, 8, 32])
@pytest.mark.parametrize("kind", ["uniform", "ranked"])
def test_every_member_lies_inside_the_next(sizes, round_to, kind):
    family = (
        uniform_family(sizes, round_to=round_to)
        if kind == "uniform"
        else ranked_family(random_scores(sizes), round_to=round_to)
    )
    counts = members(family)
    for less, more in itertools.pairwise(counts):
        assert is_inside(less, more)
        assert sum(less.values()) < sum(more.values())
    assert counts[0] == {n: quantum_of(s, round_to) for n, s in sizes.items()}
    assert counts[-1] == sizes
    for name, size in sizes.items():
        quantum = quantum_of(size, round_to)
        found = {c[name] for c in counts}
        assert found == {min(size, k) for k in range(quantum, size + quantum, quantum)}


@pytest.mark.parametrize("sizes", [RESNET20, ODD])
def test_uniform_families_hold_all_uniform_counts(sizes):
    found = members(uniform_family(sizes))
    for density in np.linspace(0.001, 1.0, 400):
        assert uniform_keep_counts(sizes, float(density)) in found


@pytest.mark.parametrize("sizes", [RESNET20, ODD])
def test_uniform_families_are_uniform_to_within_a_step(sizes):
    for counts in members(uniform_family(sizes)):
        # There is one density from which every group is at most one step away.
        least = max(c / sizes[n] - _step(n, sizes) for n, c in counts.items())
        most = min(c / sizes[n] + _step(n, sizes) for n, c in counts.items())
        assert least <= most


def _step(name, sizes):
    return quantum_of(sizes[name]) / sizes[name]


def test_excluded_groups_stay_whole():
    for family in (
        uniform_family(RESNET20, exclude=("stream",)),
        ranked_family(random_scores(RESNET20), exclude=("stream",)),
    ):
        for counts in members(family):
            for name, size in RESNET20.items():
                assert counts[name] == size or "stream" not in name


def test_one_quantum_gives_what_the_global_budget_chooses():
    sizes = {"a": 64, "b": 128, "c": 256}
    scores = random_scores(sizes)
    for counts in members(ranked_family(scores))[8:]:
        density = sum(counts.values()) / sum(sizes.values())
        assert counts == global_keep_counts(scores, density)


def test_groups_keep_their_floor_before_scores_decide():
    scores = {"strong": np.full(64, 9.0), "weak": np.full(64, 1e-3)}
    counts = members(ranked_family(scores))
    assert {"strong": 8, "weak": 8} in counts
    above = [c for c in counts if sum(c.values()) > 16]
    assert above[6] == {"strong": 64, "weak": 8}


def test_equal_scores_share_equally():
    sizes = {"a": 64, "b": 128, "c": 256}
    scores = {n: np.full(s, 0.1) for n, s in sizes.items()}
    for counts in members(ranked_family(scores)):
        shares = [count / sizes[name] for name, count in counts.items()]
        assert max(shares) - min(shares) <= 1 / 8


def test_the_mean_of_equal_scores_is_not_taken_for_a_better_score():
    # (0.1 + 0.1 + 0.1) / 3 is more than 0.1, and 67 channels end with a block of three.
    counts = members(ranked_family({"a": np.full(67, 0.1)}))
    assert [c["a"] for c in counts] == [*range(8, 67, 8), 67]


def test_counts_of_the_stair_before_are_not_exceeded():
    previous = {name: size // 2 for name, size in RESNET20.items()}
    counts = members(ranked_family(random_scores(RESNET20), previous=previous))
    assert counts[-1] == previous
    assert all(is_inside(each, previous) for each in counts)
    with pytest.raises(UserError, match="no count for channel group 'inner0'"):
        ranked_family(random_scores(RESNET20), previous={"stream0": 8})


def test_scores_that_are_not_finite_are_ranked():
    scores = {"a": np.array([np.nan] * 8 + [np.inf] * 8), "b": np.full(16, 0.5)}
    by_size = members(ranked_family(scores))
    assert by_size[3] == {"a": 8, "b": 2}, "infinity first"
    assert by_size[-2]["b"] == 16, "not a number last"
