"""The explicit ring is the mean, on every mesh, and its hops are what crosses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import Wire, list_collectives, wire_bytes
from prunex_jax.comm.ring import ring_mean_over_hosts
from prunex_jax.mesh import ALONE, MeshAxes, vary
from tests.helpers.common import MESH, make_mesh
from tests.helpers.formulas.means import ring_sum

AXES = ("host", "device")
HOSTS = MeshAxes("host", None)
SHAPES = [(1, 4), (2, 2), (4, 1), (3, 2), (8, 1)]
SIZE = 2391  # divisible by nothing
QUICK = {"xla_backend_optimization_level": 0}


def on_mesh(shape, values, **kwargs):
    """Averages the rows of the hosts; every device gives back what it holds."""

    def body(own):
        total = ring_mean_over_hosts(own[0], MESH, **kwargs)
        return total, vary(total, AXES)[None, None]

    mesh = make_mesh(*shape)
    specs = (jax.P(), jax.P(*AXES))
    run = jax.shard_map(body, mesh=mesh, in_specs=jax.P("host"), out_specs=specs)
    return jax.jit(run, compiler_options=QUICK), values


def draw(num_hosts, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_hosts, SIZE)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ring_is_the_mean_and_the_same_bits_everywhere(shape):
    run, values = on_mesh(shape, draw(shape[0]))
    total, held = run(values)
    np.testing.assert_allclose(total, values.mean(0), rtol=1e-5, atol=1e-5)
    for own in np.asarray(held).reshape(-1, SIZE):
        np.testing.assert_array_equal(own, total, "hosts ended with different bits")


@pytest.mark.parametrize(
    ("dtype", "step"),
    [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 2**-7), ("int4", 2**-3)],
)
def test_narrow_rings_end_with_the_same_bits(dtype, step):
    run, values = on_mesh((4, 2), draw(4), wire=Wire(dtype))
    mean, held = run(values)
    error = np.abs(mean - values.mean(0)).max()
    assert 1e-6 < error < 4 * step * np.abs(values).max(), "rounded in each of 4 hops"
    for own in np.asarray(held).reshape(-1, SIZE):
        np.testing.assert_array_equal(own, mean, "hosts ended with different bits")


@pytest.mark.slow
def test_narrow_rings_are_unbiased_with_a_key():
    values = draw(4)

    def mean(key):
        ring = functools.partial(ring_mean_over_hosts, wire=Wire("int8"), key=key)
        return jax.vmap(lambda x: ring(x, HOSTS), axis_name="host")(values)[0]

    keys = jax.random.split(jax.random.key(0), 64)
    found = np.asarray(jax.jit(jax.vmap(mean))(keys))
    error, spread = found.mean(0) - values.mean(0), found.std(0) / 8
    assert np.abs(error).mean() < 1.2 * spread.mean() and spread.mean() > 0
    nearest = np.asarray(mean(None)) - values.mean(0)
    assert np.abs(error).mean() < np.abs(nearest).mean() / 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hops_are_what_the_program_sends(shape, dtype):
    run, values = on_mesh(shape, draw(shape[0]), wire=Wire(dtype))
    mesh_shape = dict(zip(AXES, shape, strict=True))
    listed = list_collectives(run.trace(values).jaxpr)
    found = [
        c.payload_bytes for c in listed if c.kind == "shift" and c.axes == ("host",)
    ]
    # Pieces of all devices and hosts make up the buffer, in whole blocks if narrow.
    wire = Wire(dtype)
    unit = 128 if wire.is_narrow else 1
    num_units = -(-SIZE // (unit * shape[0] * shape[1]))
    num_bytes = num_units * (wire.format.block_bytes if wire.is_narrow else 4)
    assert found == [num_bytes] * 2 * (shape[0] - 1)
    sent = wire_bytes(listed, mesh_shape)
    assert sent["host"] == shape[1] * sum(found)
    assert sent == wire_bytes(ring_sum(SIZE, mesh_shape, Wire(dtype)), mesh_shape)


def test_ring_needs_no_mesh():
    """Hosts that `vmap` simulates."""
    values = draw(5)
    run = jax.vmap(lambda x: ring_mean_over_hosts(x, HOSTS), axis_name="host")
    for row in run(values):
        np.testing.assert_allclose(row, values.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ring_mean_over_hosts(values[0], ALONE), values[0])


def test_ring_refuses_unknown_formats():
    with pytest.raises(UserError, match="'int2' rounds to nearest, and the ring"):
        ring_mean_over_hosts(jnp.ones(3), ALONE, Wire("int2"))
