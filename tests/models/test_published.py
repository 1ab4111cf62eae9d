"""Weights of torchvision, timm and transformers give our networks their answers.

Random weights, because none can be had without a download: a wrong order of axes, of
heads or of parts shows as well with them. Run by `make test-weights`, which installs
these packages.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import map_with_path
from prunex_jax.models import make_language_model, make_model
from prunex_jax.models.settings import BertConfig, GptConfig, ModelConfig, VitConfig
from prunex_jax.models.weights import read_tensors
from prunex_jax.train.build.start import Weights, make_start, whole_tree

pytestmark = pytest.mark.weights

TOLERANCE = 1e-4
CLASSES, SIDE, VOCABULARY = 10, 64, 50


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


def started(module, model, config, tmp_path):
    """Our network with the weights of a module, by way of a file."""
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    tensors = {key: x.contiguous().clone() for key, x in module.state_dict().items()}
    save_file(tensors, file)
    read = read_tensors(str(file))
    start = make_start(
        Weights(str(file), "", read.digests, tensors=read), model, config
    )
    drawn = jax.eval_shape(model.init, jax.random.key(0))
    filled = map_with_path(lambda path, _: start.arrays[path], whole_tree(*drawn))
    return lambda inputs: model.apply(filled["params"], filled["statistics"], inputs)


def assert_same(ours, theirs, least=0.1):
    theirs = theirs.detach().numpy()
    spread = theirs.std()
    assert spread > least, "answers that hardly differ would hide what is wrong"
    np.testing.assert_allclose(ours / spread, theirs / spread, atol=TOLERANCE)


def images(count=2, side=SIDE):
    drawn = np.random.default_rng(0).normal(size=(count, side, side, 3))
    return drawn.astype(np.float32)


def check_images(module, config, tmp_path, side=SIDE):
    given = images(side=side)
    with torch().no_grad():
        theirs = module(torch().from_numpy(given.transpose(0, 3, 1, 2).copy()))
    model = make_model(config, (side, side, 3), CLASSES)
    assert_same(started(module, model, config, tmp_path)(jnp.asarray(given)), theirs)


def check_tokens(module, config, tmp_path, length=9):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, length))
    with torch().no_grad():
        theirs = module(torch().from_numpy(tokens)).logits
    model = make_language_model(config, VOCABULARY, length)
    ours = started(module, model, config, tmp_path)(jnp.asarray(tokens, jnp.int32))
    assert_same(ours, theirs)


def made_by(package, name, **options):
    if package == "torchvision":
        models = pytest.importorskip("torchvision").models
        return randomized(getattr(models, name)(num_classes=CLASSES, **options))
    timm = pytest.importorskip("timm")
    return randomized(timm.create_model(name, num_classes=CLASSES, **options))


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_resnet(package, name, tmp_path):
    config = ModelConfig(name=name, stem="imagenet")
    check_images(made_by(package, name), config, tmp_path)


def test_vit_of_timm(tmp_path):
    module = made_by("timm", "vit_tiny_patch16_224", img_size=SIDE, depth=2)
    config = ModelConfig(name="vit_ti", vit=VitConfig(layers=2))
    check_images(module, config, tmp_path)


def test_vit_of_timm_for_larger_images(tmp_path):
    """timm interpolates positions when it loads weights for another size."""
    timm = pytest.importorskip("timm")
    options = {"num_classes": CLASSES, "depth": 1}
    small = timm.create_model("vit_tiny_patch16_224", img_size=SIDE, **options)
    large = timm.create_model("vit_tiny_patch16_224", img_size=96, **options)
    randomized(small)
    models = timm.models.vision_transformer
    state = models.checkpoint_filter_fn(small.state_dict(), large)
    large.load_state_dict(state)
    given = images(side=96)
    with torch().no_grad():
        theirs = large.eval()(torch().from_numpy(given.transpose(0, 3, 1, 2).copy()))
    config = ModelConfig(name="vit_ti", vit=VitConfig(layers=1))
    model = make_model(config, (96, 96, 3), CLASSES)
    assert_same(started(small, model, config, tmp_path)(jnp.asarray(given)), theirs)


def test_vit_of_torchvision(tmp_path):
    models = pytest.importorskip("torchvision").models
    module = models.VisionTransformer(SIDE, 16, 2, 4, 24, 40, num_classes=CLASSES)
    vit = VitConfig(layers=2, width=24, heads=4, head_width=6, hidden=40)
    config = ModelConfig(name="vit_ti", vit=vit)
    check_images(randomized(module), config, tmp_path)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_convnext(package, tmp_path):
    module = made_by(package, "convnext_tiny")
    config = ModelConfig(name="convnext_t", stem="imagenet")
    check_images(module, config, tmp_path)


@pytest.mark.parametrize("head", ["own", "tied"])
def test_llama(head, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=head == "tied",
    )
    gpt = GptConfig(
        layers=2,
        width=24,
        heads=4,
        key_heads=2,
        head_width=6,
        hidden=40,
        rotary_base=1000.0,
        norm_epsilon=1e-5,
        head=head,
    )
    module = randomized(transformers.LlamaForCausalLM(theirs))
    check_tokens(module, ModelConfig(name="gpt", gpt=gpt), tmp_path)


def test_gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_inner=40,
        bos_token_id=0,
        eos_token_id=0,
    )
    gpt = GptConfig(layers=2, width=24, heads=4, head_width=6, hidden=40, positions=16)
    module = randomized(transformers.GPT2LMHeadModel(theirs))
    check_tokens(module, ModelConfig(name="gpt2", gpt=gpt), tmp_path)


def test_bert(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=16,
    )
    bert = BertConfig(
        layers=2, width=24, heads=4, head_width=6, hidden=40, positions=16, kinds=2
    )
    module = randomized(transformers.BertForMaskedLM(theirs))
    check_tokens(module, ModelConfig(name="bert", bert=bert), tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"), [("GPT2LMHeadModel", "gpt2"), ("LlamaForCausalLM", "gpt")]
)
def test_folders_of_transformers_fit_their_settings(kind, name, tmp_path):
    """What `save_pretrained` writes, its config.json included."""
    transformers = pytest.importorskip("transformers")
    config_class = getattr(transformers, kind).config_class
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    widths = {"layers": 1, "width": 24, "heads": 4, "head_width": 6, "hidden": 40}
    if name == "gpt2":
        theirs = {"n_positions": 9, "n_embd": 24, "n_layer": 1, "n_head": 4}
        theirs["n_inner"] = 40
    else:
        theirs = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
        theirs |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    module = randomized(getattr(transformers, kind)(config_class(**sizes, **theirs)))
    module.save_pretrained(tmp_path)
    config = ModelConfig(name=name, gpt=GptConfig(**widths, key_heads=4))
    model = make_language_model(config, VOCABULARY, 9)
    read = read_tensors(str(tmp_path))
    weights = Weights("folder", "", read.digests, tensors=read)
    assert make_start(weights, model, config).arrays
    for wrong in ({"heads": 2, "head_width": 12}, {"norm_epsilon": 0.5}):
        gpt = GptConfig(**{**widths, "key_heads": wrong.get("heads", 4), **wrong})
        config = ModelConfig(name=name, gpt=gpt)
        model = make_language_model(config, VOCABULARY, 9)
        with pytest.raises(UserError, match=r"config\.json has"):
            make_start(weights, model, config)
