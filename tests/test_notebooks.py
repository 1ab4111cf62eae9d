"""Every notebook runs from top to bottom, with fewer steps."""

import json
from pathlib import Path

import pytest

from tests.helpers.common import ROOT, run_script

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert code, "a notebook without code shows nothing"
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(code))
    output = run_script(script, NOTEBOOK_EPOCHS="1", TMPDIR=str(tmp_path))
    assert "done " in output


def test_notebooks_are_stored_without_outputs() -> None:
    for notebook in NOTEBOOKS:
        for cell in json.loads(notebook.read_text())["cells"]:
            assert not cell.get("outputs"), f"{notebook.name}: clear the outputs"
