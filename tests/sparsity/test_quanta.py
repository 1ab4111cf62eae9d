"""Multiples of kept counts: by size, by a table, kept by all that chooses counts."""

import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.sparsity import (
    Budget,
    limits_of,
    validate_sparsity,
)
from prunex_jax.sparsity.quanta import quanta_of, quantum_of, read_multiples
from prunex_jax.sparsity.settings import SparsityConfig
from tests.helpers.counts import (
    global_keep_counts,
    ranked_family,
    uniform_family,
    uniform_keep_counts,
)

SIZES = {"stem": 64, "body/0": 200, "body/1": 256, "body/2": 512, "body/3": 1000}
TABLE = {"body/1": 32, "body/*>=500": 128, "body/*": 96}
STEPS = {"stem": 8, "body/0": 96, "body/1": 32, "body/2": 128, "body/3": 128}


@pytest.mark.parametrize(
    ("size", "round_to", "expected"),
    [
        (1, 8, 1), (7, 8, 1), (8, 8, 1), (15, 8, 1), (16, 8, 2), (31, 8, 2),
        (32, 8, 4), (63, 8, 4), (64, 8, 8), (2048, 8, 8), (2048, 32, 32),
        (64, 6, 4), (64, 1, 1),
    ],
)  # fmt: skip
def test_quantum(size, round_to, expected):
    assert quantum_of(size, round_to) == expected


def test_the_first_row_that_is_for_a_group_counts():
    assert quanta_of(SIZES, 8, TABLE) == STEPS
    assert quanta_of(SIZES, 8) == {n: quantum_of(s, 8) for n, s in SIZES.items()}


@pytest.mark.parametrize("size", [1, 5, 63, 127, 128, 129, 300])
def test_groups_smaller_than_their_multiple_are_rounded_by_their_size(size):
    (step,) = quanta_of({"a": size}, 16, {"*": 128}).values()
    assert step == (128 if size >= 128 else quantum_of(size, 16))


def counts_of_every_rule(density):
    rng = np.random.default_rng(int(1000 * density))
    scores = {name: rng.exponential(size=size) for name, size in SIZES.items()}
    yield uniform_keep_counts(SIZES, density, multiples=TABLE)
    yield global_keep_counts(scores, density, multiples=TABLE)
    rows = tuple(f"{groups}:{multiple}" for groups, multiple in TABLE.items())
    config = SparsityConfig(multiples=rows, budget="global")
    budget = Budget(config, limits_of(config, SIZES))
    yield budget.keep_counts_at(density, scores)
    yield budget.keep_counts_at(density)
    for family in (
        uniform_family(SIZES, multiples=TABLE),
        ranked_family(scores, multiples=TABLE),
    ):
        yield family.counts(int(density * (len(family) - 1)))


@pytest.mark.parametrize("density", [0.001, 0.1, 0.3, 0.5, 0.77, 0.95, 0.99, 1.0])
def test_every_kept_count_is_a_multiple_or_the_group(density):
    for counts in counts_of_every_rule(density):
        for name, kept in counts.items():
            assert 0 < kept <= SIZES[name]
            assert kept % STEPS[name] == 0 or kept == SIZES[name]


def test_uniform_counts_with_a_table_are_the_nearest_and_in_the_family():
    family = uniform_family(SIZES, multiples=TABLE)
    found = [family.counts(index) for index in range(len(family))]
    for density in np.linspace(0.001, 1.0, 200):
        counts = uniform_keep_counts(SIZES, float(density), multiples=TABLE)
        assert counts in found
        for name, kept in counts.items():
            size, step = SIZES[name], STEPS[name]
            every = {*range(step, size, step), size}
            nearest = min(abs(each - density * size) for each in every)
            is_last_step = kept > size - size % step - step
            assert abs(kept - density * size) <= (step if is_last_step else nearest)


def test_excluded_groups_stay_whole_whatever_their_multiple():
    counts = uniform_keep_counts(SIZES, 0.1, exclude=("body/3",), multiples=TABLE)
    assert counts["body/3"] == 1000


def test_rows_are_read_as_they_are_written():
    rows = ("body/1:32", " body/*>=500 : 128 ", "body/*:96")
    assert read_multiples(rows) == TABLE
    assert read_multiples(("a:b/*:7",)) == {"a:b/*": 7}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("128",), r"has '128'; write the groups and their multiple"),
        (("body/*:many",), r"has 'body/\*:many'; write"),
        ((">=512:128",), r"has '>=512:128'; write"),
        (("body/*:0",), r"multiple 0 for 'body/\*' must be at least 1"),
        (("stem:8", "stem:16"), r"two rows for 'stem'"),
    ],
)
def test_rows_that_mean_nothing_are_refused_before_a_run(rows, words):
    with pytest.raises(UserError, match=words):
        validate_sparsity(SparsityConfig(multiples=rows))


def test_rows_that_name_no_group_are_refused():
    with pytest.raises(UserError, match=r"'bodi/\*', which names no .* mean 'body/.'"):
        uniform_keep_counts(SIZES, 0.5, multiples={"bodi/*": 64})
    with pytest.raises(UserError, match=r"multiple 0 for '\*' must be at least 1"):
        uniform_keep_counts(SIZES, 0.5, multiples={"*": 0})
    # No group is that large, which is no mistake of the table.
    assert quanta_of({"a": 64}, multiples={"*>=512": 128}) == {"a": 8}
