"""Weights of torchvision, timm and transformers give our networks their answers.

Random weights, because none can be had without a download: a wrong order of axes, of
heads or of parts shows as well with them. Run by `make test-weights`, which installs
these packages.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.settings import GptConfig, ModelConfig
from prunex_jax.models import make_language_model, make_model
from prunex_jax.models.weights import read_tensors
from prunex_jax.train.start import Weights, make_start

pytestmark = pytest.mark.weights

TOLERANCE = 1e-4
CLASSES, SIDE = 10, 64


def torch():
    return pytest.importorskip("torch", reason="`make test-weights` installs it")


def randomized(module):
    """Weights that leave no part of the network without effect."""
    generator = torch().Generator().manual_seed(0)
    for name, value in module.state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch().randn(value.shape, generator=generator)
        if name.endswith("running_var"):
            value.copy_(1 + 0.2 * noise.abs())
        elif value.ndim > 1:
            value.copy_(noise / max(1, value[0].numel()) ** 0.5)
        else:
            value.add_(0.1 * noise)
    return module.eval()


def started(module, model, name, tmp_path):
    """Our network with the weights of a module, by way of a file."""
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    tensors = {key: x.contiguous().clone() for key, x in module.state_dict().items()}
    save_file(tensors, file)
    read = read_tensors(str(file))
    weights = Weights(str(file), "", read.digests, tensors=read)
    start = make_start(weights, model, name)
    drawn = jax.eval_shape(model.init, jax.random.key(0))
    arrays = {"params": drawn[0], "statistics": drawn[1]}
    from prunex_jax.base.trees import map_with_path

    arrays = map_with_path(lambda path, _: start.arrays[path], arrays)
    return lambda inputs: model.apply(arrays["params"], arrays["statistics"], inputs)


def assert_same(ours, theirs, least=0.1):
    theirs = theirs.detach().numpy()
    spread = theirs.std()
    assert spread > least, "answers that hardly differ would hide what is wrong"
    np.testing.assert_allclose(ours / spread, theirs / spread, atol=TOLERANCE)


def images(count=2, side=SIDE):
    drawn = np.random.default_rng(0).normal(size=(count, side, side, 3))
    return drawn.astype(np.float32)


def check_images(module, model, name, tmp_path, side=SIDE):
    given = images(side=side)
    with torch().no_grad():
        theirs = module(torch().from_numpy(given.transpose(0, 3, 1, 2).copy()))
    ours = started(module, model, name, tmp_path)(jnp.asarray(given))
    assert_same(np.asarray(ours), theirs)


def made_by(package, name, **options):
    if package == "torchvision":
        models = pytest.importorskip("torchvision").models
        return randomized(getattr(models, name)(num_classes=CLASSES, **options))
    timm = pytest.importorskip("timm")
    return randomized(timm.create_model(name, num_classes=CLASSES, **options))


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_resnet(package, name, tmp_path):
    model = make_model(
        ModelConfig(name=name, stem="imagenet"), (SIDE, SIDE, 3), CLASSES
    )
    check_images(made_by(package, name), model, name, tmp_path)


@pytest.mark.parametrize("is_tied", [False, True], ids=["head", "tied"])
def test_llama(is_tied, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=is_tied,
    )
    module = randomized(transformers.LlamaForCausalLM(config))
    gpt = GptConfig(2, 24, 4, 2, 6, 40)
    model = make_language_model(ModelConfig(name="gpt", gpt=gpt), 50, 9)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 9)).astype(np.int32)
    with torch().no_grad():
        theirs = module(torch().from_numpy(tokens).long()).logits
    ours = started(module, model, "gpt", tmp_path)(jnp.asarray(tokens))
    assert_same(np.asarray(ours), theirs)
