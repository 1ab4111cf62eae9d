"""Tables of names hold every number of a file once, and say what does not fit."""

import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.models import (
    MASKED_TOKEN,
    NEXT_TOKEN,
    make_language_model,
    make_model,
)
from prunex_jax.models.settings import BertConfig, GptConfig, ModelConfig, VitConfig
from prunex_jax.models.weights import LAYOUTS, Tensors, read_tensors, to_ours
from prunex_jax.models.weights.vits import resized_positions

WIDTHS = {"layers": 2, "width": 8, "heads": 4, "head_width": 6, "hidden": 10}
CONFIGS = {
    "gpt": ModelConfig(name="gpt", gpt=GptConfig(**WIDTHS, key_heads=2)),
    "gpt2": ModelConfig(name="gpt2", gpt=GptConfig(**WIDTHS)),
    "bert": ModelConfig(name="bert", bert=BertConfig(**WIDTHS, kinds=2)),
    "vit_ti": ModelConfig(name="vit_ti", vit=VitConfig(patch=8, **WIDTHS)),
}


def config_of(name):
    """A small network of every family that has a table."""
    resnet = ModelConfig(name=name, width=1 / 16, stem="imagenet")
    return CONFIGS.get(name, resnet)


def network(name):
    config = config_of(name)
    if name in (*NEXT_TOKEN, *MASKED_TOKEN):
        return make_language_model(config, 16, 5)
    return make_model(config, (32, 32, 3), 7)


@functools.cache
def leaves_named(name):
    return leaves_of(network(name))


def leaves_of(model):
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    return shapes_by_path(params) | shapes_by_path(statistics)


# Layout -> networks that have it.
FAMILIES = {
    "torchvision or timm ResNet": ("resnet18", "resnet34", "resnet50"),
    "timm ViT": ("vit_ti",),
    "torchvision ViT": ("vit_ti",),
    "timm ConvNeXt": ("convnext_t",),
    "torchvision ConvNeXt": ("convnext_t",),
    "Hugging Face Llama": ("gpt",),
    "Hugging Face GPT-2": ("gpt2",),
    "Hugging Face BERT": ("bert",),
}
CASES = [(layout, name) for layout in LAYOUTS for name in FAMILIES[layout.name]]
IDS = [f"{layout.name.split()[-2]}-{name}" for layout, name in CASES]


def layout_of(name):
    return next(layout for layout, network in CASES if network == name)


def numbered(layout, leaves):
    """A file of the layout in which no number comes twice."""
    tensors, start = {}, 0
    for place in layout.places(leaves):
        size = int(np.prod(place.shape))
        numbers = np.arange(start, start + size, dtype=np.float32)
        tensors[place.name] = numbers.reshape(place.shape)
        start += size
    return tensors


def convert(tensors, leaves, name, config=None):
    read = Tensors(tensors, {}, config or {})
    return to_ours(read, leaves, "file", config_of(name))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("layout", "name"), CASES, ids=IDS)
def test_every_number_of_a_file_has_one_place(layout, name):
    leaves = leaves_named(name)
    tensors = numbered(layout, leaves)
    found = convert(tensors, leaves, name)
    assert found.layout == layout.name and not found.fresh and not found.notes
    assert {path: x.shape for path, x in found.arrays.items()} == leaves
    assert all(x.dtype == np.float32 for x in found.arrays.values())
    numbers = np.concatenate([x.ravel() for x in found.arrays.values()])
    total = sum(x.size for x in tensors.values())
    np.testing.assert_array_equal(np.sort(numbers), np.arange(total))


def test_axes_are_those_of_the_table():
    leaves = leaves_named("resnet50")
    tensors = numbered(layout_of("resnet50"), leaves)
    arrays = convert(tensors, leaves, "resnet50").arrays
    kernel = tensors["layer2.0.conv2.weight"]
    np.testing.assert_array_equal(
        arrays["blocks/3/conv2/kernel"], np.einsum("oihw->hwio", kernel)
    )
    leaves = leaves_named("gpt")
    tensors = numbered(layout_of("gpt"), leaves)
    arrays = convert(tensors, leaves, "gpt").arrays
    there = tensors["layers.1.self_attn.q_proj.weight"]
    heads = arrays["blocks/1/attention/query"]
    np.testing.assert_array_equal(heads[3, 2], there[2 * 6 : 3 * 6, 3])
    there = tensors["layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(
        arrays["blocks/0/attention/out"][1, 4], there[:, 6 + 4]
    )


