"""Quantised weights: parameters that are whole numbers are cut as others are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax import prune


@pytest.mark.parametrize("is_repaired", [False, True], ids=["cut", "repaired"])
def test_whole_numbers_are_cut_and_certified(is_repaired):
    def apply(p, x):
        weights = p["quantised"].astype(jnp.float32) * p["scale"][None]
        return jax.nn.relu(x @ weights) @ p["out"]

    params = {
        "quantised": jnp.arange(24, dtype=jnp.int8).reshape(3, 8) - 10,
        "scale": jnp.linspace(0.1, 1.0, 8),
        "out": jnp.cos(jnp.arange(16.0)).reshape(8, 2),
    }
    x = jnp.sin(jnp.arange(48.0)).reshape(16, 3)
    more = {"repair": True, "batches": [(x, np.zeros(16))]} if is_repaired else {}
    small = prune(apply, params, x, sparsity=0.5, **more)
    assert small.params["quantised"].shape == (3, 4)
    assert small.params["quantised"].dtype == jnp.int8
    assert small(x).shape == (16, 2)
