"""Networks of other people's: one interface, and what is left of them after a cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.mesh import vary
from prunex_jax.models import check_norm_scope, own_model
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import Network, make_cut, trace_model
from prunex_jax.shrink.network import shrink_error
from tests.helpers import own_networks
from tests.helpers.common import assert_close
from tests.helpers.own_networks import FEATURES, HIDDEN, LinenNet, NnxNet

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
    others = dataclasses.replace(cut, masks={k: ~mask for k, mask in cut.masks.items()})
    assert model.after(others) != model.after(cut), "positions may matter"
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
        (
            (lambda key: {"q": jnp.ones((FEATURES, 2), jnp.int8)}, lambda p, x: x),
            "parameter 'q' of model=<lambda> is int8 and cannot be trained",
        ),
    ],
)
def test_what_is_no_network_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        own_model(given, np.ones((1, FEATURES), np.float32))


def test_boxes_of_a_mesh_of_the_users_are_taken_off():
    class Boxed(linen.Module):
        @linen.compact
        def __call__(self, x):
            start = linen.initializers.lecun_normal()
            boxed = linen.with_partitioning(start, (None, "model"))
            hidden = linen.relu(linen.Dense(4, kernel_init=boxed)(x))
            return linen.Dense(2, kernel_init=boxed)(hidden)

    model = own_model(Boxed(), np.ones((1, FEATURES), np.float32))
    params, statistics = model.init(KEY)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    x = jnp.ones((3, FEATURES))

    def loss(params):
        return model.apply(params, statistics, x).sum()

    grads = jax.grad(loss)(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    trace = trace_channels(lambda p, x: model.apply(p, statistics, x), params, x)
    assert [group.size for group in trace.groups] == [4]


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


class NnxNorms(nnx.Module):
    """Batch norm beside a norm that must stay with an example."""

    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.other = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, 3, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.last(self.other(jnp.tanh(self.second(x))))


class LinenNorms(linen.Module):
    """The same with Linen; its batch norm is made before it, or on the way."""

    norm: linen.BatchNorm | None = None

    @linen.compact
    def __call__(self, x, use_running_average: bool):
        norm = self.norm or linen.BatchNorm()
        x = norm(linen.Dense(HIDDEN)(x), use_running_average=use_running_average)
        x = linen.Dense(HIDDEN)(jax.nn.relu(x))
        return linen.Dense(3)(linen.LayerNorm()(jnp.tanh(x)))


def normed_pair():
    def init(key):
        keys = jax.random.split(key)
        return {
            "in": jax.random.normal(keys[0], (FEATURES, HIDDEN)),
            "out": jax.random.normal(keys[1], (HIDDEN, 3)),
        }

    def apply(params, x, axis_name=None):
        x = x @ params["in"]
        mean = x.mean(0)
        if axis_name is not None:
            mean = jax.lax.pmean(mean, axis_name)
        return jnp.tanh(x - mean[None]) @ params["out"]

    return init, apply


NORMED = {
    "nnx": lambda: NnxNorms,
    "linen": LinenNorms,
    "linen, norm given": lambda: LinenNorms(linen.BatchNorm(momentum=0.8)),
    "pair": normed_pair,
}


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", NORMED)
def test_two_devices_may_share_statistics_of_their_batch(name, is_cut):
    """Statistics and gradients are then those of one device with all examples."""
    model = own_model(NORMED[name](), np.ones((1, FEATURES), np.float32))
    params, statistics = model.init(jax.random.key(0))
    if is_cut:
        trace = trace_model(model)
        masks = {group.name: np.arange(group.size) % 2 == 0 for group in trace.groups}
        cut = make_cut(trace, masks, params, statistics)
        small = Network(model, params, statistics).shrunk(cut)
        model, params, statistics = small.model, small.params, small.statistics
    inputs = jax.random.normal(KEY, (8, FEATURES)) + jnp.arange(8.0)[:, None]

    def loss(params, statistics, inputs, axis_name):
        train = model.apply_train
        answers, new = train(params, statistics, inputs, axis_name, KEY)
        return jnp.sum(jnp.sin(answers)), new

    def step(axis_name, *arrays):
        gradients, new = jax.grad(loss, has_aux=True)(*arrays, axis_name)
        return gradients, jax.tree.map(lambda x: vary(x, ("device",))[None], new)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("device",))

    def found(axis_name):
        program = jax.shard_map(
            functools.partial(step, axis_name),
            mesh=mesh,
            in_specs=(P(), P(), P("device")),
            out_specs=(P(), P("device")),
        )
        return jax.jit(program)(params, statistics, inputs)

    joint = jax.jit(jax.grad(loss, has_aux=True), static_argnums=3)
    gradients, new = joint(params, statistics, inputs, None)
    shared = found("device")
    assert_close(shared[0], gradients, 1e-4)
    for device in range(2):
        assert_close(jax.tree.map(lambda x, d=device: x[d], shared[1]), new, 1e-5)
    with pytest.raises(AssertionError):
        assert_close(found(None)[0], gradients, 1e-4)


@pytest.mark.parametrize("name", ["nnx", "linen", "equinox", "pair"])
def test_a_network_of_which_nothing_spans_a_batch_is_told(name):
    given = {
        "nnx": lambda: own_networks.DigitsNet,
        "linen": lambda: linen.Sequential([linen.Dense(4), linen.LayerNorm()]),
        "equinox": equinox_net,
        "pair": lambda: (own_networks.init, own_networks.apply),
    }[name]()
    features = 64 if name == "nnx" else FEATURES
    model = own_model(given, np.ones((1, features), np.float32))
    with pytest.raises(UserError, match="norm_scope='host' has no effect on it"):
        check_norm_scope(ModelConfig(norm_scope="host"), model, "it")
    check_norm_scope(ModelConfig(), model, "it")


@pytest.mark.parametrize("name", NORMED)
def test_a_network_of_which_something_spans_a_batch_may_span_a_host(name):
    model = own_model(NORMED[name](), np.ones((1, FEATURES), np.float32))
    check_norm_scope(ModelConfig(norm_scope="host"), model, "it")
