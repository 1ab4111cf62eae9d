"""Dead channels leave the memory of any inner optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.base.trees import flatten_by_path
from prunex_jax.channels import layouts_of
from prunex_jax.methods.moments import mask_moments
from prunex_jax.train.build.optimizer import make_inner
from tests.helpers.consensus_cases import GROUPS, QUICK, START, make_core
from tests.helpers.consensus_reference import entry_masks

LAYOUTS = layouts_of(GROUPS, {k: v.shape for k, v in flatten_by_path(START).items()})
MASKS = {"a": np.arange(8) < 4, "b": np.arange(6) % 2 == 0}
KERNELS_ONLY = {"a": {"kernel": True}, "b": {"kernel": True}, "free": False}
LABELS = {"a": {"kernel": "x"}, "b": {"kernel": "y"}, "free": "y"}
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, 0.9),
    "adamw, masked by a function": optax.adamw(
        0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "masked by a tree": optax.masked(optax.trace(0.9), KERNELS_ONLY),
    "partition": optax.partition(
        {"x": optax.adam(0.1), "y": optax.sgd(0.1, 0.9)}, LABELS
    ),
    "injected rate": optax.inject_hyperparams(optax.adam)(0.1),
    "accumulated steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "muon, and adamw for the rest": make_inner(
        OptimizerConfig(name="muon", adamw_paths=("b",)), optax.constant_schedule(0.1)
    ),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1)),
}


def ones_like(state):
    """The state with ones for every moment, counters left alone."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(START)}
    return jax.tree.map(lambda x: jnp.ones_like(x) if x.shape in shapes else x, state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_zero_exactly_where_channels_are_dead(name):
    full = ones_like(OPTIMIZERS[name].init(START))
    state = mask_moments(full, START, LAYOUTS, MASKS)
    assert jax.tree.structure(state) == jax.tree.structure(full)
    wanted = {leaf.shape: leaf for leaf in jax.tree.leaves(entry_masks(MASKS))}
    num_moments = 0
    for before, after in zip(
        jax.tree.leaves(full), jax.tree.leaves(state), strict=True
    ):
        num_moments += before.shape in wanted
        np.testing.assert_array_equal(after, wanted.get(before.shape, before))
    assert num_moments >= 2, "no moments were tested"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["factored moments", "noise", "flat moments"])
def test_dead_entries_stay_zero_whatever_the_inner_optimizer_does(name):
    """Even where its memory cannot be cleared, or zero gradients give updates."""
    inner = {
        "factored moments": optax.adafactor(0.1, min_dim_size_to_factor=2),
        "noise": optax.chain(optax.add_noise(1.0, 0.5, key=0), optax.sgd(0.1)),
        "flat moments": optax.flatten(optax.sgd(0.1, 0.9)),
    }[name]
    core = make_core("reset", on_mesh=False, inner=inner)
    update = jax.jit(core.update, static_argnames="sync", compiler_options=QUICK)
    params, state = START, core.init(START)
    for sync in (True, False):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = update(grads, state, params, sync=sync)
        params = optax.apply_updates(params, updates)
    alive = entry_masks(state.masks)
    for leaf, mask in zip(jax.tree.leaves(params), jax.tree.leaves(alive), strict=True):
        assert not np.any(np.asarray(leaf) * (1 - mask)), "a dead entry moved"


def test_the_longest_path_names_the_parameter():
    """A parameter `kernel` at the root does not claim the moments of `a/kernel`."""
    params = {"a": {"kernel": jnp.ones((3, 8))}, "kernel": jnp.ones((3, 8))}
    layouts = {"kernel": LAYOUTS["a/kernel"]}
    moments = mask_moments(optax.TraceState(params), params, layouts, MASKS).trace
    assert np.all(moments["a"]["kernel"] == 1)
    np.testing.assert_array_equal(moments["kernel"][0], MASKS["a"])


def test_shapes_that_differ_are_not_moments():
    state = {"a": {"kernel": jnp.ones((8,))}, "xa/kernel": jnp.ones((3, 8))}
    after = mask_moments(state, START, LAYOUTS, MASKS)
    assert np.all(after["a"]["kernel"] == 1)
    assert np.all(after["xa/kernel"] == 1), "only whole keys count as a path"
