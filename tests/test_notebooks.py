"""Notebooks are stored with what they print; `make docs` runs them."""

import json
from pathlib import Path

import pytest

from tests.helpers.common import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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
