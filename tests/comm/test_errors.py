"""Means whose errors are fed back: nothing is lost, whatever the format and mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.comm import (
    FORMATS,
    Wire,
    list_collectives,
    mean_over_devices,
    mean_with_error,
    wire_bytes,
)
from prunex_jax.mesh import ALONE, vary
from tests.helpers.common import MESH, make_mesh
from tests.helpers.formulas.means import host_sum, host_sum_with_error
from tests.helpers.mean_cases import (
    AXES,
    BY_SIZE,
    MESHES,
    assert_same,
    flat,
    make_tree,
    on_mesh,
)

NARROW = [dtype for dtype in FORMATS if dtype != "float32"]
# Whole, in every format; in buckets, in those of short and of long blocks.
SENT = [(dtype, 0) for dtype in FORMATS] + [("int8", 400), ("int2", 400)]
PER_HOST = jax.P("host")


def run_on(shape, wire, tree):
    """The mean, and the errors [hosts, ...], of trees [hosts, devices, ...]."""

    def run(own):
        mean, error = mean_with_error(mean_over_devices(own, MESH), MESH, wire)
        return mean, jax.tree.map(lambda e: e[None], error)

    return on_mesh(run, shape, (jax.P(), PER_HOST))(tree)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1), (3, 2)], **BY_SIZE)
@pytest.mark.parametrize(("dtype", "bucket_bytes"), SENT)
def test_nothing_is_lost(dtype, shape, bucket_bytes):
    """The mean of what was given is the mean that was sent plus that of the errors."""
    tree = make_tree(shape, size=3000)
    mean, error = run_on(shape, Wire(dtype, bucket_bytes), tree)
    whole = flat(mean) + flat(error, 1).mean(0)
    np.testing.assert_allclose(whole, flat(tree, 2).mean((0, 1)), atol=3e-6)
    if dtype != "float32":
        lost = np.abs(flat(error, 1)).max(1)
        assert np.all(lost > 1e-5), "a host has lost nothing"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", NARROW)
def test_devices_and_buckets_do_not_change_a_bit(dtype):
    tree = make_tree((4, 1), size=4000)
    found = []
    for num_devices, bucket_bytes in ((1, 0), (2, 0), (2, 700)):
        per_host = jax.tree.map(lambda x, n=num_devices: np.repeat(x, n, 1), tree)
        # The mean of two equal numbers is exact.
        wire = Wire(dtype, bucket_bytes)
        found.append(run_on((4, num_devices), wire, per_host)[0])
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("dtype", ["int4", "int2"])
def test_what_is_fed_back_arrives(dtype):
    """The same tree again and again: the mean of the means goes to the true mean."""
    shape, times = (4, 1), 40
    tree = make_tree(shape, size=3000)

    def run(own):
        def once(error, _):
            sent = jax.tree.map(jnp.add, own, error)
            return mean_with_error(sent, MESH, Wire(dtype))[::-1]

        zeros = jax.tree.map(jnp.zeros_like, own)
        _, means = jax.lax.scan(once, zeros, length=times)
        first = jax.tree.map(lambda x: x[0], means)
        return first, jax.tree.map(lambda x: x.mean(0), means)

    # Untyped: the loop starts from zeros that are the same everywhere.
    first, later = on_mesh(run, shape, check_vma=False)(tree)
    wanted = flat(tree, 2).mean((0, 1))
    at_once = np.abs(flat(first) - wanted).mean()
    assert np.abs(flat(later) - wanted).mean() < 4 * at_once / times


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_device_of_a_host_has_the_same_bits(dtype):
    def run(own):
        own = mean_over_devices(own, MESH)
        found = mean_with_error(own, MESH, Wire(dtype))
        return jax.tree.map(lambda x: vary(x, AXES)[None, None], found)

    found = on_mesh(run, (4, 2), jax.P(*AXES), check_vma=False)(make_tree((4, 2)))
    mean, error = found
    jax.tree.map(lambda x: assert_same(x, np.broadcast_to(x[:1, :1], x.shape)), mean)
    jax.tree.map(lambda x: assert_same(x[:, 0], x[:, 1]), error)


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_host_sends_nothing_and_loses_nothing(dtype):
    tree = make_tree((1, 4))
    mean, error = run_on((1, 4), Wire(dtype), tree)
    np.testing.assert_allclose(flat(mean), flat(tree, 2).mean((0, 1)), atol=1e-6)
    assert not flat(error).any()
    alone = jax.tree.map(lambda x: x[0, 0], tree)
    mean, error = mean_with_error(alone, ALONE, Wire(dtype))
    assert_same(mean, alone)
    assert not flat(error).any()


def test_types_of_leaves_stay():
    tree = {"half": np.float16(np.ones((2, 2, 30))), "none": None, "wide": np.ones(
        (2, 2, 7), np.float32)}  # fmt: skip
    for found in run_on((2, 2), Wire("int2"), tree):
        assert found["half"].dtype == np.float16
        assert found["wide"].dtype == np.float32
    assert mean_with_error({}, ALONE, Wire("int2")) == ({}, {})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_divergence_of_one_host_is_seen_by_all(bad):
    tree = make_tree((2, 2))
    tree["kernel"][1, 0, 7, 2] = bad
    mean, _ = run_on((2, 2), Wire("int2"), tree)
    assert not np.isfinite(mean["kernel"][7, 2])


def test_simulated_hosts_agree_with_a_mesh():
    tree = make_tree((4, 1))
    alone = jax.tree.map(lambda x: x[:, 0], tree)
    axes = type(MESH)("host", None)
    simulated = jax.jit(
        jax.vmap(lambda own: mean_with_error(own, axes, Wire("int2")), axis_name="host")
    )(alone)
    mean, error = run_on((4, 1), Wire("int2"), tree)
    np.testing.assert_allclose(flat(simulated[0], 1)[2], flat(mean), atol=1e-6)
    np.testing.assert_allclose(flat(simulated[1], 1), flat(error, 1), atol=1e-6)


@pytest.mark.parametrize(("dtype", "bucket_bytes"), SENT)
@pytest.mark.parametrize("shape", [*MESHES, (2, 3)], **BY_SIZE)
def test_formulas_are_what_is_sent(shape, dtype, bucket_bytes):
    mesh_shape, wire = dict(zip(AXES, shape, strict=True)), Wire(dtype, bucket_bytes)
    own = make_tree((), size=3000)

    def run(own):
        mean, error = mean_with_error(own, MESH, wire)
        return mean, jax.tree.map(lambda e: e[None], error)

    program = jax.shard_map(
        run, mesh=make_mesh(*shape), in_specs=jax.P(), out_specs=(jax.P(), PER_HOST)
    )
    found = wire_bytes(list_collectives(jax.jit(program).trace(own).jaxpr), mesh_shape)
    size = flat(own).size
    formula = host_sum_with_error(size, mesh_shape, wire)
    assert found == wire_bytes(formula, mesh_shape)
    # Errors stay inside hosts.
    without = wire_bytes(host_sum(size, mesh_shape, wire), mesh_shape)
    assert found["host"] == without["host"]


def test_two_bits_are_a_fifteenth_of_float32():
    mesh_shape, size = {"host": 4, "device": 1}, 271_117

    def sent(dtype):
        found = host_sum_with_error(size, mesh_shape, Wire(dtype))
        return wire_bytes(found, mesh_shape)["host"]

    assert 0.0664 < sent("int2") / sent("float32") < 0.067
