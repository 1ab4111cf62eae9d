"""The rules of the code's structure that a machine can check.

Import directions are checked by import-linter (`make check`); here: who owns which
outside dependency, and how long files and functions are.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.common import ROOT, run_script

PACKAGE = ROOT / "prunex_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Outside dependency -> the only modules that may import it.
OWNERS = {
    "absl": {"data/loader.py"},
    "ml_collections": {"train/config.py", "train/run.py", "train/command.py"},
    "orbax": {"train/checkpoint.py"},
    "tensorflow_datasets": {"data/tfds_source.py"},
    "grain": {"data/loader.py"},
    "sklearn": {"data/embedded.py"},
    "PIL": {"data/images.py"},
    "filelock": {"base/files.py"},
    "safetensors": {"export/folder.py"},
    "flax": {"models/base.py", "models/layers.py", "models/resnet.py", "models/vgg.py"},
}
# jax functions that communicate -> the only modules that may call them.
COLLECTIVES = {
    "psum",
    "psum_scatter",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "all_to_all",
    "ppermute",
}
COLLECTIVE_OWNERS = {"comm/collectives.py", "models/layers.py"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all imports, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_outside_dependencies_have_one_owner(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for dependency in set(imported(tree)) & set(OWNERS):
        assert name_of(path) in OWNERS[dependency], f"{dependency} has another owner"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_owners_communicate(path: Path) -> None:
    tree = ast.parse(path.read_text())
    called = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    } & COLLECTIVES
    assert not called or name_of(path) in COLLECTIVE_OWNERS, called


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_public_functions_are_documented_and_annotated(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
            assert node.returns is not None, f"{node.name} says nothing of its result"
            given = [*node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in given if a.annotation is None]
            assert not bare, f"{node.name}: {bare} have no annotation"


def test_hosts_of_a_study_need_the_standard_library_only(tmp_path: Path) -> None:
    """Tests start them as nobody, with a system's Python, and would skip without it."""
    script = tmp_path / "imports.py"
    script.write_text(
        "import prunex_jax.bench.links.hosts, prunex_jax.bench.links.sandbox, sys\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    assert not {"jax", "numpy", "absl"} & set(run_script(script).split())
