"""Runs the notebooks in a quick form, or in full to store their outputs.

Their beginnings are written here: a link that opens them in Colab, and a cell that
installs the package where it is missing.

python docs/notebooks.py            runs each with one epoch; stops where a cell fails
python docs/notebooks.py --store    runs them in full, and stores what the site shows
python docs/notebooks.py quickstart --store         the same for one of them
"""

import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"][
    "Homepage"
]
COLAB = "https://colab.research.google.com"
INSTALL = rf"""
# Installs the package where it is missing, as in Colab. The jax that is there fits the
# driver of the GPU, so pip has to keep it, or to say what does not fit.
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("prunex_jax") is None:
    there = {{(d.name, d.version) for d in importlib.metadata.distributions()}}
    held = [f"{{n}}=={{v}}" for n, v in there if re.match(r"jax(lib|[-_]cuda.*)?$", n)]
    Path("held.txt").write_text("\n".join(held))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-c", "held.txt"]
    subprocess.run([*pip, "git+{REPOSITORY}"], check=True)
"""


def add_beginning(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes the link below the title, and the cell that installs, or renews them."""
    page = f"{REPOSITORY}/blob/main/notebooks/{path.name}"
    page = page.replace("https://github.com", f"{COLAB}/github")
    link = f"[Open in Colab]({page})"
    first, second, *others = notebook.cells
    title, about = first.source.split("\n\n", 1)
    if about.startswith("[Open in Colab]"):
        about = about.split("\n\n", 1)[1]
    first.source = f"{title}\n\n{link}\n\n{about}"
    install = nbformat.v4.new_code_cell(INSTALL.strip())
    del install["id"]  # The stored format has none.
    has_one = "importlib.util" in second.source
    notebook.cells = [first, install, *([] if has_one else [second]), *others]


def run(path: Path) -> nbformat.NotebookNode:
    """Runs a notebook in an empty folder; returns it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    add_beginning(notebook, path)
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
    """Leaves out what is of this machine; joins pieces of text.

    That is times of cells, folders, and what is said while a busy machine takes long.
    """
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        merged: list[nbformat.NotebookNode] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                if "slow_operation_alarm" in output.text:  # of XLA
                    continue
                text = output.text.replace(f"{ROOT}/", "")
                output.text = re.sub(r".* \(\d+ s so far\)\n", "", text)
                if not output.text:
                    continue
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
