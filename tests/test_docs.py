"""What the README and the pages of docs/ show works: snippets run, names exist."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import prunex_jax
from benchmarks.__main__ import benchmarks
from prunex_jax.__main__ import main
from prunex_jax.train.build.config import default_config
from tests.helpers.common import ROOT, run_script

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# These list what has been, and what was before.
PAST = ("migration.md", "changelog.md")
PRESENT = [page for page in PAGES if page.name not in PAST]


def python_of(page: Path) -> str:
    """The Python of a page, in its order."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    return "\n\n".join(blocks)


def commands_of(page: Path) -> list[list[str]]:
    """Shell commands of a page: in fences and in inline code."""
    text = page.read_text()
    found = re.findall(r"`((?:python|prunex-jax|make) [^`]+)`", text)
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.M):
        found += block.replace("\\\n", " ").splitlines()
    found += re.findall(r"^ {4}((?:python|prunex-jax|make) .+)$", text, re.M)
    words = [
        shlex.split(command.replace("\n", " "), comments=True) for command in found
    ]
    starts = ("srun", "mpirun")
    return [line[1:] if line[:1] and line[0] in starts else line for line in words]


# Needs packages of its own.
OF_PYTORCH = "pytorch.md"
WITH_PYTHON = [p for p in PAGES if python_of(p) and p.name != OF_PYTORCH]
CHECKS = {
    "README.md": "assert int((abs(network['hidden']).sum(0) > 0).sum()) == 8\n"
    "assert logits.shape == (4000, 2)\n"
    "assert result.summary['validation_accuracy'] > 0.8, 'no better than chance'\n"
    "assert 2 * result.summary['params_kept'] < 1.1 * result.summary['params_dense']\n"
    "assert result.summary['host_wire_bytes'] > 0, 'two hosts send something'\n",
    "own_loop.md": "assert int((abs(network['hidden']).sum(0) > 0).sum()) == 8\n",
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_in_use", [False, True], ids=["fresh", "jax in use"])
def test_python_of_every_page_runs(is_in_use: bool, tmp_path: Path) -> None:
    """Also where an array was made before, as in a notebook, on one device."""
    # One process for all pages, each in names of its own: imports are paid once.
    lines = ["import jax.numpy as jnp", "jnp.ones(3)"] if is_in_use else []
    for page in WITH_PYTHON:
        script = tmp_path / f"{page.stem}_page.py"
        script.write_text(python_of(page) + "\n" + CHECKS.get(page.name, ""))
        lines.append(f"print('page', {page.name!r}, flush=True)")
        lines.append(f"runpy.run_path({str(script)!r})")
    driver = tmp_path / "driver.py"
    driver.write_text("\n".join(["import runpy", *lines]))
    count = "1" if is_in_use else "4"
    output = run_script(driver, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=count)
    assert "group hidden" in output


@pytest.mark.pytorch
def test_python_of_the_page_of_pytorch_runs(tmp_path: Path) -> None:
    pytest.importorskip("torchax", reason="needs the extra pytorch")
    (page,) = (page for page in PAGES if page.name == OF_PYTORCH)
    script = tmp_path / "pytorch_page.py"
    script.write_text(python_of(page))
    assert "Conv2d(32, 32" in run_script(script)


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


@cache
def help_of(command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main([command, "--help"]) == 0
    return text.getvalue()


def check_flags(command: str, words: list[str]) -> None:
    """Flags of a command are in its help, and settings among the settings."""
    for word in words:
        if word.startswith(("--config.", "--noconfig.")):
            key = word.split(".", 1)[1].split("=")[0]
            assert key in flat_keys(), f"no setting {key}"
        elif word.startswith("--"):
            flag = word.split("=")[0]
            assert re.search(rf"{flag}\b", help_of(command)), f"{command} {flag}"


@cache
def flat_keys() -> frozenset[str]:
    def keys(prefix: str, values: dict) -> list[str]:
        found = []
        for name, value in values.items():
            found.append(prefix + name)
            if isinstance(value, dict):
                found += keys(f"{prefix}{name}.", value)
        return found

    return frozenset(keys("", default_config().to_dict()))


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.stem)
def test_commands_of_pages_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands_of(page):
        match words:
            case ["make", target, *_] if target != "benchmark-...":
                assert re.search(rf"^{target}:", makefile, re.M), target
            case ["python", "-m", "prunex_jax.train", *rest]:
                check_flags("train", rest)
            case ["python", "-m", "prunex_jax", command, *rest] if command != "...":
                check_flags(command, rest)
            case ["prunex-jax", command, *rest]:
                check_flags(command, rest)
            case ["python", "-m", module, *_] if module == "benchmarks":
                assert words[3] in benchmarks(), words[3]
            case ["python", script, *_] if script.endswith(".py"):
                assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.stem)
def test_named_files_and_settings_exist(page: Path) -> None:
    text = page.read_text()
    named = (
        r"(?<![\w/.])(?:benchmarks|configs|notebooks|prunex_jax|tests|docs)/[\w./-]+\w"
    )
    for name in set(re.findall(named, text)):
        assert (ROOT / name).exists(), name
    for key in set(re.findall(r"--(?:no)?config\.([\w.]+\w)", text)):
        assert key in flat_keys(), f"no setting {key}"


def test_every_fault_has_a_drill() -> None:
    page = (ROOT / "docs" / "howto" / "reliability.md").read_text()
    rows = re.findall(r"^\| .+ \| `(tests/.+\.py)`: (`test.+) \|$", page, re.M)
    assert len(rows) >= 14
    for path, tests in rows:
        for name in re.findall(r"`(\w+)`", tests):
            assert f"def {name}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize("walk", ["From the loss", "From the score"])
def test_walks_through_the_code_name_what_exists(walk: str) -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    section = page.split(f"## {walk}")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. `(prunex_jax/[\w/]+\.py)`, `(\w+)`", section, re.M)
    assert 5 <= len({path for path, _ in steps}) <= 6
    for path, name in steps:
        assert re.search(rf"(def|class) {name}\b", (ROOT / path).read_text()), name


def test_pictures_are_up_to_date() -> None:
    script = ROOT / "docs" / "draw" / "pictures.py"
    output = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True
    )
    assert output.returncode == 0, output.stdout


def test_versions_agree() -> None:
    version = prunex_jax.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_new_names_of_the_migration_page_exist() -> None:
    tables = (ROOT / "docs" / "migration.md").read_text()
    names = re.findall(r"\| `(prunex_jax\.[\w.]+)` \|$", tables, re.M)
    assert len(names) > 40
    for name in names:
        parent, _, last = name.rpartition(".")
        found = hasattr(importlib.import_module(parent), last)
        assert found or importlib.import_module(name), name
