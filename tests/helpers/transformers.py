"""Networks of a stream: random parameters, half a cut, and equal gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.channels import trace_channels
from prunex_jax.shrink import Network, make_cut
from prunex_jax.shrink.network import shrink_error
from tests.helpers.common import assert_close


def count(model):
    """Number of parameters."""
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(params))


def strong(model, seed=0):
    """Parameters of which all have a say, also those that start at zero."""
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), jnp.float32)

    return jax.tree.map(draw, params), statistics


def half_cut(model, params, statistics):
    """(masked network, cut) with half of the channels of every group gone."""
    trace = trace_channels(model.apply, params, model.example(), statistics=statistics)
    rng = np.random.default_rng(0)
    masks = {
        group.name: rng.permutation(group.size) < (group.size + 1) // 2
        for group in trace.groups
    }
    cut = make_cut(trace, masks, params, statistics)
    return Network(model, params, statistics).masked(cut), cut


def same_gradients(masked_and_cut, inputs, key=None):
    """Answers and gradients of what is left are those of the masked network."""
    masked, cut = masked_and_cut
    small = masked.shrunk(cut)
    assert shrink_error(masked, small, inputs) < 1e-4

    def grads_of(network):
        def loss(params):
            train = network.model.apply_train
            return jnp.mean(train(params, {}, inputs, key=key)[0] ** 2)

        return jax.jit(jax.grad(loss))(network.params)

    assert_close(grads_of(small), cut.take(grads_of(masked)), 1e-3)
