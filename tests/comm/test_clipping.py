"""Clipping to the median norm of hosts: what is left of a tree, and what it sends."""

import functools

import jax
import numpy as np
import pytest

from prunex_jax.comm import clip_to_median, list_collectives, wire_bytes
from prunex_jax.comm.formulas import host_gather
from prunex_jax.mesh import ALONE, vary
from tests.helpers.common import MESH, make_mesh
from tests.helpers.mean_cases import (
    AXES,
    BY_SIZE,
    assert_same,
    flat,
    make_tree,
    on_mesh,
)

SHAPE = (4, 2)


def tree_of(num_hosts, lengths=None):
    """Trees [hosts, devices, ...], equal inside a host, scaled to lengths."""
    tree = make_tree((num_hosts, 1), size=40)
    if lengths is not None:
        norms = np.linalg.norm(flat(tree, 1), axis=1)
        factors = np.float32(lengths) / norms
        tree = jax.tree.map(
            lambda x: x * factors.reshape(-1, *[1] * (x.ndim - 1)), tree
        )
    return jax.tree.map(lambda x: np.repeat(x, SHAPE[1], 1), tree)


@functools.cache
def clipping(num_hosts):
    """What every device holds of its host's tree, typed by nobody."""

    def run(own):
        found = clip_to_median(own, MESH)
        return jax.tree.map(lambda x: vary(x, AXES)[None, None], found)

    return on_mesh(run, (num_hosts, SHAPE[1]), jax.P(*AXES), check_vma=False)


def clipped(tree):
    """By the equation, in float64."""
    rows = flat(tree, 2)[:, 0].astype(np.float64)
    norms = np.sqrt(np.sum(rows**2, axis=1))
    median = np.sort(norms)[(len(norms) - 1) // 2]
    factors = np.minimum(1.0, median / norms)
    return jax.tree.map(
        lambda x: x * factors.reshape(-1, *[1] * (x.ndim - 1)), tree
    ), factors  # fmt: skip


@pytest.mark.parametrize("lengths", [(3, 2, 30, 1), (3, 2, 1), (5, 4)])
def test_what_is_longer_than_the_median_is_cut_to_it(lengths):
    """Of four hosts one is ten times longer; of two the longer is cut."""
    tree = tree_of(len(lengths), lengths)
    found = clipping(len(lengths))(tree)
    wanted, factors = clipped(tree)
    assert 0 < np.sum(factors < 1) <= len(lengths) // 2
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), found, wanted
    )
    # Short ones are not touched, and all devices of a host do the same.
    short = np.flatnonzero(factors == 1)
    for got, own in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(got[short], own[short])
        np.testing.assert_array_equal(got[:, 0], got[:, 1])


def test_how_much_too_long_a_host_is_makes_no_difference():
    found = [clipping(4)(tree_of(4, (3, 2, 1, long))) for long in (10, 1e6)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), *found)


def test_equal_norms_change_no_bit():
    tree = tree_of(4)
    signs = np.float32([1, -1, -1, 1])
    tree = jax.tree.map(lambda x: x[:1] * signs.reshape(-1, *[1] * (x.ndim - 1)), tree)
    assert_same(clipping(4)(tree), tree)


@pytest.mark.parametrize("lengths", [(0, 0, 0, 1), (0, 0, 0, 0)])
def test_a_median_of_zero_cuts_nothing(lengths):
    tree = tree_of(4, lengths)
    assert_same(clipping(4)(tree), tree)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_and_cuts_nobody(value):
    tree = tree_of(4, (1, 1, 1, 2))
    tree["scale"][1] = value
    found = clipping(4)(tree)
    assert_same(
        jax.tree.map(lambda x: x[:2], found), jax.tree.map(lambda x: x[:2], tree)
    )
    assert np.isfinite(flat(found, 2)[[0, 2, 3]]).all()


def test_one_host_is_not_touched():
    tree = tree_of(1)
    assert_same(clipping(1)(tree), tree)
    assert clip_to_median(tree, ALONE) is tree


@pytest.mark.parametrize("shape", [(1, 2), (2, 4), (4, 2), (3, 1)], **BY_SIZE)
def test_one_number_per_host_is_sent(shape):
    mesh_shape = dict(zip(AXES, shape, strict=True))
    program = jax.shard_map(
        lambda own: clip_to_median(own, MESH),
        mesh=make_mesh(*shape), in_specs=jax.P(), out_specs=jax.P("host"),
    )  # fmt: skip
    own = np.zeros((8, 3), np.float32)
    found = list_collectives(jax.jit(program).trace(own).jaxpr)
    assert wire_bytes(found, mesh_shape) == wire_bytes(
        host_gather(1, mesh_shape), mesh_shape
    )
