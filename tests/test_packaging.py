"""The wheel takes along every package, every config and every file of data."""

import importlib.util
import tomllib
from pathlib import PurePath

import setuptools

from tests.helpers.common import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_of_wheel(monkeypatch):
    """Package -> folder of the repository, as setup.py says."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)  # Nothing is built here.
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("setup_of_prunex", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    folders = {}
    for package in given["packages"]:
        path = PurePath(*package.split("."))
        for name, folder in given["package_dir"].items():
            if f"{package}.".startswith(f"{name}."):
                path = PurePath(folder, *package.removeprefix(name).split("."))
        folders[package] = path
    return folders


def test_every_folder_with_programs_is_a_package_of_the_wheel(monkeypatch):
    folders = set(packages_of_wheel(monkeypatch).values())
    for top in ("prunex_jax", "configs"):
        for file in (ROOT / top).rglob("*.py"):
            assert PurePath(file.relative_to(ROOT).parent) in folders, file


def test_files_that_are_no_programs_are_declared_as_data():
    declared = SETTINGS["tool"]["setuptools"]["package-data"]
    paths = {
        ROOT.joinpath(*package.split("."), name)
        for package, names in declared.items()
        for name in names
    }
    found = {
        path
        for path in (ROOT / "prunex_jax").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found == paths


def test_the_console_script_is_the_front_door():
    assert SETTINGS["project"]["scripts"] == {"prunex-jax": "prunex_jax.__main__:main"}


def test_extras_for_accelerators_ask_for_the_jax_of_the_package():
    project = SETTINGS["project"]
    (jax,) = [each for each in project["dependencies"] if each.startswith("jax>=")]
    extras = project["optional-dependencies"]
    for name, kind in (("cuda", "cuda13"), ("cuda12", "cuda12")):
        assert extras[name] == [jax.replace("jax", f"jax[{kind}]")]


def test_the_oldest_packages_that_are_tested_are_those_that_are_asked_for():
    """`.ci/oldest.txt` holds every one at its minimum."""
    held = dict(
        line.split("==") for line in (ROOT / ".ci/oldest.txt").read_text().split()
    )
    project = SETTINGS["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["export"], *extras["report"]]
    asked = dict(requirement.split(">=") for requirement in requirements)
    assert {name: version.removesuffix(".*") for name, version in held.items()} == asked
