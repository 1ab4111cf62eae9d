"""Blocks computed again in the backward pass: the same network, less memory."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import flatten_by_path, shapes_by_path
from prunex_jax.comm import Slicing
from prunex_jax.data.settings import DataConfig
from prunex_jax.mesh import vary
from prunex_jax.models import make_language_model, make_model
from prunex_jax.models.settings import ConvNextConfig, ModelConfig, VitConfig
from prunex_jax.tasks import make_task
from tests.helpers.common import assert_close, make_mesh
from tests.helpers.transformers import half_cut, same_gradients, strong
from tests.models.test_gpt import LENGTH, VOCABULARY, config_of, tokens_of

KEY = jax.random.key(2)
VIT = VitConfig(patch=8, layers=3, width=24, heads=4, head_width=6, drop_path=0.3)
# Network -> its settings, and its blocks.
NETWORKS = {
    "gpt": (config_of("gpt", dropout=0.2), 2),
    "gpt2": (config_of("gpt2"), 2),
    "bert": (config_of("bert", dropout=0.2), 2),
    "vit_ti": (ModelConfig(name="vit_ti", vit=VIT), 3),
    "convnext_t": (
        ModelConfig(
            name="convnext_t", width=0.1, convnext=ConvNextConfig(drop_path=0.3)
        ),
        18,
    ),
}


def network_of(name, recompute):
    config = dataclasses.replace(NETWORKS[name][0], recompute=recompute)
    if name in ("vit_ti", "convnext_t"):
        return make_model(config, (16, 16, 3), 10)
    return make_language_model(config, VOCABULARY, LENGTH)


def inputs_of(name):
    if name in ("vit_ti", "convnext_t"):
        return jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    return tokens_of(1, batch=2)


def loss_of(model, inputs):
    def loss(params):
        return jnp.mean(model.apply_train(params, {}, inputs, key=KEY)[0] ** 2)

    return loss


def num_recomputed(fn, *args):
    """Calls of what is computed again, by either name that jax has for it."""
    return len(
        re.findall(r"= (?:checkpoint|remat2?)\[", str(jax.make_jaxpr(fn)(*args)))
    )


def bytes_kept(loss, params):
    """Of arrays that wait for the backward pass, beside the parameters."""
    pull_back = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull_back))
    return kept - sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in NETWORKS if name != "convnext_t"),
        pytest.param("convnext_t", marks=pytest.mark.rotates),
    ],
)
def test_it_is_the_same_network(name):
    """Answers and gradients, also of what it draws, and every block once."""
    kept, again = (network_of(name, how) for how in ("none", "blocks"))
    params, _ = strong(kept)
    losses = [loss_of(model, inputs_of(name)) for model in (kept, again)]
    values, grads = zip(
        *(jax.jit(jax.value_and_grad(loss))(params) for loss in losses), strict=True
    )
    assert_close(values[1], values[0], 1e-6)
    assert_close(grads[1], grads[0], 1e-5)
    assert [num_recomputed(loss, params) for loss in losses] == [0, NETWORKS[name][1]]
    assert bytes_kept(losses[1], params) < 0.5 * bytes_kept(losses[0], params)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt", "vit_ti"])
def test_the_small_network_computes_blocks_again_too(name):
    model = network_of(name, "blocks")
    params, statistics = strong(model)
    masked, cut = half_cut(model, params, statistics)
    small = masked.shrunk(cut)
    loss = loss_of(small.model, inputs_of(name))
    assert num_recomputed(loss, small.params) == NETWORKS[name][1]
    same_gradients((masked, cut), inputs_of(name), key=KEY)


@pytest.mark.slow
def test_parameters_in_slices_are_gathered_again_for_it():
    """Twice at most, and no block keeps whole parameters in between."""
    model = network_of("gpt", "blocks")
    params, _ = strong(model)
    slicing, mesh = Slicing(shapes_by_path(params), 2), make_mesh(1, 2)
    inputs = inputs_of("gpt")

    def own_loss(params):
        return loss_of(model, inputs)(params), ()

    def run(params):
        own = vary(slicing.take(params), ("host", "device"))
        (value, _), grads = slicing.value_and_grad(own_loss)(own)
        return jax.tree.map(lambda x: x[None, None], (value, slicing.join(grads)))

    spread = jax.P("host", "device")
    program = jax.shard_map(run, mesh=mesh, in_specs=(jax.P(),), out_specs=spread)
    value, grads = jax.jit(program)(params)
    wanted = jax.value_and_grad(loss_of(model, inputs))(params)
    np.testing.assert_allclose(value.ravel(), [wanted[0]] * 2, rtol=1e-5)
    found = flatten_by_path(jax.tree.map(lambda x: x[0, 0], grads))
    assert_close(found, flatten_by_path(wanted[1]), 1e-4)


@pytest.mark.parametrize("name", ["resnet20", "vgg16"])
def test_networks_with_batch_statistics_refuse_it(name):
    with pytest.raises(UserError, match="recompute"):
        make_model(ModelConfig(name=name, recompute="blocks"), (32, 32, 3), 10)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_tasks_of_text_heed_it(name, tmp_path):
    (tmp_path / "text.txt").write_text("What is written down can be read again. " * 400)
    data = DataConfig(name="text", dir=str(tmp_path), sequence_length=16, batch_size=4)
    model = ModelConfig(name=name, width=0.25, recompute="blocks")
    task = make_task(data, model, seed=0)
    params, _ = jax.eval_shape(task.model.init, KEY)
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)

    def train(params, tokens):
        return task.model.apply_train(params, {}, tokens)[0]

    assert num_recomputed(train, params, tokens) > 1
