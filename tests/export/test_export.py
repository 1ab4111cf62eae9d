"""An exported folder runs without this package, and says what it is."""

import json
import os
import pickle
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import digests_of
from prunex_jax.channels import TraceOptions, trace_channels
from prunex_jax.export import export_model, read_model
from prunex_jax.shrink import Certificate, Cut, certify, make_cut
from prunex_jax.shrink.part import Part
from tests.helpers.channel_checks import draw

ROOT = Path(__file__).parents[2]
EQUAL = Certificate(1e-7, 1e-6, 1e-6, num_values=8)
FILES = {"manifest.json", "model.safetensors", "program.stablehlo"}
Pair = namedtuple("Pair", "first second")

# What a reader needs, and all that it imports.
READER = """
import json, sys
import jax, numpy as np
from jax import export
from safetensors.numpy import load_file

folder, given, wanted = sys.argv[1:]
manifest = json.load(open(folder + "/manifest.json"))
arrays = load_file(folder + "/model.safetensors")
content = open(folder + "/program.stablehlo", "rb").read()
program = export.deserialize(bytearray(content))
for batch in (3, 5):
    images = np.load(given)[:batch]
    logits = program.call(arrays, images)
    np.testing.assert_allclose(logits, np.load(wanted)[:batch], rtol=1e-5, atol=1e-5)
assert manifest["program"]["inputs"] == ["float32[batch,6,6,3]"]
foreign = [name for name in sys.modules if name.split(".")[0] in ("prunex_jax", "flax")]
assert not foreign, foreign
print("read")
"""


