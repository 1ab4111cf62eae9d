"""Folders that somebody else has made are refused in one line; nothing in them runs."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import digests_of
from prunex_jax.export import export_model, read_model

X = np.ones((2, 3), np.float32)
PARAMS = {"w": np.ones((3, 4), np.float32)}


def apply(params, x):
    return x @ params["w"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_model(folder, apply, PARAMS, [X], certificate=None)
    return folder


@pytest.fixture
def model(exported, tmp_path):
    """A copy that a test may spoil."""
    for file in exported.iterdir():
        target = tmp_path / "model" / file.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
    return tmp_path / "model"


def change(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def replace_program(folder, fn, *allowed):
    """Another program of the same shapes, with checksums that fit."""
    batch = export.symbolic_shape("batch")[0]
    shapes = (
        {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32)},
        jax.ShapeDtypeStruct((batch, 3), jnp.float32),
    )
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in allowed]
    made = export.export(jax.jit(fn), disabled_checks=checks, platforms=["cpu"])
    program = bytes(made(*shapes).serialize())
    (folder / "program.stablehlo").write_bytes(program)
    change(folder, files=digests_of(folder))


CALLBACK = "xla_ffi_python_cpu_callback"


def calling(name, **options):
    def fn(params, x):
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return apply(params, call(x, **options))

    return fn


# jax refuses to write callbacks; whoever wants one writes the call itself.
with_callback = calling(CALLBACK, index=np.uint64(0xDEAD))


def test_the_folder_itself_is_read(model):
    np.testing.assert_array_equal(read_model(model)(X), X @ PARAMS["w"])


@pytest.mark.parametrize(
    ("fn", "name"), [(with_callback, CALLBACK), (calling("spoil"), "spoil")]
)
def test_a_program_that_calls_anything_is_refused(model, fn, name):
    replace_program(model, fn, name)
    with pytest.raises(UserError, match=rf"program calls {name}, .* trusted=True"):
        read_model(model)
    assert read_model(model, trusted=True).manifest["format"] == 1


def test_a_program_that_needs_more_memory_than_there_is_is_not_run(model):
    def greedy(params, x):
        many = jnp.arange(200_000.0) + x[0, 0]
        return apply(params, x) + jnp.sum(jnp.outer(many, many[::-1]) @ many) * 0

    replace_program(model, greedy)
    read = read_model(model)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"needs 160 GB for such inputs, and there are"):
        read(X)
    assert time.monotonic() - started < 20


def test_an_exported_function_can_be_part_of_another(model):
    read = read_model(model)
    doubled = jax.jit(lambda x: 2 * read(x))(X)
    np.testing.assert_array_equal(doubled, 2 * X @ PARAMS["w"])
    np.testing.assert_array_equal(read(X[:1]), X[:1] @ PARAMS["w"])


def test_factorisations_are_no_strange_calls(tmp_path):
    def solved(params, x):
        gram = params["w"].T @ params["w"] + jnp.eye(4)
        return apply(params, x) @ jnp.linalg.inv(gram) + jnp.linalg.eigvalsh(gram)[None]

    folder = tmp_path / "solved"
    export_model(folder, solved, PARAMS, [X], certificate=None)
    wanted = solved(PARAMS, X)
    np.testing.assert_allclose(read_model(folder)(X), wanted, rtol=1e-5)


def test_other_shapes_than_the_manifest_says(model):
    replace_program(model, lambda params, x: apply(params, x)[:, :2])
    with pytest.raises(UserError, match=r"says outputs=float32\[batch,4\]"):
        read_model(model)


@pytest.mark.parametrize(
    "name", ["manifest.json", "model.safetensors", "program.stablehlo"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "device", "huge"])
def test_only_regular_files_of_their_size_are_opened(model, name, kind):
    """A pipe would wait for ever; a file with holes promises 200 GB."""
    path = model / name
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (model.parent / "elsewhere").write_bytes(content)
        path.symlink_to(model.parent / "elsewhere")
    else:
        path.write_bytes(content)
        os.truncate(path, 200 * 10**9)
    said = "at most .* expected" if kind == "huge" else "is no regular file"
    with pytest.raises(UserError, match=rf"{name} .*{said}"):
        read_model(model)
    if kind == "link":  # As folders of caches have them.
        np.testing.assert_array_equal(
            read_model(model, trusted=True)(X), X @ PARAMS["w"]
        )
    else:
        with pytest.raises(UserError, match=rf"{name} .*{said}"):
            read_model(model, trusted=True)


def test_what_else_lies_there_is_not_touched(model):
    os.mkfifo(model / "extra")
    (model / "away").symlink_to("/dev/zero")
    np.testing.assert_array_equal(read_model(model)(X), X @ PARAMS["w"])


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 1, "format": 1}',
        "[" * 100_000,
        '{"format": true}',
        '{"format": NaN}',
    ],
)
def test_manifests_are_strict(model, text):
    (model / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"no exported model|has format") as caught:
        read_model(model)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("word", ["float32[3", "float99[3,4]", 7, "float32[-1]"])
def test_arrays_that_are_not_described_are_refused(model, word):
    change(model, arrays={"w": word})
    with pytest.raises(UserError, match="cannot be read"):
        read_model(model)


@pytest.mark.slow
def test_a_callback_of_another_process_does_not_end_this_one(model):
    """What is refused: an address of the process that wrote the program is called."""
    replace_program(model, with_callback, CALLBACK)
    script = (
        "import sys, numpy as np\n"
        "from prunex_jax import read_model\n"
        "from prunex_jax.base.errors import UserError\n"
        "try:\n"
        "    read_model(sys.argv[1])(np.ones((2, 3), np.float32))\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(model)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert f"calls {CALLBACK}" in done.stdout


def test_a_network_that_has_diverged_is_not_exported(tmp_path):
    params = {"w": np.where(np.eye(3, 4) > 0, np.nan, 1).astype(np.float32)}
    with pytest.raises(UserError, match="parameter 'w' has what is not a number"):
        export_model(tmp_path / "m", apply, params, [X], certificate=None)
