"""Runs the notebooks in a quick form, or in full to store their outputs.

python docs/notebooks.py            runs each with one epoch; stops where a cell fails
python docs/notebooks.py --store    runs them in full, and stores what the site shows
python docs/notebooks.py quickstart --store         the same for one of them
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(path: Path) -> nbformat.NotebookNode:
    """Runs a notebook in an empty folder; returns it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook,
            timeout=3600,
            resources=resources,
            # It warns that it listens on this machine, which is meant.
            extra_arguments=["--log-level=40"],
        )
        client.execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leaves out times of cells and folders of this machine; joins pieces of text."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        merged: list[nbformat.NotebookNode] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = output.text.replace(f"{ROOT}/", "")
                if merged and merged[-1].get("name") == output.name:
                    merged[-1].text += output.text
                    continue
            merged.append(output)
        cell.outputs = merged


def main(arguments: list[str]) -> None:
    """Runs the notebooks that the arguments name, or all."""
    store = "--store" in arguments
    names = [name for name in arguments if name != "--store"]
    chosen = [path for path in NOTEBOOKS if path.stem in names or not names]
    if not store:
        os.environ["NOTEBOOK_EPOCHS"] = "1"
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "compiled"))
    for path in chosen:
        notebook = run(path)
        print(f"{path.name} runs")
        if store:
            tidy(notebook)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
