"""The rules of the code's structure that a machine can check.

Import directions are checked by import-linter (`make check`); here: who owns which
outside dependency, who communicates, and what is documented and annotated.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.common import ROOT, run_script

PACKAGE = ROOT / "prunex_jax"
# Path below the package -> its program.
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Outside dependency -> the only modules that may import it.
OWNERS: dict[str, set[str]] = {
    "benchmarks": set(),
    "absl": {"data/loader.py", "train/records/checkpoint.py"},
    "ml_collections": {
        "train/build/config.py",
        "train/run.py",
        "train/commands/command.py",
    },
    "orbax": {"train/records/checkpoint.py"},
    "datasets": {"data/huggingface.py"},
    "tensorflow_datasets": {"data/tfds_source.py"},
    "tokenizers": {"data/tokenizer.py"},
    "grain": {"data/loader.py"},
    "sklearn": set(),
    "PIL": {"data/images.py", "data/rand_augment.py"},
    "filelock": {"base/files.py"},
    "rich": {"train/console.py"},
    "tensorboardX": {"train/records/trackers.py"},
    "wandb": {"train/records/trackers.py"},
    "safetensors": {"base/tensor_files.py"},
    "jinja2": {"compare/report/page.py"},
    "matplotlib": {"compare/report/plots.py"},
    "flax": {
        *("models/layers.py", "models/resnet.py", "models/vgg.py"),
        *("models/transformer.py", "models/gpt.py", "models/bert.py"),
        *("models/language.py", "models/own.py", "models/stream.py"),
        *("models/vit.py", "models/convnext.py"),
    },
    "equinox": {"models/own.py"},
    "torch": {"models/pytorch.py", "pruner/pytorch.py"},
    "torchax": {"models/pytorch.py"},
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


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of all imports, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_outside_dependencies_have_one_owner() -> None:
    wrong = [
        f"{name} imports {dependency}"
        for name, tree in TREES.items()
        for dependency in sorted(set(imported(tree)) & set(OWNERS))
        if name not in OWNERS[dependency]
    ]
    assert not wrong


def test_only_owners_communicate() -> None:
    wrong = [
        f"{name}:{node.lineno} has {node.attr}"
        for name, tree in TREES.items()
        if name not in COLLECTIVE_OWNERS
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES
    ]
    assert not wrong


def test_public_functions_are_documented_and_annotated() -> None:
    wrong = []
    for name, tree in TREES.items():
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            bare = [
                argument.arg
                for argument in [*node.args.args, *node.args.kwonlyargs]
                if argument.annotation is None
            ]
            if not ast.get_docstring(node) or node.returns is None or bare:
                wrong.append(f"{name}: {node.name} {bare}")
    assert not wrong


def test_the_import_contract_has_a_level_for_every_room() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract, in_train = settings["tool"]["importlinter"]["contracts"]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(contract["layers"]) == sorted(rooms | {"__main__"})
    for each in (contract, in_train):
        assert each["exhaustive"] and not each["ignore_imports"]
    for room in rooms:
        text = (PACKAGE / room / "__init__.py").read_text()
        assert ast.get_docstring(ast.parse(text)), f"{room} says nothing of itself"


def test_hosts_of_a_study_need_the_standard_library_only(tmp_path: Path) -> None:
    """Tests start them as nobody, with a system's Python, and would skip without it."""
    script = tmp_path / "imports.py"
    script.write_text(
        "import benchmarks.links.links, prunex_jax.compare.drill.sandbox, sys\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    assert not {"jax", "numpy", "absl"} & set(run_script(script).split())