def test_parts_of_a_tensor_lie_in_their_order():
    width, heads = WIDTHS["width"], WIDTHS["heads"] * WIDTHS["head_width"]
    found = []
    for name in ("gpt2", "vit_ti"):
        leaves = leaves_named(name)
        tensors = numbered(layout_of(name), leaves)
        found.append((tensors, convert(tensors, leaves, name).arrays))
    (gpt2, ours), (vit, ours_of_vit) = found
    for number, part in enumerate(("query", "key", "value")):
        span = slice(number * heads, (number + 1) * heads)
        there = gpt2["h.1.attn.c_attn.weight"][:, span]
        here = ours[f"blocks/1/attention/{part}"].reshape(width, heads)
        np.testing.assert_array_equal(here, there)
        there = vit["blocks.1.attn.qkv.weight"][span]
        here = ours_of_vit[f"blocks/1/attention/{part}/kernel"].reshape(width, heads)
        np.testing.assert_array_equal(here, there.T)
        there = vit["blocks.1.attn.qkv.bias"][span]
        here = ours_of_vit[f"blocks/1/attention/{part}/bias"].ravel()
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize(("layout", "name"), CASES, ids=IDS)
def test_what_does_not_fit_is_named(layout, name):
    leaves = leaves_named(name)
    whole = numbered(layout, leaves)
    last = [key for key in whole if key not in layout.marks][-1]
    if not layout.others_of(last):
        lacking = {key: x for key, x in whole.items() if key != last}
        with pytest.raises(UserError, match=f"'{last}' is missing"):
            convert(lacking, leaves, name)
    with pytest.raises(UserError, match=r"tensor 'blocks.9.what' has no place in it"):
        convert({**whole, "blocks.9.what": np.ones(2)}, leaves, name)
    first = layout.marks[0]
    longer = {**whole, first: np.concatenate([whole[first], whole[first][:1]])}
    with pytest.raises(UserError, match=rf"{first} is \[\d+") as error:
        convert(longer, leaves, name)
    assert "\n" not in str(error.value)


def test_weights_of_another_network_say_so():
    leaves = leaves_named("resnet50")
    there = numbered(layout_of("gpt"), leaves_named("gpt"))
    with pytest.raises(UserError, match=r"is a Hugging Face Llama, and .* has blocks"):
        convert(there, leaves, "resnet50")
    there = numbered(layout_of("resnet18"), leaves_named("resnet18"))
    with pytest.raises(UserError, match=r"does not fit .*conv3.weight' is missing"):
        convert(there, leaves, "resnet50")
    with pytest.raises(UserError, match="names of no known layout, such as 'a'; known"):
        convert({"a": np.ones(1)}, leaves, "resnet50")
    with pytest.raises(UserError, match="names of no known layout; known are"):
        convert({}, leaves, "resnet50")


def test_a_classifier_of_other_classes_starts_fresh():
    leaves = leaves_named("resnet18")
    tensors = numbered(layout_of("resnet18"), leaves)
    more = np.ones((1000, tensors["fc.weight"].shape[1]), np.float32)
    other = {**tensors, "fc.weight": more, "fc.bias": np.ones(1000, np.float32)}
    found = convert(other, leaves, "resnet18")
    assert set(found.fresh) == {"classifier/kernel", "classifier/bias"}
    assert found.arrays.keys() == leaves.keys() - set(found.fresh)
    # Of another width, it is the wrong network.
    other["fc.weight"] = np.ones((1000, 1), np.float32)
    with pytest.raises(UserError, match=r"fc\.weight is "):
        convert(other, leaves, "resnet18")


