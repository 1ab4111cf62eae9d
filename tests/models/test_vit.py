"""Vision transformers: their published sizes, forms, and what can be cut out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.mesh import vary
from prunex_jax.models import make_model
from prunex_jax.models.settings import ConvNextConfig, GptConfig, ModelConfig, VitConfig
from prunex_jax.models.stream import drop_path, gelu
from tests.helpers.common import assert_close
from tests.helpers.transformers import count, half_cut, same_gradients, strong

SHAPE = (16, 16, 3)
VIT = VitConfig(patch=8, layers=2, width=24, heads=4, head_width=6, hidden=40)
KEY = jax.random.key(5)


def config_of(name="vit_ti", **changes):
    model = {k: changes.pop(k) for k in ("compute_dtype",) if k in changes}
    vit = VitConfig(**{**vars(VIT), **changes})
    return ModelConfig(name=name, vit=vit, **model)


def model_of(**changes):
    return make_model(config_of(**changes), SHAPE, 10)


def images_of(seed, size=4):
    return jax.random.normal(jax.random.key(seed), (size, *SHAPE))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "millions"), [("vit_ti", 5.717), ("vit_s", 22.051), ("vit_b", 86.568)]
)
def test_published_sizes(name, millions):
    """Parameters of these networks in timm and torchvision, at 224x224 and 1,000."""
    model = make_model(ModelConfig(name=name), (224, 224, 3), 1000)
    assert count(model) / 1e6 == pytest.approx(millions, abs=0.001)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("pooling", ["token", "mean"])
def test_masked_is_shrunk(norm, pooling):
    """Heads, their features, MLPs and the stream, all at once, are cut exactly."""
    model = model_of(norm=norm, pooling=pooling, drop_path=0.2)
    params, statistics = strong(model)
    trace = trace_channels(model.apply, params, model.example(), statistics=statistics)
    sizes = {group.name: group.size for group in trace.groups}
    assert trace.prunable_share() > 0.99
    # The stream, and for each layer heads, features of queries and of values, MLP.
    assert sorted(sizes.values()) == sorted([24, *2 * (4, 6, 6, 40)])
    cut = half_cut(model, params, statistics)
    same_gradients(cut, images_of(1), key=KEY)


def test_without_positions_patches_could_be_anywhere():
    """The mean over tokens does not know their order; positions tell it."""
    model = model_of(pooling="mean")
    params, _ = strong(model)
    images = images_of(2)
    swapped = jnp.concatenate([images[:, 8:], images[:, :8]], axis=1)
    one, other = (model.apply(params, {}, x) for x in (images, swapped))
    assert float(jnp.max(jnp.abs(one - other))) > 1e-3
    params = {**params, "positions": jnp.zeros_like(params["positions"])}
    one, other = (model.apply(params, {}, x) for x in (images, swapped))
    assert_close(one, other, 1e-4)


def test_gelu_is_the_exact_one_with_its_slope():
    x = jnp.linspace(-6, 6, 101)
    exact = functools.partial(jax.nn.gelu, approximate=False)
    assert_close(gelu(x), exact(x))
    slopes = [jax.grad(lambda x, f=f: jnp.sum(f(x)))(x) for f in (gelu, exact)]
    assert_close(*slopes)
    assert gelu(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_stochastic_depth_keeps_the_mean():
    """Examples are dropped as a whole, and the rest is scaled up."""
    from flax import nnx

    drop = drop_path(0.25, 3, nnx.Rngs(0))
    x = jnp.ones((4000, 2, 3))
    found = np.asarray(drop(x))
    assert set(np.unique(found).round(4)) == {0.0, np.float32(4 / 3).round(4)}
    assert (found == found[:, :1, :1]).all()
    assert found.mean() == pytest.approx(1.0, abs=0.03)


@pytest.mark.slow
def test_draws_follow_the_key():
    model = model_of(drop_path=0.9)
    params, _ = strong(model)

    def answers(seed):
        key = jax.random.key(seed)
        return model.apply_train(params, {}, images_of(1, 32), key=key)[0]

    assert model.is_random and not model_of().is_random
    assert_close(answers(0), answers(0))
    assert float(jnp.max(jnp.abs(answers(0) - answers(1)))) > 1e-3


@pytest.mark.slow
def test_bfloat16_rounds_activations_only():
    model, exact = model_of(compute_dtype="bfloat16"), model_of()
    params, _ = jax.jit(model.init)(jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    answers, wanted = (m.apply(params, {}, images_of(1)) for m in (model, exact))
    assert answers.dtype == jnp.float32
    error = float(jnp.max(jnp.abs(answers - wanted)))
    assert 0 < error < 0.05 * float(jnp.max(jnp.abs(wanted)))
    assert_close(model.in_float32().apply(params, {}, images_of(1)), wanted)


@pytest.mark.slow
def test_width_multiplies_all_widths():
    model = make_model(ModelConfig(name="vit_s", width=0.5), (32, 32, 3), 10)
    params, _ = jax.eval_shape(model.init, KEY)
    block = params["blocks"]["11"]
    assert block["attention"]["query"]["kernel"].shape == (192, 3, 32)
    assert block["mlp"]["up"]["kernel"].shape == (192, 768)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(name="vit_ti", vit=VitConfig(patch=5)), "vit.patch=5 does not"),
        (ModelConfig(name="vit_ti", stem="cifar"), "model.stem='cifar' has no effect"),
        (ModelConfig(name="vit_s", norm_scope="host"), "norm_scope='host' has no"),
        (ModelConfig(name="vit_b", convolution="direct"), "convolution='direct' has"),
        (ModelConfig(vit=VitConfig(patch=8)), "vit.patch=8 has no effect on resnet20"),
        (
            ModelConfig(name="vit_ti", convnext=ConvNextConfig(0.5)),
            "convnext.drop_path=0.5 has no effect on vit_ti",
        ),
        (
            ModelConfig(name="vit_ti", gpt=GptConfig(heads=8)),
            "gpt.heads=8 has no effect",
        ),
        (
            ModelConfig(name="vit_ti", vit=VitConfig(drop_path=1.0)),
            r"drop_path=1.0 must lie in \[0, 1\)",
        ),
        (ModelConfig(name="vit_xl"), "vit_xl' is not known"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        make_model(config, SHAPE, 10)


@pytest.mark.slow
def test_what_is_left_runs_where_values_vary_over_the_mesh():
    """What dead channels are in a layer norm must vary as the kept ones do."""
    model = model_of()
    masked, cut = half_cut(model, *strong(model))
    small = masked.shrunk(cut)
    mesh = jax.make_mesh((1,), ("host",), axis_types=(jax.sharding.AxisType.Auto,))

    def answers(params, images):
        params = vary(params, ("host",))
        return small.model.apply_train(params, {}, images)[0]

    specs = (jax.P(), jax.P("host"))
    mapped = jax.shard_map(answers, mesh=mesh, in_specs=specs, out_specs=specs[1])
    found = jax.jit(mapped)(small.params, images_of(1))
    assert_close(found, small.logits(images_of(1)), 1e-4)
