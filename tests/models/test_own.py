"""Networks of other people's: one interface, and what is left of them after a cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.models import own_model
from prunex_jax.shrink import Network, make_cut
from prunex_jax.shrink.network import shrink_error
from tests.helpers import own_networks
from tests.helpers.common import assert_close
from tests.helpers.own_networks import FEATURES, LinenNet, NnxNet

KEY = jax.random.key(3)


def equinox_net():
    pytest.importorskip("equinox")
    return own_networks.equinox_net()


GIVEN = {
    "nnx class": lambda: NnxNet,
    "nnx module": lambda: NnxNet(nnx.Rngs(5)),
    "nnx function": lambda: lambda rngs: NnxNet(rngs),
    "linen": LinenNet,
    "equinox": equinox_net,
    "pair": lambda: (own_networks.init, own_networks.apply),
}


@pytest.fixture(scope="module", params=GIVEN)
def cut_network(request):
    """A network with half of its channels dead, the cut, and inputs."""
    model = own_model(GIVEN[request.param](), np.ones((1, FEATURES), np.float32))
    params, statistics = model.init(jax.random.key(0))
    trace = trace_channels(model.apply, params, model.example(), statistics=statistics)
    masks = {group.name: np.arange(group.size) % 2 == 0 for group in trace.groups}
    assert masks, "nothing can be pruned"
    cut = make_cut(trace, masks, params, statistics)
    inputs = jax.random.normal(KEY, (8, FEATURES))
    return Network(model, params, statistics).masked(cut), cut, inputs


def trained(network, inputs, params=None):
    params = network.params if params is None else params
    return network.model.apply_train(params, network.statistics, inputs, key=KEY)


@pytest.mark.sampled(2)
def test_what_is_left_answers_alike(cut_network):
    masked, cut, inputs = cut_network
    small = masked.shrunk(cut)
    assert shrink_error(masked, small, inputs) < 1e-5
    sizes = [sum(x.size for x in jax.tree.leaves(n.params)) for n in (masked, small)]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.sampled(1)
def test_what_is_left_trains_alike(cut_network):
    """Answers, gradients and statistics, with the same numbers drawn."""
    masked, cut, inputs = cut_network
    small = masked.shrunk(cut)
    answers, statistics = trained(masked, inputs)
    found, small_statistics = trained(small, inputs)
    assert_close(found, answers)
    assert_close(small_statistics, cut.take_statistics(statistics))

    def grads_of(network):
        def loss(params):
            return jnp.sum(trained(network, inputs, params)[0] ** 2)

        return jax.grad(loss)(network.params)

    assert_close(grads_of(small), cut.take(grads_of(masked)))


@pytest.mark.sampled(3)
def test_a_second_cut_follows_the_first(cut_network):
    masked, cut, inputs = cut_network
    once = masked.shrunk(cut)
    model, (params, statistics) = once.model, (once.params, once.statistics)
    trace = trace_channels(model.apply, params, model.example(), statistics=statistics)
    masks = {group.name: np.arange(group.size) < 3 for group in trace.groups}
    second = make_cut(trace, masks, params, statistics)
    before, after = once.masked(second), once.masked(second).shrunk(second)
    assert shrink_error(before, after, inputs) < 1e-5
    assert_close(trained(after, inputs)[0], trained(before, inputs)[0])
    assert len(after.model.cuts) == 2


def test_models_are_equal_if_the_same_is_left(cut_network):
    masked, cut, _ = cut_network
    model = masked.model
    assert model.after(cut) == model.after(cut) != model
    assert hash(model.after(cut)) == hash(model.after(cut))


def test_statistics_of_no_batches_are_those_of_one():
    """Whatever share of them a batch replaces."""
    model = own_model(NnxNet, np.ones((1, FEATURES), np.float32))
    params, statistics = model.init(jax.random.key(0))
    inputs = 1 + 2 * jax.random.normal(KEY, (64, FEATURES))
    hidden = inputs @ params["first"]["kernel"] + params["first"]["bias"][None]
    found = model.reestimate(params, statistics, inputs, jnp.int32(0))["norm"]
    assert_close(found["mean"], hidden.mean(0), 1e-5)
    assert_close(found["var"], hidden.var(0), 1e-4)
    again = model.reestimate(params, {"norm": found}, inputs, jnp.int32(1))["norm"]
    assert_close(again["mean"], found["mean"], 1e-5)


def test_training_draws_and_evaluation_does_not():
    model = own_model(NnxNet, np.ones((1, FEATURES), np.float32))
    arrays = model.init(jax.random.key(0))
    inputs = jax.random.normal(KEY, (4, FEATURES))
    first, same, other = (
        model.apply_train(*arrays, inputs, key=jax.random.key(seed))[0]
        for seed in (1, 1, 2)
    )
    assert_close(first, same, 0.0)
    assert float(jnp.max(jnp.abs(first - other))) > 1e-3
    assert_close(model.apply(*arrays, inputs), model.apply(*arrays, inputs), 0.0)
    assert model.is_random
    assert not own_model((own_networks.init, own_networks.apply), inputs[:1]).is_random


class Dropouts(nnx.Module):
    """Two layers that drop half of what they are given."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x * self.scale[...]
        return jnp.stack([self.first(x), self.second(x)], axis=-1)


@pytest.mark.parametrize("streams", [(0,), (0, 1)], ids=["one", "named"])
def test_every_layer_draws_anew_in_every_step(streams):
    rngs = nnx.Rngs(*streams) if len(streams) == 1 else nnx.Rngs(params=0, dropout=1)
    model = own_model(Dropouts(rngs), np.ones((1, 64), np.float32))
    arrays = model.init(jax.random.key(0))
    masks = [
        np.asarray(model.apply_train(*arrays, jnp.ones((1, 64)), key=key)[0] > 0)
        for key in (jax.random.key(1), jax.random.key(2))
    ]
    drawn = {mask[..., layer].tobytes() for mask in masks for layer in (0, 1)}
    assert len(drawn) == 4


def test_a_module_starts_from_what_it_has():
    module = NnxNet(nnx.Rngs(5))
    model = own_model(module, np.ones((1, FEATURES), np.float32))
    for seed in (0, 1):
        params, _ = model.init(jax.random.key(seed))
        kernel = np.asarray(module.first.kernel[...])
        np.testing.assert_array_equal(params["first"]["kernel"], kernel)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "model=3 is no network"),
        (lambda rngs: 4, "is no network: of nnx.Rngs it makes int"),
        (
            (own_networks.init, lambda params, x: x @ params[1]["kernel"]),
            r"cannot be called with a batch of float32\[1, 12\]",
        ),
    ],
)
def test_what_is_no_network_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        own_model(given, np.ones((1, FEATURES), np.float32))


@pytest.mark.parametrize("is_pair", [False, True], ids=["module", "with state"])
def test_state_of_equinox_is_refused(is_pair):
    eqx = pytest.importorskip("equinox")
    module, state = eqx.nn.make_with_state(eqx.nn.Sequential)(
        [
            eqx.nn.Linear(FEATURES, 4, key=KEY),
            eqx.nn.BatchNorm(4, axis_name="batch", mode="batch"),
        ]
    )
    given = (module, state) if is_pair else module
    with pytest.raises(UserError, match="use LayerNorm or GroupNorm") as refused:
        own_model(given, np.ones((1, FEATURES), np.float32))
    assert "\n" not in str(refused.value)
