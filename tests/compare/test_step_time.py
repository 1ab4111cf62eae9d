"""Traffic of steady steps is that of the traced programs."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.compression import make_recipe
from benchmarks.traffic_table import keep_counts
from prunex_jax.comm import wire_bytes
from prunex_jax.compare.step_time import Link, steady_traffic
from prunex_jax.methods import METHODS, MethodConfig, make_method, method_config
from prunex_jax.methods.hsadmm.method import HsadmmConfig
from prunex_jax.methods.importance import ImportanceConfig
from prunex_jax.methods.method import RoundsConfig
from tests.helpers.formulas.means import mesh_sum
from tests.helpers.formulas.methods import formulas_of

MESH = {"host": 4, "device": 2}


@pytest.fixture(scope="module")
def recipe():
    return make_recipe("resnet20")


def method_of(recipe, config: MethodConfig):
    return make_method(dataclasses.replace(recipe, config=config))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", METHODS)
def test_steady_traffic_is_what_formulas_say(recipe, name):
    own = dataclasses.replace(recipe, config=method_config(name))
    method, formulas = make_method(own), formulas_of(own)
    counts = keep_counts(method, recipe)
    traffic = steady_traffic(method, own.shapes, MESH, counts)
    sent = formulas.exchange(MESH, counts, "frozen") or formulas.step(MESH)
    wanted = wire_bytes(sent, MESH)["host"]
    share = method.sync.rounds_per_step if method.sync else 1
    assert traffic.host_bytes == wanted * share
    assert (traffic.hops > 0) == (name != "none")


def test_hops_of_a_dense_step(recipe):
    method = method_of(recipe, method_config("dense"))
    traffic = steady_traffic(method, recipe.shapes, MESH, {})
    sent = wire_bytes(mesh_sum(sum(map(np.prod, recipe.shapes.values())), MESH), MESH)
    # One ring sum of 4 hosts.
    assert traffic == (pytest.approx(sent["host"]), 6)


def test_steps_of_several_kinds_count_as_their_mean(recipe):
    config = method_config("importance", importance=ImportanceConfig(refresh_period=4))
    method = method_of(recipe, config)
    formulas = formulas_of(dataclasses.replace(recipe, config=config))
    often, rarely = (
        wire_bytes(formulas.step(MESH, refresh=each), MESH)["host"]
        for each in (True, False)
    )
    assert often > rarely
    mean = steady_traffic(method, recipe.shapes, MESH, {}).host_bytes
    assert mean == pytest.approx((often + 3 * rarely) / 4)


def test_largest_numbers_take_the_route_of_fewer_bytes(recipe):
    """Of programs on an abstract mesh, so also where none of so many hosts can run."""

    def traffic(num_hosts, **rounds):
        config = method_config(
            "local_sgd", wire_dtype="int2", rounds=RoundsConfig(top_k=64, **rounds)
        )
        method = method_of(recipe, config)
        mesh_shape = {"host": num_hosts, "device": 1}
        return steady_traffic(method, recipe.shapes, mesh_shape, {})

    for num_hosts, route in ((4, "gather"), (32, "owners")):
        assert traffic(num_hosts) == traffic(num_hosts, top_k_route=route)
    assert traffic(32).host_bytes < 1.5 * traffic(4).host_bytes


def test_traffic_needs_no_devices(recipe):
    config = method_config("hsadmm", hsadmm=HsadmmConfig(sync_period=8))
    method = method_of(recipe, config)
    huge = {"host": 4096, "device": 8}
    small = steady_traffic(method, recipe.shapes, MESH, recipe.keep_counts)
    traffic = steady_traffic(method, recipe.shapes, huge, recipe.keep_counts)
    # 2 (M-1) / M of the payload: 1.5 with 4 hosts, nearly 2 with thousands.
    assert traffic.host_bytes / small.host_bytes == pytest.approx(4 / 3, rel=1e-3)
    assert traffic.hops == 2 * 4095 / 8


def test_a_link_without_limit_takes_the_time_of_its_hops():
    assert Link(math.inf, 0.5).seconds(1e9, hops=3) == 1.5