def convnet(params, images):
    """Convolution, running batch norm, both poolings, flattening, dense."""
    x = jax.lax.conv_general_dilated(
        images,
        params["conv"]["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    mean, var = params["norm"]["mean"], params["norm"]["var"]
    x = (x - mean[None, None, None]) / jnp.sqrt(var + 1e-5)[None, None, None]
    x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    x = jax.nn.relu(x).reshape(x.shape[0], -1)
    return x @ params["dense"]


def convnet_params():
    return draw(
        {
            "conv": {"kernel": (3, 3, 3, 4)},
            "norm": {"mean": (4,), "var": (4,)},
            "dense": (36, 5),
        }
    )


def images(n=8):
    return np.random.default_rng(4).normal(size=(n, 6, 6, 3)).astype(np.float32)


def write(folder, **changes):
    given = {"apply": convnet, "params": convnet_params(), "inputs": [images(2)]}
    given |= {"certificate": None, **changes}
    return export_model(folder, **given)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_runs_without_this_package(tmp_path):
    write(tmp_path / "model")
    np.save(tmp_path / "given.npy", images())
    np.save(tmp_path / "wanted.npy", convnet(convnet_params(), images()))
    (tmp_path / "reader.py").write_text(READER)
    command = [sys.executable, "-W", "error", "reader.py", "model"]
    done = subprocess.run(
        [*command, "given.npy", "wanted.npy"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "read\n", done.stderr[-2000:]


def test_is_read_back_for_any_number_of_examples(tmp_path):
    manifest = write(tmp_path / "new" / "model")
    assert names_in(tmp_path / "new" / "model") == FILES
    assert names_in(tmp_path / "new") == {"model"}, "nothing else is left"
    model = read_model(tmp_path / "new" / "model")
    assert model.manifest == json.loads(json.dumps(manifest))
    assert manifest["program"]["platforms"] == ["cpu", "cuda", "tpu"]
    assert manifest["arrays"]["conv/kernel"] == "float32[3,3,3,4]"
    for n in (1, 7):
        expected = jax.jit(convnet)(convnet_params(), images(n))
        np.testing.assert_allclose(model(images(n)), expected, rtol=1e-5, atol=1e-5)


def test_trees_of_all_kinds_cross_as_flat_dicts(tmp_path):
    def apply(params, given, scale):
        (table, weights), shift = params["layers"], params["shift"]
        rows = table[given["ids"]] + given["x"]["dense"] @ weights.first
        half = (rows * scale).astype(jnp.bfloat16)
        return Pair({"rows": rows + shift, "half": half}, [given["ids"] + 1])

    rng = np.random.default_rng(0)
    weights = np.asfortranarray(rng.normal(size=(3, 4)), np.float32)
    params = {
        "layers": [
            jnp.asarray(rng.normal(size=(9, 4)), jnp.bfloat16),
            Pair(weights, np.zeros((0, 4), np.float32)),
        ],
        "shift": np.float32(0.5),
    }
    given = {"ids": np.arange(6), "x": {"dense": np.ones((6, 3), np.float32)}}
    manifest = write(
        tmp_path / "m", apply=apply, params=params, inputs=[given, np.float32(2)]
    )
    assert manifest["program"]["inputs"] == [
        {"ids": "int32[batch]", "x/dense": "float32[batch,3]"},
        "float32[]",
    ]
    assert manifest["program"]["outputs"] == {
        "first/half": "bfloat16[batch,4]",
        "first/rows": "float32[batch,4]",
        "second/0": "int32[batch]",
    }
    model = read_model(tmp_path / "m")
    np.testing.assert_array_equal(model.arrays["layers/1/first"], weights)
    assert model.arrays["layers/0"].dtype == jnp.bfloat16
    assert model.arrays["shift"].shape == ()
    assert model.arrays["layers/1/second"].shape == (0, 4)
    (rows, half), (ids,) = (
        (apply(params, given, 2.0).first[key] for key in ("rows", "half")),
        apply(params, given, 2.0).second,
    )
    outputs = model(given, np.float32(2))
    np.testing.assert_allclose(outputs["first/rows"], rows, rtol=1e-5)
    np.testing.assert_array_equal(outputs["first/half"], half)
    np.testing.assert_array_equal(outputs["second/0"], ids)


def test_other_axes_may_be_symbolic(tmp_path):
    shape = export.symbolic_shape("n, length")
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)

    def apply(params, tokens):
        return params["table"][tokens].mean(axis=1)

    params = draw({"table": (9, 4)})
    manifest = write(tmp_path / "m", apply=apply, params=params, inputs=[tokens])
    assert manifest["program"]["inputs"] == ["int32[n,length]"]
    model = read_model(tmp_path / "m")
    for shape in ((2, 3), (4, 1)):
        assert model(np.zeros(shape, np.int32)).shape == (shape[0], 4)


def test_contains_no_pickle_and_no_folder_of_this_machine(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something is pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    before = jax.config.jax_hlo_source_file_canonicalization_regex
    write(tmp_path / "m")
    read_model(tmp_path / "m")
    monkeypatch.undo()
    assert jax.config.jax_hlo_source_file_canonicalization_regex == before
    for path in (tmp_path / "m").iterdir():
        content = path.read_bytes()
        assert str(ROOT).encode() not in content, path
        with pytest.raises(Exception, match=r"invalid load key|unpickling|could not"):
            pickle.loads(content)


def cut_of(**masks):
    """A cut of which only the masks matter."""
    masks = {name: np.array(mask) for name, mask in masks.items()}
    return Cut((), masks, Part("parameter", {}, {}, masks), None, TraceOptions())


def test_says_which_channels_are_kept(tmp_path):
    cut = cut_of(a=[True, False, False, True], b=[True, True])
    about = {"task": {"classes": ["cat", "dog"]}}
    manifest = write(tmp_path / "m", certificate=EQUAL, cut=cut, about=about)
    assert manifest["channels"] == [
        {"name": "a", "size": 4, "kept": [0, 3]},
        {"name": "b", "size": 2, "kept": [0, 1]},
    ]
    assert manifest["certificate"]["forward_error"] == 1e-7
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["task"] == about["task"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"certificate": Certificate(1e-3, None, 0.1, 8)}, "above the allowed 1e-05"),
        ({"certificate": Certificate(1e-7, 1e-3, 0.1, 8)}, "above the allowed 0.0001"),
        ({"cut": cut_of(a=[True, False])}, "there is no certificate"),
        ({"about": {"files": {}}}, r"about\['files'\] would replace"),
        ({"about": {"x": float("nan")}}, r"about\['x'\] cannot be written as JSON"),
        ({"params": {"a": {"b": 1.0}, "a/b": 2.0}}, "have 1 different paths"),
        ({"params": {"key": jax.random.key(0)}}, "'key' is key<fry>"),
        ({"params": {"w": jnp.ones(2, jnp.float8_e4m3fn)}}, "'w' is float8_e4m3fn"),
        ({"inputs": [images(2), images(3)]}, "first axes of 2 and 3"),
        ({"apply": lambda params, x: x @ params["absent"]}, "KeyError: 'absent'"),
    ],
)
def test_refuses_and_leaves_nothing_behind(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write(tmp_path / "model", **changes)
    assert not names_in(tmp_path)


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: x.reshape(2, 108),  # noticed when it is compiled for another batch
        lambda x: x.reshape(x.shape[0], 108) + jnp.zeros((2, 108)),
    ],
)
def test_a_program_of_one_batch_size_is_exported_as_such_only_if_asked(tmp_path, kept):
    def apply(params, x):
        return kept(x) @ jnp.ones((108, 1)) * params["scale"]

    fixed = {"apply": apply, "params": {"scale": np.float32(1)}}
    shape = jax.ShapeDtypeStruct((2, 6, 6, 3), jnp.float32)
    for inputs in ([images(2)], [shape]):
        with pytest.raises(UserError, match="a fixed one: give fixed_batch=True"):
            write(tmp_path / "m", **fixed, inputs=inputs)
    assert not names_in(tmp_path)
    manifest = write(tmp_path / "m", fixed_batch=True, **fixed)
    assert manifest["program"]["inputs"] == ["float32[2,6,6,3]"]
    assert read_model(tmp_path / "m")(images(2)).shape == (2, 1)


