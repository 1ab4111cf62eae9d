"""Runs means over hosts on a mesh, and the trees that they are given."""

import jax
import numpy as np

from tests.helpers.common import make_mesh

AXES = ("host", "device")
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
BY_SIZE = {"ids": lambda s: f"{s[0]}x{s[1]}"}
REPLICATED = jax.P()


def make_tree(lead, seed=0, size=500):
    """Leaves that end in the middle of blocks, as hosts have them."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.normal(size=(*lead, size // 5, 4)).astype(np.float32),
        "scale": rng.normal(size=lead).astype(np.float32) * 1e-3,
        "bias": rng.normal(size=(*lead, size // 7)).astype(np.float32),
    }


def on_mesh(fn, shape, out_specs=REPLICATED, check_vma=True):
    """Runs `fn` on every device's own part of a tree with [hosts, devices] axes."""

    def body(tree):
        return fn(jax.tree.map(lambda x: x[0, 0], tree))

    run = jax.shard_map(
        body, mesh=make_mesh(*shape), in_specs=jax.P(*AXES), out_specs=out_specs,
        check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(run)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def flat(tree, num_axes=0):
    """All leaves of a tree in one array, in the order in which they are fused."""
    leaves = [np.reshape(x, (*x.shape[:num_axes], -1)) for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=-1)
