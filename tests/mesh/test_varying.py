"""Functions that know nothing of mesh axes, inside of `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from prunex_jax.mesh.varying import axes_of, untyped

P = jax.P
BOTH = ("host", "device")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), BOTH, (AxisType.Auto,) * 2, devices=jax.devices()[:4])


def recurrent(w, x):
    """A loop from zeros, as layers of Flax have them."""

    def cell(state, row):
        return jnp.tanh(row @ w + state), None

    return jax.lax.scan(cell, jnp.zeros((x.shape[0], 3)), x.swapaxes(0, 1))[0]


@jax.custom_vjp
def unlearned(x):
    return 2 * x


unlearned.defvjp(lambda x: (2 * x, None), lambda _, change: (jnp.zeros((2, 3)),))


def repeated(w, x):
    def body(number, state):
        return state + w.sum() * x[:, number, :3]

    return jax.lax.fori_loop(0, 4, body, jnp.zeros((x.shape[0], 3)))


def chosen(w, x):
    branches = (lambda: jnp.zeros((2, 3)), lambda: x[:, 0] @ w)
    return jax.lax.cond(x.sum() > 1e9, *branches)


FUNCTIONS = {
    "scan": recurrent,
    "fori_loop": repeated,
    "cond": chosen,
    "custom_vjp": lambda w, x: x[:, 0] @ w + unlearned(x[:, 1] @ w),
    "remat": jax.checkpoint(recurrent),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_one_device(mesh, name):
    """Of parameters that are the same everywhere jax sums them over the mesh."""
    function = FUNCTIONS[name]
    w = jax.random.normal(jax.random.key(0), (5, 3))
    x = jax.random.normal(jax.random.key(1), (8, 4, 5))

    def slope(function, w, x):
        return jax.grad(lambda w: jnp.sum(function(w, x) ** 2))(w)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(BOTH)), out_specs=P())
    def on_mesh(w, x):
        return slope(untyped(function), w, x)

    parts = x.reshape(4, 2, 4, 5)
    wanted = sum(slope(function, w, part) for part in parts)
    found = jax.jit(on_mesh)(w, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    if name in ("scan", "fori_loop"):  # What it is for.
        spec = {"mesh": mesh, "in_specs": (P(), P(BOTH)), "out_specs": P(BOTH)}
        with pytest.raises(TypeError, match="carry"):
            jax.jit(jax.shard_map(function, **spec))(w, x)


def test_results_differ_along_the_axes_of_the_arguments(mesh):
    def both(x, y):
        plain = untyped(lambda x, y: (jnp.zeros(2), x[:1] + y))
        found = plain(x, y)
        assert [axes_of(jax.typeof(z)) for z in found] == [{"host"}] * 2
        assert axes_of(jax.typeof(untyped(jnp.sin)(y))) == frozenset()
        return found

    specs = {"in_specs": (P("host"), P()), "out_specs": P("host")}
    zeros, found = jax.shard_map(both, mesh=mesh, **specs)(jnp.arange(4.0), jnp.ones(1))
    assert zeros.tolist() == [0.0] * 4 and found.tolist() == [1.0, 3.0]


def test_outside_of_a_mesh_and_under_vmap_it_is_the_function(mesh):
    w, x = jnp.ones((5, 3)), jnp.ones((2, 4, 5))
    np.testing.assert_array_equal(untyped(recurrent)(w, x), recurrent(w, x))

    def mapped(w, x):
        return jax.vmap(untyped(recurrent), (None, 0))(w, x)

    spec = {"mesh": mesh, "in_specs": (P(), P(BOTH)), "out_specs": P(BOTH)}
    several = jnp.stack([x] * 4)
    found = jax.shard_map(mapped, **spec)(w, several)
    np.testing.assert_allclose(found[0], recurrent(w, x), rtol=1e-6)
