"""Runs transformations that send few entries, on a mesh, and their shared data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.mesh import enter, leave, specs_of, vary
from tests.helpers.common import MESH, make_mesh

AXES = ("host", "device")
QUICK = {"xla_backend_optimization_level": 0}
# 300 entries: three blocks of a narrow wire, the last one not full.
SHAPES = {"kernel": (11, 23), "rest": [(46,), ()]}
SIZE = 300
NUM_STEPS = 6
WIRES = ("float32", "float16", "bfloat16", "int8", "int4", "int2")


def draw(seed, lead=()):
    """Normal numbers in the shapes of the parameters, with leading axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=lead + shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def flat(tree, num_lead):
    """Leaves side by side in one last axis, in the order of the buffer."""
    leaves = [x.reshape(*x.shape[:num_lead], -1) for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=-1)


GRADS = draw(1, (NUM_STEPS, 4, 2))  # [steps, hosts, devices]
# Mean gradient of every host, float32[steps, hosts, entries].
HOST_GRADS = flat(jax.tree.map(lambda g: g.mean(2), GRADS), 2)


def as_mesh(shape, grads=None):
    """The gradients of four hosts, handed to the devices of a mesh with four hosts.

    Meshes with more or fewer devices per host get the mean of the host on each.
    """
    grads = GRADS if grads is None else grads
    if shape[1] == 2:
        return grads
    return jax.tree.map(
        lambda g: np.repeat(g.mean(2, keepdims=True), shape[1], axis=2), grads
    )


@functools.cache
def _programs(make, placements, shape, settings, options):
    tx = make(**dict(settings), axes=MESH)
    specs = specs_of(placements)

    def init(grads):
        state = tx.init(jax.tree.map(lambda g: g[0, 0], grads))
        return leave(placements, vary(state, AXES[:1]))

    def update(grads, state):
        own = jax.tree.map(lambda g: g[0, 0], grads)
        state = enter(placements, state)
        direction, state = tx.update(own, state, **dict(options))
        return direction, leave(placements, state)

    def on_mesh(fn, in_specs, out_specs):
        run = jax.shard_map(
            fn, mesh=make_mesh(*shape), in_specs=in_specs, out_specs=out_specs
        )
        return jax.jit(run, compiler_options=QUICK)

    batch = jax.P(*AXES)
    return (
        on_mesh(init, batch, specs),
        on_mesh(update, (batch, specs), (jax.P(), specs)),
    )


def run(make, placements, shape, grads, options=(), **settings):
    """(direction, state) after every step, trees as buffers; state leads with [hosts].

    Args:
      make: Factory of the transformation, all of whose state is per_host.
      placements: Of its state.
      shape: Hosts and devices.
      grads: Leading axes [steps, hosts, devices].
      options: Of every update, as pairs.
      settings: Of the factory.
    """
    key = tuple(sorted(settings.items()))
    init, step = _programs(make, placements, shape, key, options)
    at = [
        jax.tree.map(lambda g, i=i: jnp.asarray(g[i]), grads)
        for i in range(len(jax.tree.leaves(grads)[0]))
    ]
    state, seen = init(at[0]), []
    for now in at:
        direction, state = step(now, state)
        shown, parts = jax.tree.map(np.asarray, (direction, state))
        buffers = type(state)(*(flat(part, 1) for part in parts))
        seen.append((flat(shown, 0), buffers))
    return seen


def largest(rows, count):
    """Positions of the largest magnitudes of every row."""
    return np.argsort(-np.abs(rows), axis=-1)[..., :count]