def test_buffers_prefixes_and_tied_heads():
    leaves = leaves_named("resnet18")
    tensors = numbered(layout_of("resnet18"), leaves)
    plain = convert(tensors, leaves, "resnet18").arrays
    counted = {**tensors, "layer1.0.bn1.num_batches_tracked": np.array(7)}
    same = convert(counted, leaves, "resnet18").arrays
    assert all(np.array_equal(plain[path], same[path]) for path in leaves)
    leaves = leaves_named("gpt")
    tensors = numbered(layout_of("gpt"), leaves)
    plain = convert(tensors, leaves, "gpt").arrays
    head = tensors.pop("lm_head.weight")
    prefixed = {f"model.{name}": x for name, x in tensors.items()}
    same = convert({**prefixed, "lm_head.weight": head}, leaves, "gpt").arrays
    assert all(np.array_equal(plain[path], same[path]) for path in leaves)
    tied = convert(prefixed, leaves, "gpt").arrays
    np.testing.assert_array_equal(tied["head"], tied["embedding"].T)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "gpt",
            {"rope_theta": 5e5},
            "rope_theta=500000.0, .* set config.mod",
        ),
        ("gpt", {"rope_parameters": {"rope_theta": 2.0}}, "rope_parameters.rope_theta"),
        (
            "gpt",
            {"rope_scaling": {"factor": 2}},
            "rope_scaling=.* knows no such net",
        ),
        ("gpt2", {"n_head": 2}, "n_head=2, .* with 4; set config.model.gpt.heads=2"),
        ("gpt2", {"activation_function": "relu"}, "computes with 'gelu_new'"),
        ("bert", {"layer_norm_eps": 1e-5}, "set config.model.bert.norm_epsilon=1e-05"),
    ],
)
def test_a_config_that_computes_something_else_is_refused(name, config, message):
    leaves = leaves_named(name)
    tensors = numbered(layout_of(name), leaves)
    convert(tensors, leaves, name, {"vocab_size": 3, "rope_theta": 10_000.0})
    with pytest.raises(UserError, match=message):
        convert(tensors, leaves, name, config)


def test_tensors_that_need_another_setting_say_which():
    one = dataclasses.replace(CONFIGS["bert"].bert, kinds=0)
    config = dataclasses.replace(CONFIGS["bert"], bert=one)
    leaves = leaves_of(make_language_model(config, 16, 5))
    tensors = numbered(layout_of("bert"), leaves_named("bert"))
    with pytest.raises(UserError, match=r"token_type.*; set config.model.bert.kinds=2"):
        convert(tensors, leaves, "bert")


def test_names_of_the_first_bert_are_known():
    leaves = leaves_named("bert")
    tensors = numbered(layout_of("bert"), leaves)
    plain = convert(tensors, leaves, "bert").arrays

    def old(name):
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        name = name.replace("LayerNorm.bias", "LayerNorm.beta")
        return name if name.startswith("cls") else f"bert.{name}"

    older = {old(name): x for name, x in tensors.items()}
    older |= {"bert.pooler.dense.weight": np.ones(1)}
    older |= {"cls.predictions.decoder.weight": tensors[layout_of("bert").marks[0]]}
    same = convert(older, leaves, "bert").arrays
    assert all(np.array_equal(plain[path], same[path]) for path in leaves)


def test_a_head_that_is_not_tied_is_not_lost():
    leaves = leaves_named("gpt2")
    tensors = numbered(layout_of("gpt2"), leaves)
    tied = {**tensors, "lm_head.weight": tensors["wte.weight"]}
    assert convert(tied, leaves, "gpt2").arrays.keys() == leaves.keys()
    own = {**tensors, "lm_head.weight": tensors["wte.weight"] + 1}
    with pytest.raises(UserError, match=r"lm_head.weight' has no place.*head='own'"):
        convert(own, leaves, "gpt2")


