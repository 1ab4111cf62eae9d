"""Top-K sends the largest entries of every host, and loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.comm import Wire, list_collectives
from prunex_jax.mesh import MeshAxes, vary
from prunex_jax.methods import topk
from prunex_jax.methods.topk import TOPK_PLACEMENTS
from tests.helpers.common import MESH, make_mesh
from tests.helpers.entry_cases import (
    AXES,
    GRADS,
    HOST_GRADS,
    SIZE,
    WIRES,
    as_mesh,
    flat,
    largest,
    run,
)

# Rounding of float32, for sums of a few numbers of the order of one.
TIGHT = {"rtol": 1e-5, "atol": 2e-6}
# Largest relative error of one value, and of the largest of its block.
LOSS = {
    "float32": 0,
    "float16": 2**-11,
    "bfloat16": 2**-8,
    "int8": 1 / 240,
    "int4": 1 / 13,
    "int2": 1.0,
}


def run_topk(shape, grads=None, **settings):
    grads = as_mesh(shape) if grads is None else grads
    return run(topk, TOPK_PLACEMENTS, shape, grads, **settings)


def reference(grads, count):
    """The listing in the docstring, in numpy; grads [steps, hosts, entries]."""
    held_back, seen = np.zeros_like(grads[0]), []
    for now in grads:
        total = now + held_back
        sent = np.zeros_like(total)
        for host, at in enumerate(largest(total, count)):
            sent[host, at] = total[host, at]
        held_back = total - sent
        seen.append((sent.mean(0), held_back))
    return seen


@pytest.mark.parametrize("density", [0.01, 0.1, 0.6])
def test_is_its_listing(density):
    found = run_topk((4, 2), density=density)
    wanted = reference(HOST_GRADS, round(density * SIZE))
    for (direction, state), (mean, held_back) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(direction, mean, **TIGHT)
        np.testing.assert_allclose(state.residual, held_back, **TIGHT)
        assert np.count_nonzero(direction) <= 4 * round(density * SIZE)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wire_dtype", WIRES)
@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_what_came_in_is_sent_or_held_back(shape, wire_dtype):
    """For every host, with every wire; only the mean of what is sent can be seen."""
    found = run_topk(shape, density=0.1, wire=Wire(wire_dtype))
    came_in = HOST_GRADS.sum(0)
    directions = np.sum([direction for direction, _ in found], axis=0)
    held_back = found[-1][1].residual
    np.testing.assert_allclose(directions + held_back.mean(0), came_in.mean(0), **TIGHT)
    # One host at a time, the others silent: now what it sent is 4 times the mean.
    for host in range(4):
        alone = jax.tree.map(
            lambda g, h=host: (
                g * (np.arange(4) == h).reshape(1, 4, *[1] * (g.ndim - 2))
            ),
            as_mesh(shape),
        )
        found = run_topk(shape, alone, density=0.1, wire=Wire(wire_dtype))
        sent = 4 * np.sum([direction for direction, _ in found], axis=0)
        held_back = found[-1][1].residual
        np.testing.assert_allclose(sent + held_back[host], came_in[host], **TIGHT)
        assert not np.any(np.delete(held_back, host, axis=0)), "the silent hold nothing"


@pytest.mark.parametrize("wire_dtype", WIRES)
def test_a_wire_rounds_what_it_sends_and_no_more(wire_dtype):
    exact = run_topk((4, 1), density=0.1)[0]
    found = run_topk((4, 1), density=0.1, wire=Wire(wire_dtype))[0]
    error = np.abs(found[0] - exact[0])
    assert error.max() <= LOSS[wire_dtype] * np.abs(HOST_GRADS[0]).max()
    assert (wire_dtype == "float32") == (error.max() == 0)
    # What the wire has rounded away is held back.
    lost = found[1].residual - exact[1].residual
    np.testing.assert_allclose(lost.mean(0), exact[0] - found[0], **TIGHT)


@pytest.mark.parametrize("wire_dtype", ["float32", "int8"])
def test_devices_per_host_do_not_matter(wire_dtype):
    ends = [
        run_topk(shape, density=0.1, wire=Wire(wire_dtype))[-1]
        for shape in ((4, 1), (4, 2))
    ]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, **TIGHT)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_density_one_is_dense(shape):
    for (direction, state), now in zip(
        run_topk(shape, density=1.0), HOST_GRADS, strict=True
    ):
        np.testing.assert_allclose(direction, now.mean(0), **TIGHT)
        assert not np.any(state.residual)


@pytest.mark.parametrize("wire_dtype", ["float32", "int8"])
def test_one_host_sends_nothing_and_holds_nothing_back(wire_dtype):
    one = jax.tree.map(lambda g: g[:, :1], GRADS)
    found = run_topk((1, 2), one, density=0.01, wire=Wire(wire_dtype))
    for (direction, state), now in zip(found, flat(one, 3), strict=True):
        np.testing.assert_allclose(direction, now[0].mean(0), **TIGHT)
        assert not np.any(state.residual)


def test_every_entry_is_sent_in_the_end():
    """Of constant gradients no entry starves, however small."""
    now = np.linspace(1, 2, SIZE, dtype=np.float32)
    grads = np.broadcast_to(now, (60, 2, 1, SIZE))
    found = run_topk((2, 1), grads, density=0.05)
    sent = np.sum([direction for direction, _ in found], axis=0)
    # None waits for longer than two rounds of all entries.
    assert np.all(sent >= (60 - 40) * now)


def test_hosts_take_the_same_step():
    """Sums are taken in one order, so that copies of the parameters never drift."""

    def fn(grads):
        tx = topk(0.9, wire=Wire("float16"), axes=MESH)
        own = grads[0, 0]
        direction, _ = tx.update(own, tx.init(own))
        return vary(direction, AXES)[None, None]

    grads = np.random.default_rng(0).normal(size=(8, 1, SIZE)).astype(np.float32)
    spec = jax.P(*AXES)
    run = jax.shard_map(fn, mesh=make_mesh(8, 1), in_specs=spec, out_specs=spec)
    found = np.asarray(jax.jit(run)(grads))
    assert np.all(found == found[:1, :1])


def test_the_static_density_changes_what_is_sent():
    tx = topk(0.1, axes=MESH)

    def fn(grads, density):
        own = grads[0, 0]
        direction, _ = tx.update(own, tx.init(own), density=density)
        return direction

    for density, count in ((None, 30), (0.5, 150)):
        run = jax.shard_map(
            lambda g, d=density: fn(g, d),
            mesh=make_mesh(2, 2),
            in_specs=jax.P(*AXES),
            out_specs=jax.P(),
        )
        listed = list_collectives(jax.make_jaxpr(run)(jnp.zeros((2, 2, SIZE))))
        over_hosts = [c for c in listed if c.axes == ("host",)]
        assert [(c.kind, c.num_elements) for c in over_hosts] == [
            ("gather", count // 2),
            ("gather", count // 2),
        ]
        assert {c.dtype for c in over_hosts} == {"float32", "int32"}


def test_works_in_front_of_any_optimizer_without_a_mesh():
    tx = optax.chain(topk(0.3), optax.adam(0.1))
    params = {"a": jnp.ones(7), "b": jnp.ones((), jnp.bfloat16)}
    state = tx.init(params)
    plain = optax.adam(0.1)
    wanted, _ = plain.update(params, plain.init(params))
    found, _ = tx.update(params, state, params, unheard_of=1)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_largest_of_every_chunk_are_sent_and_nothing_is_lost():
    """Two chunks; the values of the second are a hundred times smaller."""
    size = 4096 + 1000
    scale = np.where(np.arange(size) < 4096, 1.0, 0.01)
    rng = np.random.default_rng(7)
    grads = (scale * rng.normal(size=(3, 2, 1, size))).astype(np.float32)
    found = run_topk((2, 1), grads, density=0.01, in_chunks=True)
    for host in range(2):
        is_sent = found[0][1].residual[host] != grads[0, host, 0]
        assert (is_sent[:4096].sum(), is_sent[4096:].sum()) == (40, 40)
        for chunk in (slice(0, 4096), slice(4096, None)):
            sizes = np.abs(grads[0, host, 0, chunk])
            assert sizes[is_sent[chunk]].min() > sizes[~is_sent[chunk]].max()
    for wire in ("float32", "int8"):
        found = run_topk((2, 1), grads, density=0.01, in_chunks=True, wire=Wire(wire))
        sent = np.sum([direction for direction, _ in found], axis=0)
        whole = sent + found[-1][1].residual.mean(0)
        np.testing.assert_allclose(whole, grads[:, :, 0].sum(0).mean(0), **TIGHT)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan")])
def test_refuses_densities_outside_its_range(density):
    with pytest.raises(UserError, match=r"density=.* must (lie in|be a finite)"):
        topk(density)
    tx = topk(0.5, axes=MeshAxes("host", None))
    with pytest.raises(UserError, match=r"density=.* must (lie in|be a finite)"):
        jax.vmap(
            lambda g: tx.update(g, tx.init(g), density=density)[0], axis_name="host"
        )(jnp.ones((2, 4)))


def test_refuses_gradients_that_are_sums():
    tx = topk(0.1, axes=MESH)
    run = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0],
        mesh=make_mesh(2, 2),
        in_specs=jax.P(),
        out_specs=jax.P(),
    )
    with pytest.raises(UserError, match="summed"):
        jax.eval_shape(run, jnp.ones(4))
