"""The language model: what a position sees, and what can be cut out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import GptConfig, ModelConfig
from prunex_jax.channels import trace_channels
from prunex_jax.models import make_language_model
from prunex_jax.models.transformer import rotated
from prunex_jax.shrink import Network, make_cut
from prunex_jax.shrink.network import shrink_error
from tests.helpers.common import assert_close

VOCABULARY, LENGTH = 32, 12
GPT = GptConfig(layers=2, width=24, heads=4, key_heads=2, head_width=8, hidden=40)
CONFIG = ModelConfig(name="gpt", gpt=GPT)


@pytest.fixture(scope="module")
def network():
    model = make_language_model(CONFIG, VOCABULARY, LENGTH)
    params, statistics = jax.jit(model.init)(jax.random.key(0))
    # Larger weights, so that all parts have a say.
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    return Network(model, params, statistics)


def tokens_of(seed, batch=3):
    return jax.random.randint(jax.random.key(seed), (batch, LENGTH), 0, VOCABULARY)


def test_positions_see_what_is_before_them(network):
    tokens = tokens_of(0)
    changed = tokens.at[:, 7:].set((tokens[:, 7:] + 1) % VOCABULARY)
    before, after = network.logits(tokens), network.logits(changed)
    assert_close(after[:, :7], before[:, :7])
    assert float(jnp.min(jnp.max(jnp.abs(after - before)[:, 7:], axis=-1))) > 1e-3


def test_attention_knows_distances_only():
    """Products of rotated queries and keys stay when both move along."""
    query, key = (jax.random.normal(jax.random.key(s), (1, 1, 1, 8)) for s in (1, 2))
    turned = [rotated(jnp.tile(x, (1, LENGTH, 1, 1)))[0, :, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    for distance in range(LENGTH):
        diagonal = jnp.diagonal(products, -distance)
        assert_close(diagonal, jnp.full_like(diagonal, diagonal[0]), 1e-4)


def test_shared_key_heads_are_copies(network):
    """Each serves the query heads that follow each other."""
    config = ModelConfig(
        name="gpt",
        gpt=GptConfig(
            layers=2, width=24, heads=4, key_heads=4, head_width=8, hidden=40
        ),
    )
    model = make_language_model(config, VOCABULARY, LENGTH)
    params = jax.tree.map(lambda x: x, network.params)
    for block in params["blocks"].values():
        for name in ("key", "value"):
            block["attention"][name] = jnp.repeat(block["attention"][name], 2, axis=1)
    found = model.apply(params, {}, tokens_of(0))
    assert_close(found, network.logits(tokens_of(0)))


def test_nearly_all_parameters_can_go(network):
    model, params = network.model, network.params
    trace = trace_channels(model.apply, params, model.example(), statistics={})
    assert trace.prunable_share() > 0.99
    masks = {
        group.name: np.random.default_rng(0).permutation(group.size) < group.size * 0.5
        for group in trace.groups
    }
    cut = make_cut(trace, masks, params, {})
    masked = network.masked(cut)
    small = masked.shrunk(cut)
    assert shrink_error(masked, small, tokens_of(0)) < 1e-4

    def grads_of(network):
        def loss(params):
            answers = network.model.apply_train(params, {}, tokens_of(1))[0]
            return jnp.mean(answers**2)

        return jax.grad(loss)(network.params)

    assert_close(grads_of(small), cut.take(grads_of(masked)), 1e-3)


@pytest.mark.parametrize(
    ("gpt", "message"),
    [
        (GptConfig(heads=4, key_heads=3), "key_heads=3 does not divide"),
        (GptConfig(head_width=7), "head_width=7 is odd"),
    ],
)
def test_widths_that_do_not_fit_are_refused(gpt, message):
    with pytest.raises(UserError, match=message):
        make_language_model(ModelConfig(name="gpt", gpt=gpt), VOCABULARY, LENGTH)