@pytest.mark.parametrize("has_token", [True, False])
def test_positions_are_interpolated(has_token):
    # Along a line they are a straight line, which stays one away from the edges.
    rows, columns = np.mgrid[:8, :8].reshape(2, -1, 1).astype(np.float32)
    grid = np.concatenate([rows, columns], axis=1)
    first = np.full((int(has_token), 2), 99, np.float32)
    positions = np.concatenate([first, grid])[None]
    wanted = (1, 256 + has_token, 2)
    made = resized_positions(positions, wanted)
    assert made.shape == wanted
    np.testing.assert_array_equal(made[0, : len(first)], first)
    inner = made[0, len(first) :].reshape(16, 16, 2)[4:-4, 4:-4]
    expected = (np.mgrid[:16, :16].transpose(1, 2, 0) + 0.5) / 2 - 0.5
    np.testing.assert_allclose(inner, expected[4:-4, 4:-4], atol=1e-5)
    assert resized_positions(positions, (1, 7, 2)) is None
    assert resized_positions(positions, (1, 257, 3)) is None


def test_positions_of_other_images_are_noted():
    leaves = leaves_named("vit_ti")
    tensors = numbered(layout_of("vit_ti"), leaves)
    tensors["pos_embed"] = np.ones((1, 10, 8), np.float32)
    found = convert(tensors, leaves, "vit_ti")
    assert found.notes == ("pos_embed interpolated from [1, 10, 8] to [1, 17, 8]",)
    tensors["pos_embed"] = np.ones((1, 12, 8), np.float32)
    with pytest.raises(UserError, match=r"pos_embed is \[1, 12, 8\] in it and would"):
        convert(tensors, leaves, "vit_ti")


def test_quantised_weights_are_refused():
    leaves = leaves_named("resnet18")
    tensors = numbered(layout_of("resnet18"), leaves)
    tensors["bn1.weight"] = tensors["bn1.weight"].astype(np.int8)
    with pytest.raises(UserError, match=r"bn1.weight is int8, and weights that were"):
        convert(tensors, leaves, "resnet18")


def test_low_precision_is_read_as_float32(tmp_path):
    values = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    save_file({"a": np.asarray(values)}, tmp_path / "x.safetensors")
    read = read_tensors(str(tmp_path / "x.safetensors"))
    assert read.arrays["a"].astype(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(read.digests["x.safetensors"]) == 64


def test_parts_of_a_folder_are_joined(tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, name in enumerate(names):
        save_file({str(number): np.full(2, number)}, tmp_path / name)
    with pytest.raises(UserError, match=r"holds 2 files of weights and no model"):
        read_tensors(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0": names[0], "1": names[1]}}))
    (tmp_path / "config.json").write_text('{"rope_theta": 3}')
    read = read_tensors(str(tmp_path))
    assert {k: x.tolist() for k, x in read.arrays.items()} == {"0": [0, 0], "1": [1, 1]}
    assert read.config == {"rope_theta": 3} and sorted(read.digests) == names
    save_file({"0": np.ones(1)}, tmp_path / names[1])
    with pytest.raises(UserError, match=r"has '0' in .* and in another part"):
        read_tensors(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index.json cannot be read"):
        read_tensors(str(tmp_path))


class Loud:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.pth", r"net.pth is a pickle.*save_file\(torch.load\('net.pth'"),
        ("net.bin", r"'net.safetensors'\)"),
        ("net.ckpt", "is a pickle"),
        ("net.h5", "is a file of Keras"),
        ("net.txt", r"is no .safetensors file, no folder made by"),
        ("net.safetensors", "cannot be read as safetensors"),
    ],
)
def test_nothing_is_unpickled(name, message, tmp_path):
    (tmp_path / name).write_bytes(pickle.dumps(Loud()))
    with pytest.raises(UserError, match=message) as error:
        read_tensors(str(tmp_path / name))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError):
        read_tensors(str(tmp_path))


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        read_tensors(str(tmp_path / "none.safetensors"))
    with pytest.raises(UserError, match="is a folder without weights"):
        read_tensors(str(tmp_path))


def test_numbers_of_eight_bits_are_refused_by_their_type(tmp_path):
    header = {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4)
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"float8_e4m3fn.*convert them to float32"):
        read_tensors(str(tmp_path / "x.safetensors"))
