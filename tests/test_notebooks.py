"""Notebooks are stored with what they print; `make docs` runs them."""

import importlib.util
import json
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.common import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Homepage"]


def code_cells(notebook: Path) -> list[dict]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_and_hold_no_error(notebook: Path) -> None:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert len(outputs) >= 3, "python docs/notebooks.py --store stores them"
    assert all(output["output_type"] != "error" for output in outputs)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_name_no_folder_of_the_machine_that_ran_them(notebook: Path) -> None:
    text = json.dumps([cell["outputs"] for cell in code_cells(notebook)])
    for folder in (str(Path.home()), str(ROOT), "/tmp/"):
        assert folder not in text, f"{notebook.name} names {folder}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_page_of_the_tutorials_is_a_notebook(notebook: Path) -> None:
    page = ROOT / "docs" / "tutorials" / notebook.name
    assert page.resolve() == notebook


def install_cell(notebook: Path) -> str:
    return "".join(code_cells(notebook)[0]["source"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_link_opens_each_in_colab(notebook: Path) -> None:
    title = "".join(json.loads(notebook.read_text())["cells"][0]["source"])
    page = f"{REPOSITORY}/blob/main/notebooks/{notebook.name}"
    where = page.removeprefix("https://github.com")
    assert f"(https://colab.research.google.com/github{where})" in title


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("is_there", [True, False])
def test_the_package_is_installed_where_it_is_missing_beside_the_jax_that_is_there(
    notebook: Path, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *args, **_: commands.append(args[0]))
    if not is_there:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(install_cell(notebook), {})
    if is_there:
        assert not commands
        return
    (command,) = commands
    assert command[-3:] == ["-c", "held.txt", f"git+{REPOSITORY}"]
    held = Path("held.txt").read_text().split()
    versions = {f"{name}=={version(name)}" for name in ("jax", "jaxlib")}
    assert versions <= set(held)
    assert all(re.match(r"jax(==|lib==|[-_]cuda)", line) for line in held)
