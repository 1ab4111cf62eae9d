"""Every argument of `hsadmm` and of its update, traced in a user's own `shard_map`.

A user need not know what is the same on all hosts: parameters and state are held once
per host, or once per device, with leading axes, as the guide for own loops does.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.sync import SyncSchedule
from prunex_jax.mesh import MeshAxes, vary
from prunex_jax.methods import hsadmm
from tests.helpers.common import make_mesh
from tests.helpers.consensus_cases import FINAL, GROUPS, START, draw, quadratic

NAMES = ("host", "device")
MORE = {"a": 6, "b": 4}
SHAPES = [(1, 1), (2, 2), (3, 2)]
MADE = {
    "sync_period": (2, SyncSchedule(2, (2, 5, 9))),
    "parameters": ("recommended", "paper"),
    "device_level": ("gradient", "consensus"),
    "freeze_round": (None, 1),
}
UPDATED = (
    {},
    {"keep_counts": MORE},
    {"kind": "freeze"},
    {"kind": "frozen", "keep_counts": MORE},
    {"sync": True},
    {"sync": True, "kind": "moving"},
    {"sync": False},
)


def crossed(options):
    """One dict for every combination of values."""
    return [
        dict(zip(options, chosen, strict=True))
        for chosen in itertools.product(*options.values())
    ]


def make(**options):
    axes = MeshAxes(*NAMES)
    return hsadmm(
        optax.sgd(0.05, 0.9), GROUPS, FINAL, axes=axes, learning_rate=0.05, **options
    )


def on(mesh, tx, **options):
    """A user's functions: what starts, and one step."""
    lead = jax.P(NAMES)
    off = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    back = lambda tree: jax.tree.map(lambda x: x[None], tree)  # noqa: E731

    def start(params):
        params = off(params)
        return back((params, tx.init(params)))

    def step(held, target):
        params, state = off(held)
        grads = jax.grad(quadratic)(vary(params, NAMES), off(target))
        updates, state = tx.update(grads, state, params, **options)
        return back((optax.apply_updates(params, updates), state))

    return (
        jax.shard_map(start, mesh=mesh, in_specs=lead, out_specs=lead),
        jax.shard_map(step, mesh=mesh, in_specs=lead, out_specs=lead),
    )


def stacked(shape, seed=None):
    """The start on every device, or numbers of its own."""
    count = shape[0] * shape[1]
    if seed is not None:
        return draw(seed, (count,))
    return jax.tree.map(lambda x: np.repeat(x[None], count, axis=0), START)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "made", crossed(MADE), ids=lambda made: "-".join(map(str, made.values()))
)
def test_every_argument_is_traced(made, shape):
    """Parameters and state come back as they were, whatever a step is told."""
    mesh, tx = make_mesh(*shape), make(**made)
    start, _ = on(mesh, tx)
    held = jax.eval_shape(start, stacked(shape))
    for told in UPDATED:
        _, step = on(mesh, tx, **told)
        after = jax.eval_shape(step, held, stacked(shape, seed=1))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), held
        )


def test_counting_inside_freezes_where_static_kinds_do():
    """The masks of a run that counts itself are those of one that is told."""
    shape, kinds = (2, 2), ("moving", "freeze", "frozen", "frozen")
    mesh, target = make_mesh(*shape), stacked(shape, seed=1)
    counting = make(sync_period=1, freeze_round=1)
    start, step = on(mesh, counting)
    held = jax.jit(start)(stacked(shape))
    step = jax.jit(step)
    told, running = held, held
    for kind in kinds:
        running = step(running, target)
        _, static = on(mesh, make(sync_period=1), sync=True, kind=kind)
        told = jax.jit(static)(told, target)
        for found, wanted in zip(*map(jax.tree.leaves, (running, told)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    frozen = running[1].masks
    assert {name: int(jnp.sum(mask[0])) for name, mask in frozen.items()} == FINAL
