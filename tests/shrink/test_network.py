"""Shrinking: masked and shrunk networks are the same function, on every model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import map_with_path
from prunex_jax.channels import trace_channels
from prunex_jax.models import (
    BlockSpec,
    Form,
    ResNetSpec,
    VggSpec,
    make_model,
    make_resnet,
    make_vgg,
)
from prunex_jax.models.settings import ModelConfig
from prunex_jax.shrink import Network, make_cut, shrink_error
from tests.helpers.channel_checks import random_masks, relative_error

FORWARD_TOLERANCE = 1e-5
# Gradients through batch norm divide by small variances.
GRADIENT_TOLERANCE = 1e-4
# Every kind of block, stem and head, with widths that are easily confused.
SPECS = {
    "basic": ResNetSpec("cifar", 8, (BlockSpec((6,), 8), BlockSpec((9,), 12, 2, True))),
    "bottleneck": ResNetSpec(
        "imagenet", 8, (BlockSpec((4, 6), 8), BlockSpec((5, 9), 12, 2, True))
    ),
    "vgg": VggSpec(stages=((8,), (6, 9)), hidden=(11,)),
}


def compiled(fn):
    # Compiling is most of the time, and little is computed.
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def random_network(model, seed=0):
    """No biases, means or variances that hide what a dead channel does."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.normal(size=leaf.shape)
        if leaf.ndim > 1:
            value *= np.prod(leaf.shape[:-1]) ** -0.5
        if path.endswith(("var", "scale")):
            value = rng.uniform(0.5, 1.5, leaf.shape)
        return jnp.asarray(value, jnp.float32)

    trees = jax.eval_shape(model.init, jax.random.key(0))
    return Network(model, *(map_with_path(draw, tree) for tree in trees))


def traced(network):
    image = jnp.zeros((1, *network.model.example().shape[1:]))
    return trace_channels(
        network.model.apply, network.params, image, statistics=network.statistics
    )


def cut_of(network, masks, trace=None):
    return make_cut(trace or traced(network), masks, network.params, network.statistics)


def random_cut(network, density, seed, trace=None, num_groups=None):
    trace = trace or traced(network)
    groups = trace.groups[:num_groups]
    return cut_of(
        network, random_masks(groups, density, np.random.default_rng(seed)), trace
    )


def images_of(model, n=4):
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.normal(size=(n, *model.example().shape[1:])), jnp.float32)


def small_network(kind, **settings):
    side = 17 if kind == "bottleneck" else 8
    make = make_vgg if kind == "vgg" else make_resnet
    shape = (side, side, 3)
    return random_network(make(kind, SPECS[kind], Form(**settings), shape, 5))


def results(network, images):
    """Logits; then, in training, the loss, its gradient and new statistics."""

    def loss(params):
        apply = network.model.apply_train
        logits, new = apply(params, network.statistics, images)
        return jnp.mean(jnp.sin(logits)), new

    (value, new), gradient = jax.value_and_grad(loss, has_aux=True)(network.params)
    return network.logits(images), value, gradient, new


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SPECS)
def test_masked_and_shrunk_compute_the_same(kind):
    network = small_network(kind, convolution="chunked")
    trace = traced(network)
    images = images_of(network.model)

    @compiled
    def of_masked(params, statistics):
        return results(Network(network.model, params, statistics), images)

    for density in (0.25, 0.5, 0.75):
        cut = random_cut(network, density, 1, trace)
        masked, shrunk = network.masked(cut), network.shrunk(cut)
        a = of_masked(masked.params, masked.statistics)

        @compiled
        def of_shrunk(params, statistics, gradient, new, model=shrunk.model, cut=cut):
            taken = cut.take(gradient), cut.take_statistics(new)
            return taken, results(Network(model, params, statistics), images)

        taken, b = of_shrunk(shrunk.params, shrunk.statistics, *a[2:])
        names = "logits", "training loss", "training gradient", "new statistics"
        for name, x, y in zip(names, (*a[:2], *taken), b, strict=True):
            allowed = GRADIENT_TOLERANCE if "gradient" in name else FORWARD_TOLERANCE
            assert relative_error(x, y) <= allowed, f"{name} at density {density}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["resnet20", "resnet34", "resnet50", "wide_resnet50_2", "vgg16", "vgg19"]
)
def test_every_model_shrinks_to_the_widths_that_are_left(name):
    side = 32 if name.startswith("vgg") else 8
    model = make_model(ModelConfig(name=name, width=0.125), (side, side, 3), 10)
    trees = jax.eval_shape(model.init, jax.random.key(0))
    network = Network(model, *trees)
    cut = random_cut(network, 0.5, 2)

    def shapes(params, statistics):
        shrunk = Network(model, params, statistics).shrunk(cut)
        specs.append(shrunk.model)
        return shrunk.params, shrunk.statistics

    specs = []
    left = jax.eval_shape(shapes, *trees)
    made = jax.eval_shape(specs[0].init, jax.random.key(0))
    assert jax.tree.map(np.shape, left) == jax.tree.map(np.shape, made)
    assert jax.eval_shape(specs[0].apply, *left, images_of(model)).shape == (4, 10)


