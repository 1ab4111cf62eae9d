"""What Haiku transforms becomes small, with and without a state."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax import UserError, prune

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(
        importlib.util.find_spec("haiku") is None, reason="needs the extra zoo"
    ),
]
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 8, 8, 3))


def plain(x):
    """Convolutions, a sum of two branches, a head."""
    import haiku as hk

    x = jax.nn.relu(hk.Conv2D(16, 3, stride=2)(x))
    x = x + hk.Conv2D(16, 1)(jax.nn.relu(hk.Conv2D(24, 3)(x)))
    return hk.Linear(5)(x.mean((1, 2)))


def normed(x, is_training=False):
    """The same with batch norm, whose averages are the state."""
    import haiku as hk

    x = hk.Conv2D(16, 3, with_bias=False)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
    return hk.Linear(5)(x.mean((1, 2)))


def test_what_transform_made_becomes_small():
    import haiku as hk

    network = hk.transform(plain)
    params = network.init(KEY, X)
    small = prune(network, params, X, sparsity=0.5)
    before, after = small.num_params
    assert after < 0.4 * before
    assert small.params["conv2_d"]["w"].shape == (3, 3, 3, 8)
    masked = network.apply(small.cut.mask(params), None, X)
    np.testing.assert_allclose(small(X), masked, atol=1e-5)
    # It is a function of any batch.
    np.testing.assert_allclose(small(X[:2]), masked[:2], atol=1e-5)


def test_states_are_cut_along():
    import haiku as hk

    network = hk.transform_with_state(normed)
    params, state = network.init(KEY, X, True)
    # Averages of a network that was trained: not those that it begins with.
    for seed in range(2):
        _, state = network.apply(params, state, None, 2 * X + seed, True)
    small = prune(network, params, X, statistics=state, sparsity=0.5)
    for part in ("mean_ema", "var_ema"):
        averages = small.statistics[f"batch_norm/~/{part}"]["average"]
        assert averages.shape[-1] == 8
        whole = state[f"batch_norm/~/{part}"]["average"]
        kept = small.cut.masks[next(iter(small.cut.masks))]
        np.testing.assert_array_equal(averages, whole[..., kept])
    masked, _ = network.apply(small.cut.mask(params), state, None, X)
    np.testing.assert_allclose(small(X), masked, atol=1e-5)
    assert float(jnp.abs(masked).max()) > 0


def test_a_state_that_is_missing_is_asked_for():
    import haiku as hk

    network = hk.transform_with_state(normed)
    params, _ = network.init(KEY, X, True)
    with pytest.raises(UserError, match="has a state: give it as statistics="):
        prune(network, params, X, sparsity=0.5)
