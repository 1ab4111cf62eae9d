"""Every optimizer there is goes on with a small network, or says that it cannot."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from prunex_jax import UserError, prune
from prunex_jax.base.settings import OptimizerConfig
from prunex_jax.pruner.optimizers import follows_masked
from prunex_jax.train.build.optimizer import make_inner

KEYS = jax.random.split(jax.random.key(0), 4)
TREE = {
    "in": jax.random.normal(KEYS[0], (3, 16)),
    "mid": {"kernel": jax.random.normal(KEYS[1], (16, 8)), "bias": jnp.full(8, 0.1)},
    "out": jax.random.normal(KEYS[2], (8, 2)),
}
X = jax.random.normal(KEYS[3], (4, 3))
RATE = 0.01
# What is left of their state has another shape than what is left of parameters.
REFUSED = {"galore", "lbfgs", "sm3"}
# They take means over arrays, draw noise, or scale by shapes.
WARNED = {"adafactor", "muon", "noisy_sgd", "prunex_jax muon"}


def of_optax():
    """Names of what optax makes of a learning rate alone."""
    found = {}
    for name, function in [*vars(optax).items(), *vars(optax.contrib).items()]:
        is_public = inspect.isfunction(function) and not name.startswith("_")
        if is_public and not name.startswith("scale_by"):
            takes = inspect.signature(function).parameters.values()
            needed = {each.name for each in takes if each.default is each.empty}
            names = {each.name for each in takes}
            if "learning_rate" in names and needed <= {"learning_rate"}:
                found[name] = function
    return found


OF_OPTAX = of_optax()
NAMES = [
    *OF_OPTAX,
    *(f"prunex_jax {name}" for name in ("sgd", "adamw", "lion", "muon")),
]


def make(name):
    if name not in OF_OPTAX:
        config = OptimizerConfig(name=name.removeprefix("prunex_jax "))
        return make_inner(config, optax.constant_schedule(RATE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        more = {"key": KEYS[0]} if name == "noisy_sgd" else {}
        return OF_OPTAX[name](learning_rate=RATE, **more)


def apply(params, x):
    hidden = jnp.tanh(x @ params["in"])
    hidden = jnp.tanh(hidden @ params["mid"]["kernel"] + params["mid"]["bias"][None])
    return hidden @ params["out"]


@functools.cache
def pruned():
    return prune(apply, TREE, X, sparsity=0.5)


def gradients(params):
    return jax.grad(lambda params: (apply(params, X) ** 2).mean())(params)


def updated(tx, grads, state, params):
    """One update, of those that ask for the loss, too."""

    def loss(params):
        return jnp.float32(optax.tree.sum(jax.tree.map(jnp.sum, params)))

    more = {"value": jnp.ones(()), "obj_fn": loss}
    return optax.with_extra_args_support(tx).update(grads, state, params, **more)


def test_all_of_them_are_found():
    assert len(NAMES) >= 40
    assert {"adamw", "lamb", "muon", "prodigy", "schedule_free_adamw"} <= set(NAMES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_updates_of_the_small_network_are_those_of_the_masked_one_cut(name):
    """Or the state is refused, or it is warned of, with a reason."""
    tx, small = make(name), pruned()
    params = small.cut.mask(TREE)
    state = tx.init(params)
    if name in REFUSED:
        with pytest.raises(UserError, match="not shaped like a parameter"):
            small.optimizer_state(tx, state)
        return
    _, state = updated(tx, gradients(params), state, params)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        moved = small.optimizer_state(tx, state)
    assert (name in WARNED) == any("does not follow" in str(w.message) for w in told)
    less, differ = small.cut.take(params), []
    for _ in range(2):
        grads = small.cut.mask(gradients(params))
        updates, state = updated(tx, grads, state, params)
        found, moved = updated(tx, small.cut.take(grads), moved, less)
        for one, other in zip(
            *map(jax.tree.leaves, (small.cut.take(updates), found)), strict=True
        ):
            scale = max(np.abs(one).max(), 1e-8)
            differ.append(float(np.abs(one - other).max() / scale))
        params = small.cut.mask(optax.apply_updates(params, updates))
        less = small.cut.take(params)
    if name in WARNED:
        assert max(differ) > 1e-2, "it follows, and nothing has to be warned of"
    else:
        assert max(differ) < 1e-4


def test_what_needs_the_loss_cannot_be_tried():
    small = pruned()
    assert follows_masked(optax.contrib.momo(RATE), small.params, small.cut)


@pytest.mark.slow
def test_rates_of_zero_hide_nothing():
    """A warm-up begins with updates of zero, of which nothing can be told."""
    rate, small = optax.linear_schedule(0.0, 1.0, 100), pruned()
    muon = optax.contrib.muon(rate)
    assert not follows_masked(muon, small.params, small.cut)
    assert follows_masked(optax.lamb(rate), small.params, small.cut)
