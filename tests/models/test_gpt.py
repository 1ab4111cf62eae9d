"""Networks that read text: what a position sees, and what can be cut out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.models import make_language_model
from prunex_jax.models.settings import BertConfig, GptConfig, ModelConfig
from prunex_jax.models.transformer import rotated, shares_of
from prunex_jax.shrink import Network, make_cut
from prunex_jax.shrink.network import certify_networks
from tests.helpers.common import assert_close

VOCABULARY, LENGTH = 32, 12
GPT = GptConfig(layers=2, width=24, heads=4, key_heads=2, head_width=8, hidden=40)
BERT = BertConfig(layers=2, width=24, heads=4, head_width=8, hidden=40, kinds=2)
FORMS = ("gpt", "gpt2", "bert")


def config_of(name, model=None, **changes):
    section = "bert" if name == "bert" else "gpt"
    default = BERT if name == "bert" else GPT
    settings = {section: dataclasses.replace(default, **changes), **(model or {})}
    return ModelConfig(name=name, **settings)


def network_of(name, model=None, **changes):
    """A network whose parts all have a say: weights are large, and biases are drawn."""
    config = config_of(name, model, **changes)
    made = make_language_model(config, VOCABULARY, LENGTH)
    params, statistics = jax.jit(made.init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(
        lambda x: 5 * x + 0.1 * jax.random.normal(next(keys), x.shape), params
    )
    return Network(made, params, statistics)


@pytest.fixture(scope="module")
def networks():
    return {name: network_of(name) for name in FORMS}


def tokens_of(seed, batch=3):
    return jax.random.randint(jax.random.key(seed), (batch, LENGTH), 0, VOCABULARY)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FORMS)
def test_positions_see_what_is_before_them_or_all(networks, name):
    network, tokens = networks[name], tokens_of(0)
    changed = tokens.at[:, 7:].set((tokens[:, 7:] + 1) % VOCABULARY)
    moves = jnp.abs(network.logits(changed) - network.logits(tokens)).max(axis=(0, 2))
    assert float(moves[7:].min()) > 1e-3
    if name == "bert":
        assert float(moves[:7].min()) > 1e-3
    else:
        assert float(moves[:7].max()) < 1e-4


@pytest.mark.parametrize("name", FORMS)
def test_the_order_of_tokens_counts(networks, name):
    """Rotary and learned positions alike."""
    tokens = tokens_of(2).at[:, -1].set(5)
    swapped = tokens.at[:, 0].set(tokens[:, 1]).at[:, 1].set(tokens[:, 0])
    last = [networks[name].logits(each)[:, -1] for each in (tokens, swapped)]
    assert float(jnp.max(jnp.abs(last[0] - last[1]))) > 1e-3


def test_attention_knows_distances_only():
    """Products of rotated queries and keys stay when both move along."""
    query, key = (jax.random.normal(jax.random.key(s), (1, 1, 1, 8)) for s in (1, 2))
    turned = [rotated(jnp.tile(x, (1, LENGTH, 1, 1)))[0, :, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    for distance in range(LENGTH):
        diagonal = jnp.diagonal(products, -distance)
        assert_close(diagonal, jnp.full_like(diagonal, diagonal[0]), 1e-4)


def test_the_base_of_angles_is_that_of_llama():
    x = jnp.ones((1, 4, 1, 6))
    angles = 3 / 500.0 ** (np.arange(0, 6, 2) / 6)
    wanted = [*(np.cos(angles) - np.sin(angles)), *(np.cos(angles) + np.sin(angles))]
    assert_close(rotated(x, base=500.0)[0, 3, 0], jnp.asarray(wanted, jnp.float32))


def test_shares_and_their_slopes_are_those_of_softmax():
    scores = jax.random.normal(jax.random.key(0), (3, 5)).at[0, 1:].set(-1e30)
    weights = jnp.arange(15.0).reshape(3, 5)
    found, wanted = (
        jax.value_and_grad(lambda x, f=f: jnp.sum(f(x) * weights))(scores)
        for f in (shares_of, jax.nn.softmax)
    )
    assert_close(found, wanted)


def test_shared_key_heads_are_copies(networks):
    """Each serves the query heads that follow each other."""
    network = networks["gpt"]
    config = config_of("gpt", key_heads=4)
    model = make_language_model(config, VOCABULARY, LENGTH)
    params = jax.tree.map(lambda x: x, network.params)
    for block in params["blocks"].values():
        for name in ("key", "value"):
            block["attention"][name] = jnp.repeat(block["attention"][name], 2, axis=1)
    found = model.apply(params, {}, tokens_of(0))
    assert_close(found, network.logits(tokens_of(0)), 1e-4)


def half_of(network):
    """The network with half of the channels of every group, masked and cut."""
    model, params = network.model, network.params
    trace = trace_channels(model.apply, params, model.example(), statistics={})
    masks = {
        group.name: np.random.default_rng(0).permutation(group.size) < group.size * 0.5
        for group in trace.groups
    }
    cut = make_cut(trace, masks, params, {})
    masked = network.masked(cut)
    return trace, cut, masked, masked.shrunk(cut)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dtype", "dropout"),
    [
        *((name, "float32", 0.0) for name in FORMS),
        *(
            pytest.param(name, "bfloat16", 0.1, marks=pytest.mark.slow)
            for name in FORMS
        ),
    ],
)
def test_heads_features_units_and_the_stream_are_cut_out(name, dtype, dropout):
    network = network_of(name, {"compute_dtype": dtype}, dropout=dropout)
    trace, cut, masked, small = half_of(network)
    assert trace.prunable_share() > 0.95
    axes = {(m.path, m.axis) for group in trace.groups for m in group.members}
    for axis in range(3):
        assert ("blocks/1/attention/query", axis) in axes
    assert {("blocks/0/unit/down", 0), ("embedding", 1)} <= axes
    found = certify_networks(masked, small, cut, tokens_of(0))
    assert found.forward_error < 1e-4 and found.gradient_error < 1e-3
    if not dropout:
        # Answers may be equal to the bit; gradients are not, of networks that differ.
        assert found.gradient_error > 0, "the networks are too simple to tell"
        # What is cut off matters.
        apart = jnp.abs(masked.logits(tokens_of(0)) - network.logits(tokens_of(0)))
        assert float(apart.max()) > 0.1
        return
    # The same draws for what is left.
    answers = [
        each.model.apply_train(each.params, {}, tokens_of(0), key=jax.random.key(3))[0]
        for each in (masked, small)
    ]
    size = float(jnp.max(jnp.abs(answers[0])))
    assert float(jnp.max(jnp.abs(answers[0] - answers[1]))) < 0.05 * size


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_is_of_activations_only(networks, name):
    exact = networks[name]
    model = network_of(name, {"compute_dtype": "bfloat16"}).model
    tokens = tokens_of(0)
    logits = model.apply(exact.params, {}, tokens)
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(exact.params)} == {jnp.dtype("float32")}
    wanted = exact.logits(tokens)
    distance = float(jnp.linalg.norm(logits - wanted) / jnp.linalg.norm(wanted))
    assert 1e-4 < distance < 0.1
    assert_close(model.in_float32().apply(exact.params, {}, tokens), wanted, 0)


@pytest.mark.slow
def test_dropout_follows_the_key():
    network = network_of("gpt2", dropout=0.5)
    assert network.model.is_random and not network_of("gpt2").model.is_random

    def answers(seed):
        key = jax.random.key(seed)
        return network.model.apply_train(network.params, {}, tokens_of(0), key=key)[0]

    assert_close(answers(0), answers(0), 0)
    assert float(jnp.max(jnp.abs(answers(0) - answers(1)))) > 0.1


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("gpt", {"head"}),
        ("gpt2", {"positions"}),
        ("bert", {"positions", "kinds", "transform", "head_bias"}),
    ],
)
def test_every_form_has_its_parameters(networks, name, has):
    parts = {"positions", "kinds", "transform", "head_bias", "head"}
    assert parts & set(networks[name].params) == has
    block = networks[name].params["blocks"]["0"]
    assert ("query_bias" in block["attention"]) == (name != "gpt")
    assert ("gate" in block["unit"]) == (name == "gpt")
    assert ("bias" in block["unit_norm"]) == (name != "gpt")


@pytest.mark.slow
def test_a_head_is_tied_or_not_as_asked():
    tied, own = (network_of("gpt", head=head).params for head in ("tied", "own"))
    assert set(own) - set(tied) == {"head"}


def test_widths_follow_the_form():
    shapes = {}
    for name in FORMS:
        model = make_language_model(ModelConfig(name=name), VOCABULARY, LENGTH)
        shapes[name] = jax.eval_shape(model.init, jax.random.key(0))[0]
    hidden = {k: s["blocks"]["0"]["unit"]["up"].shape for k, s in shapes.items()}
    assert hidden == {"gpt": (128, 352), "gpt2": (128, 512), "bert": (128, 512)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt", {"key_heads": 3}, "key_heads=3 does not divide"),
        ("gpt", {"head_width": 7}, "head_width=7 is odd"),
        ("gpt", {"positions": 64}, "positions=64 has no effect on model gpt"),
        ("gpt2", {"rotary_base": 5.0}, "rotary_base=5.0 has no effect on model gpt2"),
        ("gpt2", {"positions": 4}, "gpt.positions=4 are fewer than the 12"),
        ("bert", {"positions": 4}, "bert.positions=4 are fewer than the 12"),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, message):
    with pytest.raises(UserError, match=message):
        make_language_model(config_of(name, **changes), VOCABULARY, LENGTH)
