"""Networks made to mislead: shrunk exactly, or explained; none comes out wrong."""

import jax
import pytest

from prunex_jax.channels import RULES
from tests.helpers.attacks import (
    ATTACKS,
    arguments_of,
    check,
    derivatives,
    layouts,
    lookups,
    loops,
    numbers,
    sequences,
    vision,
)
from tests.helpers.channel_checks import primitives_of

MODULES = (
    derivatives,
    layouts,
    lookups,
    loops,
    numbers,
    sequences,
    vision,
)
# In the quick tests: together they meet every rule that any of them meets.
QUICK = set(
    """
    insert while_any gumbel halves_depthwise complex_angle conv_forces_smooth
    switch_branches kan_full odeint_weights opt_barrier gather_partial_window shift
    bool_allnot remat_policy shared_depthwise_multiplier ln cumlogsumexp_time winC
    topk_time_indices reduce_precision erf cbrt triu_mix segment_max_empty lredwin
    lgamma0 digamma0 erfinv_half acosh1 cplx boolxor popcount kv_cache vq gamma_sample
    logdet_cov spatial_transformer tile_single multiplier_of_exp vjp_moves_shared
    jvp_moves_dead padding_becomes_one int8_wraps int4 argmax_pool
    moved_to_a_device written_side_by_side segments_of_channels gem_learned
    conv_forces minall mulrow lreduce fftc cayley_solve interp_lut
    linear_call_transposed_wrong
    """.split()
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in ATTACKS
    ],
)
def test_masked_equals_shrunk_or_all_stays(name):
    check(name)


@pytest.mark.slow
def test_quick_attacks_meet_every_rule_that_others_meet():
    met = {}
    for name, case in ATTACKS.items():
        with jax.numpy_rank_promotion("allow"):
            program = jax.make_jaxpr(case.apply)(*arguments_of(case))
        met[name] = primitives_of(program) & set(RULES)
    quick = set().union(*(met[name] for name in QUICK))
    assert quick >= set().union(*met.values())


def test_every_module_has_attacks():
    owners = {case.apply.__module__ for case in ATTACKS.values()}
    assert owners == {module.__name__ for module in MODULES}
