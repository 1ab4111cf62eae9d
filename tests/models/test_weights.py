"""Tables of names hold every number of a file once, and say what does not fit."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import GptConfig, ModelConfig
from prunex_jax.base.trees import shapes_by_path
from prunex_jax.models import make_language_model, make_model
from prunex_jax.models.weights import LAYOUTS, Tensors, read_tensors, to_ours


def network(name):
    """A small network of every family that has a table."""
    if name == "gpt":
        gpt = GptConfig(2, 8, heads=4, key_heads=2, head_width=6, hidden=10)
        return make_language_model(ModelConfig(name="gpt", gpt=gpt), 16, 5)
    config = ModelConfig(name=name, width=1 / 16, stem="imagenet")
    return make_model(config, (32, 32, 3), 7)


def leaves_of(model):
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    return shapes_by_path(params) | shapes_by_path(statistics)


# Layout -> networks that have it.
FAMILIES = {
    "torchvision or timm ResNet": ("resnet18", "resnet34", "resnet50"),
    "Hugging Face Llama": ("gpt",),
}
CASES = [(layout, name) for layout in LAYOUTS for name in FAMILIES[layout.name]]


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
    return to_ours(Tensors(tensors, {}, config or {}), leaves, "file", name)


@pytest.mark.parametrize(("layout", "name"), CASES, ids=[name for _, name in CASES])
def test_every_number_of_a_file_has_one_place(layout, name):
    leaves = leaves_of(network(name))
    tensors = numbered(layout, leaves)
    found = convert(tensors, leaves, name)
    assert found.layout == layout.name and not found.fresh and not found.notes
    assert {path: x.shape for path, x in found.arrays.items()} == leaves
    assert all(x.dtype == np.float32 for x in found.arrays.values())
    numbers = np.concatenate([x.ravel() for x in found.arrays.values()])
    total = sum(x.size for x in tensors.values())
    np.testing.assert_array_equal(np.sort(numbers), np.arange(total))


def test_axes_are_those_of_the_table():
    leaves = leaves_of(network("resnet50"))
    tensors = numbered(layout_of("resnet50"), leaves)
    arrays = convert(tensors, leaves, "resnet50").arrays
    kernel = tensors["layer2.0.conv2.weight"]
    np.testing.assert_array_equal(
        arrays["blocks/3/conv2/kernel"], np.einsum("oihw->hwio", kernel)
    )
    leaves = leaves_of(network("gpt"))
    tensors = numbered(layout_of("gpt"), leaves)
    arrays = convert(tensors, leaves, "gpt").arrays
    there = tensors["layers.1.self_attn.q_proj.weight"]
    heads = arrays["blocks/1/attention/query"]
    np.testing.assert_array_equal(heads[3, 2], there[2 * 6 : 3 * 6, 3])
    there = tensors["layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(
        arrays["blocks/0/attention/out"][1, 4], there[:, 6 + 4]
    )


@pytest.mark.parametrize(("layout", "name"), CASES, ids=[name for _, name in CASES])
def test_what_does_not_fit_is_named(layout, name):
    leaves = leaves_of(network(name))
    whole = numbered(layout, leaves)
    last = [key for key in whole if key not in layout.marks][-1]
    if not layout_row(layout, leaves, last).instead:
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


def layout_row(layout, leaves, name):
    return next(p.row for p in layout.places(leaves) if p.name == name)


def test_weights_of_another_network_say_so():
    leaves = leaves_of(network("resnet50"))
    there = numbered(layout_of("gpt"), leaves_of(network("gpt")))
    with pytest.raises(UserError, match="is a Hugging Face Llama, which has nothing"):
        convert(there, leaves, "resnet50")
    there = numbered(layout_of("resnet18"), leaves_of(network("resnet18")))
    with pytest.raises(UserError, match=r"does not fit .*conv3.weight' is missing"):
        convert(there, leaves, "resnet50")
    with pytest.raises(UserError, match="names of no known layout, such as 'a'; known"):
        convert({"a": np.ones(1)}, leaves, "resnet50")
    with pytest.raises(UserError, match="names of no known layout; known are"):
        convert({}, leaves, "resnet50")


def test_a_classifier_of_other_classes_starts_fresh():
    leaves = leaves_of(network("resnet18"))
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
    leaves = leaves_of(network("resnet18"))
    tensors = numbered(layout_of("resnet18"), leaves)
    plain = convert(tensors, leaves, "resnet18").arrays
    counted = {**tensors, "layer1.0.bn1.num_batches_tracked": np.array(7)}
    same = convert(counted, leaves, "resnet18").arrays
    assert all(np.array_equal(plain[path], same[path]) for path in leaves)
    leaves = leaves_of(network("gpt"))
    tensors = numbered(layout_of("gpt"), leaves)
    plain = convert(tensors, leaves, "gpt").arrays
    head = tensors.pop("lm_head.weight")
    prefixed = {f"model.{name}": x for name, x in tensors.items()}
    same = convert({**prefixed, "lm_head.weight": head}, leaves, "gpt").arrays
    assert all(np.array_equal(plain[path], same[path]) for path in leaves)
    tied = convert(prefixed, leaves, "gpt").arrays
    np.testing.assert_array_equal(tied["head"], tied["embedding"].T)


def test_a_config_that_computes_something_else_is_refused():
    leaves = leaves_of(network("gpt"))
    tensors = numbered(layout_of("gpt"), leaves)
    convert(tensors, leaves, "gpt", {"rope_theta": 10_000.0, "vocab_size": 3})
    with pytest.raises(UserError, match=r"config.json has rope_theta=500000.0"):
        convert(tensors, leaves, "gpt", {"rope_theta": 500_000.0})


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
