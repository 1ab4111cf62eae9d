"""What settings name is imported, and a missing package is named with its remedy."""

import importlib.util
import sys

import pytest

from prunex_jax.base import tensor_files
from prunex_jax.base.errors import UserError
from prunex_jax.base.imports import import_named, need_package
from prunex_jax.compare.report import run_report as report
from prunex_jax.export import export_model


def test_what_cannot_be_imported_is_one_line():
    with pytest.raises(UserError, match=r"model.name='nowhere:it' cannot be imported"):
        import_named("nowhere:it", "model.name")


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "found_here.py").write_text("it = 7")
    (tmp_path / "ends_here.py").write_text("raise SystemExit(0)")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with pytest.raises(UserError, match="cannot be imported"):
        import_named("found_here:it", "--model")
    monkeypatch.chdir(tmp_path)
    assert import_named("found_here:it", "--model") == 7
    assert str(tmp_path) not in sys.path
    with pytest.raises(UserError, match="SystemExit: 0"):
        import_named("ends_here:it", "--model")


@pytest.fixture
def bare(monkeypatch):
    """As where no extra is installed."""
    found = importlib.util.find_spec
    extras = {"jinja2", "safetensors", "flatbuffers"}

    def without(name):
        return None if name in extras else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    bare, tmp_path, capsys
):
    need_package("numpy", "none", "This")
    with pytest.raises(UserError, match=r"pip install 'prunex-jax\[export\]'"):
        tensor_files.load_tensors(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"An export needs the package safetensors"):
        export_model(tmp_path / "out", lambda params, x: x, {}, [1.0], certificate=None)
    assert not (tmp_path / "out").exists()
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "jinja2, which is not installed: pip install 'prunex-jax[report]'" in said
    assert said.count("\n") == 1
