"""Programs around single primitives, drawn at random: masked always equals shrunk."""

import collections
import os
import random

import jax
import pytest

from prunex_jax.channels import RULES
from tests.helpers.generated import BUILDERS, check

# Programs per primitive; 40 of them are 5,000 together, and take half an hour.
NUM_ALL = int(os.environ.get("PRUNEX_GENERATED", "40"))
NUM_DRAWN = 4
NUM_PARTS = 6
NAMES = sorted(BUILDERS)
# What jax has no primitive of this name for, in this version or another.
ABSENT = {"copy_p", "log2", "mulhi", "one_minus_square", "polynomial", "scatter_add"}
# Calls, which are walked into, and have derivatives that somebody wrote.
CALLS = {"custom_jvp_call", "custom_vjp_call"}
# Rules that pass everything on inside of a mesh, which one device has not.
OF_A_MESH = {"agreed", "differing", "pcast", "psum_invariant", "pvary"}
# Share of programs of which channels must be removable, so that freezing everything
# does not pass; less where most operands are not finite, or have no slope, at zero.
LEAST_CUT = 0.2
LEAST_CUT_OF = {
    **dict.fromkeys(("acosh", "lgamma", "log", "nextafter", "rsqrt"), 0.0),
    **dict.fromkeys(("cbrt", "cummax", "digamma", "div", "log2", "pow"), 0.1),
    "sqrt": 0.05,
    **dict.fromkeys(("fft", "reduce", "triangular_solve"), 0.0),
    **dict.fromkeys(("bitcast_convert_type", "pad", "rem"), 0.1),
}


def assert_equal(verdicts):
    problems = [f"{v.program}: {v.problem}" for v in verdicts if v.problem]
    assert not problems, "\n".join(problems)


def test_every_rule_is_attacked():
    assert set(BUILDERS) == set(RULES) - OF_A_MESH | CALLS


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_masked_equals_shrunk(part):
    verdicts = [check(name, seed=0) for name in NAMES[part::NUM_PARTS]]
    assert_equal(verdicts)
    assert sum(verdict.is_cut for verdict in verdicts) > len(verdicts) / 3


@pytest.mark.rotates
@pytest.mark.parametrize("name", NAMES)
def test_masked_equals_shrunk_many_times(name, sample):
    """And enough can be removed, where all are drawn and not a few by the sample."""
    seeds = range(NUM_ALL)
    if sample:
        seeds = random.Random(sample).sample(seeds, NUM_DRAWN)
    verdicts = [check(name, seed) for seed in seeds]
    if NAMES.index(name) % 10 == 9:
        jax.clear_caches()  # compiled operations take gigabytes
    assert_equal(verdicts)
    if sample:
        return
    count = collections.Counter(
        verdict.is_cut for verdict in verdicts if verdict.is_known
    )
    assert count.total() > 0.4 * len(verdicts), "jax cannot do most of them"
    assert count[True] >= LEAST_CUT_OF.get(name, LEAST_CUT) * count.total()
    met = set().union(*(verdict.primitives for verdict in verdicts))
    assert name in met or name in ABSENT
