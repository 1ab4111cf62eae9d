"""ConvNeXt: its published size, forms of convolution, and what can be cut out."""

import jax
import jax.numpy as jnp
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.models import make_model
from prunex_jax.models.convnext import ConvNextSpec, StageSpec, make_convnext
from prunex_jax.models.settings import ModelConfig, VitConfig
from tests.helpers.common import assert_close
from tests.helpers.transformers import count, half_cut, same_gradients, strong

SHAPE = (10, 8, 3)
STAGES = StageSpec(1, 8, 20), StageSpec(1, 12, 24)


def model_of(dtype="float32", **changes):
    spec = ConvNextSpec(2, STAGES, **changes)
    return make_convnext("tiny", spec, dtype, SHAPE, 5)


def images_of(seed):
    return jax.random.normal(jax.random.key(seed), (4, *SHAPE))


@pytest.mark.slow
def test_published_size():
    """Parameters of ConvNeXt-T in torchvision."""
    model = make_model(ModelConfig(name="convnext_t"), (224, 224, 3), 1000)
    assert count(model) == 28_589_128


@pytest.mark.slow
@pytest.mark.parametrize(
    "convolution", ["direct", pytest.param("chunked", marks=pytest.mark.slow)]
)
def test_masked_is_shrunk(convolution):
    """MLPs and the streams of all stages are cut exactly, which train alike."""
    model = model_of(convolution=convolution, drop_path=0.2)
    params, statistics = strong(model)
    trace = trace_channels(model.apply, params, model.example(), statistics=statistics)
    sizes = [group.size for group in trace.groups]
    assert sorted(sizes) == [8, 12, 20, 24]
    assert trace.prunable_share() > 0.99
    cut = half_cut(model, params, statistics)
    same_gradients(cut, images_of(1), key=jax.random.key(3))


@pytest.mark.slow
def test_forms_of_convolution_are_one_function():
    direct, shifted = (model_of(convolution=c) for c in ("direct", "chunked"))
    params, _ = strong(direct)

    def answers_and_grads(model):
        def loss(params):
            answers = model.apply_train(params, {}, images_of(1))[0]
            return jnp.mean(answers**2), answers

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    one, other = answers_and_grads(direct), answers_and_grads(shifted)
    assert_close(one, other, 1e-4)


@pytest.mark.slow
def test_what_blocks_add_starts_small():
    """By layer scale, so that the network starts as stem, halvings and head."""
    model = model_of()
    params, _ = jax.jit(model.init)(jax.random.key(0))
    without = jax.tree.map(lambda x: x, params)
    for stage in without["stages"].values():
        for block in stage["blocks"].values():
            block["layer_scale"] = jnp.zeros_like(block["layer_scale"])
    one, other = (model.apply(p, {}, images_of(1)) for p in (params, without))
    assert 0 < float(jnp.max(jnp.abs(one - other))) < 1e-4


@pytest.mark.slow
def test_bfloat16_rounds_activations_only():
    model, exact = model_of("bfloat16"), model_of()
    params, _ = jax.jit(model.init)(jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    answers, wanted = (m.apply(params, {}, images_of(1)) for m in (model, exact))
    assert answers.dtype == jnp.float32
    error = float(jnp.max(jnp.abs(answers - wanted)))
    assert 0 < error < 0.05 * float(jnp.max(jnp.abs(wanted)))
    assert_close(model.in_float32().apply(params, {}, images_of(1)), wanted)


def test_small_images_get_small_patches():
    for side, patch in ((32, 2), (224, 4)):
        model = make_model(ModelConfig(name="convnext_t"), (side, side, 3), 10)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        kernel = params["stages"]["0"]["before"]["patches"]["kernel"]
        assert kernel.shape == (patch, patch, 3, 96)


@pytest.mark.parametrize(
    ("config", "side", "message"),
    [
        (ModelConfig(name="convnext_t"), 8, "at least 16x16 and these have 8x8"),
        (ModelConfig(name="convnext_t", stem="imagenet"), 16, "at least 32x32"),
        (
            ModelConfig(name="convnext_t", norm_scope="host"),
            32,
            "norm_scope='host' has no effect on convnext_t",
        ),
        (
            ModelConfig(name="convnext_t", vit=VitConfig(patch=8)),
            32,
            "vit.patch=8 has no effect on convnext_t",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, side, message):
    with pytest.raises(UserError, match=message):
        make_model(config, (side, side, 3), 10)
