"""Small networks as programs of ONNX answer as they do, for batches of any size."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax import UserError, prune, read_model
from prunex_jax.export import export_model
from prunex_jax.export.onnx import make_onnx
from prunex_jax.models import make_language_model, make_model
from prunex_jax.models.settings import BertConfig, GptConfig, ModelConfig
from prunex_jax.train.commands.export import main as export_command
from prunex_jax.train.records.restoring import load_trained
from prunex_jax.train.run import train
from tests.helpers.tiny_runs import settings

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax2onnx", "onnxruntime")),
    reason="needs the extra onnx, and jax2onnx",
)
KEY = jax.random.key(0)


def network(name):
    """A function, its trees and inputs; a tiny one of each kind of `models`."""
    if name == "block":
        return _block()
    if name in ("gpt", "gpt2", "bert"):
        return _of_text(name)
    shape = (16, 16, 3)
    model = make_model(ModelConfig(name=name, width=0.5), shape, 10)
    params, statistics = jax.jit(model.init)(KEY)
    x = jax.random.normal(KEY, (4, *shape))
    if jax.tree.leaves(statistics):
        return model.apply, params, statistics, x
    return lambda params, x: model.apply(params, statistics, x), params, None, x


def _of_text(name):
    sizes = {"layers": 1, "width": 16, "heads": 2, "head_width": 8, "hidden": 32}
    config = ModelConfig(
        name=name, gpt=GptConfig(key_heads=2, **sizes), bert=BertConfig(**sizes)
    )
    model = make_language_model(config, 17, 6)
    params, statistics = jax.jit(model.init)(KEY)
    tokens = jnp.arange(24).reshape(4, 6) % 17
    return lambda params, x: model.apply(params, statistics, x), params, None, tokens


def _block():
    """A decoder's block: embedding, causal attention of heads, norm, head."""
    sizes = {"embed": (17, 16), "qkv": (16, 3, 2, 8), "out": (2, 8, 16)}
    sizes |= {"up": (16, 32), "down": (32, 16), "head": (16, 17)}
    keys = jax.random.split(KEY, len(sizes))
    params = {
        name: jax.random.normal(key, shape) / 4
        for (name, shape), key in zip(sizes.items(), keys, strict=True)
    }

    def apply(params, tokens):
        x = params["embed"][tokens]
        q, k, v = jnp.einsum("btd,dchf->cbthf", x, params["qkv"])
        scores = jnp.einsum("bthf,bshf->bhts", q, k)
        scores = jnp.where(np.tril(np.ones((6, 6), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshf->bthf", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bthf,hfd->btd", mixed, params["out"])
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x @ params["head"]

    return apply, params, None, jnp.arange(24).reshape(4, 6) % 17


@needs_onnx
@pytest.mark.pytorch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["resnet20", "vit_ti", "block", "gpt"])
def test_small_networks_run_in_onnx_runtime(tmp_path, name):
    import onnxruntime

    apply, params, statistics, x = network(name)
    small = prune(apply, params, x, statistics=statistics, sparsity=0.5)
    manifest = small.export(tmp_path / "small", format="onnx")
    assert "model.onnx" in manifest["files"]
    session = onnxruntime.InferenceSession(str(tmp_path / "small" / "model.onnx"))
    (given,) = session.get_inputs()
    for batch in (x, x[:1], jnp.concatenate([x, x[:3]])):
        (found,) = session.run(None, {given.name: np.asarray(batch)})
        np.testing.assert_allclose(found, small(batch), rtol=1e-4, atol=1e-5)
    model = read_model(tmp_path / "small")
    np.testing.assert_allclose(model(x), small(x), rtol=1e-4, atol=1e-5)
    small.export(tmp_path / "small", format="onnx", overwrite=True)


@needs_onnx
@pytest.mark.pytorch
@pytest.mark.filterwarnings("ignore")
def test_choices_of_booleans_are_made():
    """ONNX Runtime has no kernel for them."""
    import onnxruntime

    def apply(params, x):
        mask = jnp.tril(jnp.ones((4, 4), bool))
        either = jnp.where(x[:, :1] > 0, mask[2][None] & (x < 1), x > 0)
        return jnp.where(mask, x @ params, -1.0), either.astype(jnp.float32)

    x = jax.random.normal(KEY, (4, 4))
    program = make_onnx(apply, jnp.eye(4), [x], fixed_batch=True)
    session = onnxruntime.InferenceSession(program)
    found = session.run(None, {session.get_inputs()[0].name: np.asarray(x)})
    for one, other in zip(found, apply(jnp.eye(4), x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@needs_onnx
@pytest.mark.pytorch
@pytest.mark.filterwarnings("ignore")
def test_windows_slide_over_images():
    """Over two axes of four, padded and dilated; ONNX Runtime takes three at most."""

    def pool(x, start, combine, **options):
        return jax.lax.reduce_window(
            x, start, combine, (1, 3, 2, 1), (1, 2, 1, 1), "SAME", **options
        )

    def apply(params, x):
        most = pool(x, -jnp.inf, jax.lax.max, window_dilation=(1, 2, 1, 1))
        return jax.jit(pool, static_argnums=(1, 2))(most, 0.0, jax.lax.add) * params

    x = jax.random.normal(KEY, (2, 9, 8, 3))
    program = make_onnx(
        apply, jnp.ones((1, 1, 1, 3)), (x,)
    )  # and a batch of three is compared
    assert b"MaxPool" in program


@needs_onnx
@pytest.mark.pytorch
@pytest.mark.filterwarnings("ignore")
def test_runs_are_exported_by_the_command(tmp_path, capsys):
    import onnxruntime

    train(settings(run={"steps": 4, "checkpoint_every_steps": 4}), tmp_path / "run")
    flags = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    assert export_command([*flags, "--format=onnx"]) == 0, capsys.readouterr().err
    shrunk = load_trained(tmp_path / "run").shrunk
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    (given,) = session.get_inputs()
    for count in (1, 5):
        shape = (count, *given.shape[1:])
        images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        (found,) = session.run(None, {given.name: images})
        np.testing.assert_allclose(found, shrunk.logits(images), rtol=1e-4, atol=1e-5)


@needs_onnx
@pytest.mark.pytorch
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_covered_is_refused():
    def apply(params, x):
        return jax.pure_callback(np.sin, jax.typeof(x), x @ params)

    with pytest.raises(UserError, match="jax2onnx cannot convert the function"):
        make_onnx(apply, jnp.eye(4), [jnp.eye(4)], fixed_batch=True)


def test_formats_are_named(tmp_path):
    given = (tmp_path / "out", lambda params, x: x * params, jnp.ones(()), [jnp.eye(2)])
    with pytest.raises(UserError, match="'tflite' is none of stablehlo, onnx"):
        export_model(*given, certificate=None, format="tflite")
    if importlib.util.find_spec("jax2onnx") is None:
        with pytest.raises(UserError, match="An export to ONNX needs the package"):
            export_model(*given, certificate=None, format="onnx")