def test_which_channels_are_left_makes_no_other_network_of_ours():
    network = small_network("vgg")
    trace = traced(network)
    first, last, fewer = (
        cut_of(network, {g.name: chosen(g.size) for g in trace.groups}, trace)
        for chosen in (
            lambda size: np.arange(size) < size // 2,
            lambda size: np.arange(size) >= size - size // 2,
            lambda size: np.arange(size) < 2,
        )
    )
    model = network.model
    assert model.after(first) == model.after(last) != model.after(fewer)
    assert model.after(cut_of(network, {}, trace)) is model
    cut = last.take(network.params), last.take_statistics(network.statistics)
    images = images_of(model)
    wanted = compiled(model.after(last).apply)(*cut, images)
    found = compiled(model.after(first).apply)(*cut, images)
    assert relative_error(wanted, found) <= FORWARD_TOLERANCE


def narrow_spec(params):
    """Widths of a basic network, from its parameters."""
    blocks = []
    for number, block in enumerate(SPECS["basic"].blocks):
        part = params["blocks"][str(number)]
        inner, out = (part[f"conv{n}"]["kernel"].shape[-1] for n in (1, 2))
        blocks.append(dataclasses.replace(block, inner=(inner,), out=out))
    return ResNetSpec("cifar", blocks[0].out, tuple(blocks))


def test_what_is_left_is_the_network_that_is_made_with_these_widths():
    network = small_network("basic", convolution="chunked")
    shrunk = network.shrunk(random_cut(network, 0.5, 1))
    form = Form(convolution="chunked")
    narrow = make_resnet("narrow", narrow_spec(shrunk.params), form, (8, 8, 3), 5)
    images = images_of(network.model)

    @compiled
    def both(params, statistics):
        models = shrunk.model, narrow
        return [results(Network(m, params, statistics), images) for m in models]

    found, wanted = both(shrunk.params, shrunk.statistics)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "stem"),
    [("resnet20", "cifar"), ("vgg16", "cifar"), ("resnet18", "imagenet")],
)
def test_deep_networks_agree(name, stem):
    config = ModelConfig(name=name, width=0.125, stem=stem)
    network = random_network(make_model(config, (32, 32, 3), 10))
    cut = random_cut(network, 0.5, 3)
    masked, shrunk = network.masked(cut), network.shrunk(cut)
    images = images_of(network.model, 2)
    full = compiled(network.model.apply)
    a = full(masked.params, masked.statistics, images)
    b = compiled(shrunk.model.apply)(shrunk.params, shrunk.statistics, images)
    assert relative_error(a, b) <= FORWARD_TOLERANCE
    dense = full(network.params, network.statistics, images)
    assert relative_error(dense, a) > 0.1, "the masks change nothing"


def test_a_network_that_is_not_masked_is_told_apart():
    network = small_network("basic")
    cut = random_cut(network, 0.5, 4, num_groups=1)
    masked, shrunk = network.masked(cut), network.shrunk(cut)
    images = images_of(network.model)
    assert shrink_error(masked, shrunk, images) < 1e-4
    assert shrink_error(network, shrunk, images) > 1e-2


def test_groups_without_masks_stay_whole():
    network = small_network("basic")
    cut = cut_of(network, {})
    masked, shrunk = network.masked(cut), network.shrunk(cut)
    assert shrunk.model == masked.model == network.model
    images = images_of(network.model)
    assert shrink_error(masked, shrunk, images) == 0


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"nothing": np.ones(8, bool)}, "mask for channel group 'nothing' and no such"),
        ({"stem/conv": np.ones(9, bool)}, r"has shape \(9,\) and should have \(8,\)"),
        ({"stem/conv": np.zeros(8, bool)}, "stem/conv keeps no channel"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, message):
    network = small_network("basic")
    with pytest.raises(UserError, match=message):
        cut_of(network, masks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, s: ({"net": p}, s), r"parameter .* is absent here"),
        (lambda p, s: ({**p, "more": jnp.ones(3)}, s), "parameter more is .* absent"),
        (lambda p, s: (jax.tree.map(lambda x: x[..., :2], p), s), "is .* was"),
        (lambda p, s: (p, {"net": s}), "running statistic .* which is absent here"),
        (lambda p, s: (p, None), "running statistic .* which is absent here"),
    ],
    ids="wrapped extra narrower statistics none".split(),
)
def test_a_cut_is_of_the_network_that_was_traced(change, message):
    network = small_network("basic")
    trace = traced(network)
    with pytest.raises(UserError, match=message):
        make_cut(trace, {}, *change(network.params, network.statistics))


@pytest.mark.parametrize("name", ["take", "take_statistics", "mask", "put"])
def test_trees_of_another_network_are_refused_and_not_passed_through(name):
    cut = random_cut(small_network("basic"), 0.5, 4)
    with pytest.raises(UserError, match=r"nothing in this tree .* holds x"):
        getattr(cut, name)({"x": jnp.ones((8, 8)), "count": jnp.zeros((), int)})
    counters = {"count": jnp.zeros((), int), "alive": jnp.ones(8, bool)}
    assert getattr(cut, name)(counters) == counters, "belongs to nobody, and may"


def test_what_was_taken_is_put_back():
    network = small_network("vgg")
    cut = random_cut(network, 0.5, 6)
    small = network.shrunk(cut)
    masked = cut.mask(network.params)
    jax.tree.map(np.testing.assert_array_equal, cut.put(small.params), masked)
    statistics = cut.put_statistics(small.statistics)
    again = cut.take_statistics(statistics)
    jax.tree.map(np.testing.assert_array_equal, again, small.statistics)