def looks_at_every_size(params, x):
    """As the functions of `shrink` do, which a symbolic size does not allow."""
    assert all(np.zeros(size).size == size for size in x.shape)
    return convnet(params, x)


def test_a_function_that_needs_sizes_is_mapped_over_examples(tmp_path):
    manifest = write(tmp_path / "m", apply=looks_at_every_size)
    assert manifest["program"]["is_mapped_over_examples"]
    assert manifest["program"]["inputs"] == ["float32[batch,6,6,3]"]
    model = read_model(tmp_path / "m")
    for n in (1, 5):
        expected = jax.jit(convnet)(convnet_params(), images(n))
        np.testing.assert_allclose(model(images(n)), expected, rtol=1e-5, atol=1e-5)
    assert not write(tmp_path / "n")["program"]["is_mapped_over_examples"]


@pytest.mark.parametrize(
    "apply",
    [
        lambda params, x: looks_at_every_size(params, x - x.mean(0, keepdims=True)),
        lambda params, x: looks_at_every_size(params, x).sum(0),
        lambda params, x: looks_at_every_size(params, x).T,
    ],
    ids=["examples influence each other", "no batch in front", "batch elsewhere"],
)
def test_a_function_that_is_another_for_single_examples_is_not_mapped(apply, tmp_path):
    with pytest.raises(UserError, match="a fixed one: give fixed_batch=True"):
        write(tmp_path / "m", apply=apply)
    manifest = write(tmp_path / "m", apply=apply, fixed_batch=True)
    assert not manifest["program"]["is_mapped_over_examples"]


@pytest.mark.slow
def test_a_shrunk_function_is_exported_for_any_batch(tmp_path):
    params, given = convnet_params(), jnp.asarray(images(3))
    trace = trace_channels(convnet, params, given)
    (group,) = trace.groups
    masks = {group.name: np.arange(group.size) % 2 == 0}
    cut = make_cut(trace, masks, params)
    masked, small = cut.mask(params), cut.function(convnet)
    certificate = certify(convnet, small, masked, cut.take(params), [given], cut.take)
    manifest = write(
        tmp_path / "m",
        apply=small,
        params=cut.take(params),
        inputs=[given],
        certificate=certificate,
        cut=cut,
    )
    assert manifest["program"]["inputs"] == ["float32[batch,6,6,3]"]
    assert manifest["arrays"]["conv/kernel"] == "float32[3,3,3,2]"
    expected = jax.jit(convnet)(masked, images(7))
    actual = read_model(tmp_path / "m")(images(7))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_platforms_that_cannot_run_an_operation_are_left_out(tmp_path):
    def apply(params, x):
        return jnp.abs(jnp.linalg.eigvals(x[:, :, :, 0])) * params["scale"]

    manifest = write(
        tmp_path / "m", apply=apply, params={"scale": np.float32(1)}, overwrite=True
    )
    assert "cpu" in manifest["program"]["platforms"]
    assert "tpu" not in manifest["program"]["platforms"]


