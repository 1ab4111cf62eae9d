"""The names of `prunex_jax` itself: imported lazily, and the same for type checkers."""

import ast
import importlib
import subprocess
import sys

import pytest

import prunex_jax
from tests.helpers.common import ROOT, run_script

# What takes long to import and few need at once: the data's readers and checkpoints.
LATE = {"orbax", "grain", "tensorflow_datasets", "tensorflow"}
# What only the trainer needs; absl comes with optax.
HEAVY = LATE | {"ml_collections", "flax", "rich"}


def loaded_by(statement, tmp_path):
    """Top-level names of the modules that a statement loads in a new process."""
    script = tmp_path / "loads.py"
    script.write_text(
        f"{statement}\nimport sys\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    return set(run_script(script).split())


def test_every_name_is_where_type_checkers_look():
    tree = ast.parse((ROOT / "prunex_jax/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    stated = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(stated) == prunex_jax.__all__
    for name, module in stated.items():
        value = getattr(importlib.import_module(module), name)
        assert getattr(prunex_jax, name) is value, name
    assert set(prunex_jax.__all__) <= set(dir(prunex_jax))
    assert 15 <= len(prunex_jax.__all__) <= 25


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'hsadm'"):
        _ = prunex_jax.hsadm


def test_import_is_cheap(tmp_path):
    loaded = loaded_by("import prunex_jax", tmp_path)
    assert not {"jax", "numpy", "flax", "optax"} & loaded


def test_transforms_and_tracer_come_without_the_trainers_packages(tmp_path):
    """All of them in one process: what none of them loads, each does not load."""
    names = "hsadmm, topk, trace_channels, project_channels, make_cut"
    assert not HEAVY & loaded_by(f"from prunex_jax import {names}", tmp_path)


def test_transforms_and_tracer_come_without_what_joins_processes(tmp_path):
    script = tmp_path / "loads.py"
    script.write_text(
        "import sys, prunex_jax\n"
        "prunex_jax.hsadmm, prunex_jax.trace_channels, prunex_jax.make_cut\n"
        "print(*[name for name in sys.modules if name.startswith('prunex_jax.')])"
    )
    rooms = {name.split(".")[1] for name in run_script(script).split()}
    assert {"methods", "mesh", "shrink"} <= rooms
    assert not {"processes", "data", "train", "compare"} & rooms


@pytest.mark.parametrize(
    ("module", "arguments", "code"),
    [
        ("prunex_jax.train", ["--help"], 0),
        ("prunex_jax", ["train", "--help"], 0),
        ("prunex_jax", ["train", "--wrkdir=x"], 2),
    ],
)
def test_help_and_bad_flags_do_not_wait_for_jax(module, arguments, code, tmp_path):
    loaded = loaded_by(
        f"import contextlib, io\nfrom {module}.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert main({arguments}) == {code}",
        tmp_path,
    )
    assert not {"jax", "numpy", "optax", *HEAVY} & loaded


def test_a_run_imports_what_it_needs(tmp_path):
    """Readers of data that it does not read, and checkpoints, come later or never."""
    loaded = loaded_by(
        "import prunex_jax.train.run\n"
        "from prunex_jax.data import make_loader, open_dataset\n"
        "from prunex_jax.data.settings import DataConfig\n"
        "split = open_dataset(DataConfig(), seed=0).train\n"
        "assert len(split.read(split.indices[:1])[0]) == 1",
        tmp_path,
    )
    assert not LATE & loaded


@pytest.mark.slow
def test_the_trainer_is_one_import(tmp_path):
    loaded = loaded_by("import prunex_jax.train", tmp_path)
    assert "jax" not in loaded
    statement = "from prunex_jax.train import train; assert callable(train)"
    subprocess.run([sys.executable, "-c", statement], check=True, cwd=ROOT)


@pytest.mark.slow
def test_a_run_needs_no_extra(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "extras = 'sklearn jinja2 matplotlib safetensors flatbuffers'.split()\n"
        "sys.modules |= dict.fromkeys(extras)\n"
        "from prunex_jax.train import train\n"
        "train({'model': {'width': 0.5}, 'run': {'steps': 8}}, 'run')\n"
    )
    run_script(script)
    assert (tmp_path / "run/summary.json").exists()