def test_a_program_for_another_device_says_so(tmp_path):
    manifest = write(tmp_path / "m", platforms=["cuda"])
    assert manifest["program"]["platforms"] == ["cuda"]
    with pytest.raises(UserError, match=r"was made for cuda .* set JAX_PLATFORMS=cuda"):
        read_model(tmp_path / "m")


def test_a_function_that_changes_between_traces_is_refused(tmp_path):
    traced = []

    def apply(params, x):
        traced.append(x)
        return x @ params["w"] * len(traced)

    with pytest.raises(UserError, match="the written program and the function differ"):
        write(tmp_path / "m", apply=apply, params={"w": np.ones((3, 2), np.float32)})
    assert not names_in(tmp_path)


def test_replaces_an_export_only_if_asked_and_nothing_else_ever(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    write(folder)
    with pytest.raises(UserError, match="holds an export already"):
        write(folder)
    write(folder, overwrite=True, about={"second": True})
    assert read_model(folder).manifest["second"]
    (folder / "thesis.txt").write_text("")
    with pytest.raises(UserError, match=r"holds thesis\.txt"):
        write(folder, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        write(folder / "thesis.txt", overwrite=True)
    with pytest.raises(UserError, match="cannot write"):
        write("/proc/nowhere/model")
    assert names_in(tmp_path) == {"m"}


@pytest.mark.parametrize("when", ["export.folder.save_tensors", "base.files._flush"])
def test_a_failed_export_leaves_the_earlier_one_whole(tmp_path, monkeypatch, when):
    def full(*args):
        raise OSError("No space left on device")

    write(tmp_path / "m", about={"number": 1})
    monkeypatch.setattr(f"prunex_jax.{when}", full)
    with pytest.raises(UserError, match="No space left on device"):
        write(tmp_path / "m", about={"number": 2}, overwrite=True)
    assert read_model(tmp_path / "m").manifest["number"] == 1
    assert names_in(tmp_path) == {"m"}


def test_a_rename_that_fails_leaves_the_earlier_export_whole(tmp_path, monkeypatch):
    rename = Path.rename

    def fail_once(self, target):
        if self.suffix == ".tmp":
            raise OSError("no")
        return rename(self, target)

    write(tmp_path / "m", about={"number": 1})
    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "m", about={"number": 2}, overwrite=True)
    assert read_model(tmp_path / "m").manifest["number"] == 1
    assert names_in(tmp_path) == {"m"}


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: flip_a_bit(m / "model.safetensors"), "model.safetensors is not as"),
        (lambda m: flip_a_bit(m / "program.stablehlo"), "program.stablehlo is not as"),
        (lambda m: (m / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda m: (m / "manifest.json").unlink(), "is no exported model"),
        (lambda m: (m / "manifest.json").write_text("{"), "is no exported model"),
        (lambda m: (m / "manifest.json").write_text("[]"), "is no exported model"),
        (lambda m: change_manifest(m, format=2), "has format 2 and this version reads"),
        (lambda m: change_manifest(m, files={}), "model.safetensors is not as"),
    ],
)
def test_damage_is_noticed_before_anything_is_used(tmp_path, damage, message):
    write(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "m")


@pytest.mark.parametrize("when", ["the file is read", "the program in it is read"])
def test_a_program_that_jax_cannot_read_is_explained(when, tmp_path):
    write(tmp_path / "m")
    program = tmp_path / "m" / "program.stablehlo"
    content = program.read_bytes()
    damaged = b"\0" * 64
    if when == "the program in it is read":
        # The mark of StableHLO's own format, further inside.
        damaged = content.replace(b"ML\xefR", b"XX\xefR")
    assert damaged != content
    program.write_bytes(damaged)
    versions = {"jax": "9.9.9"}
    change_manifest(tmp_path / "m", files=digests_of(tmp_path / "m"), versions=versions)
    message = r"cannot read the program, which jax 9\.9\.9 wrote .* export again"
    with pytest.raises(UserError, match=message):
        read_model(tmp_path / "m")
