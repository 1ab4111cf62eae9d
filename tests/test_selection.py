"""Which slow tests a change asks for, and how cases take turns."""

import json
import subprocess

import pytest

from tests.helpers import selection
from tests.helpers.common import ROOT, run_script
from tests.helpers.selection import has_its_turn, rooms_from_the_top, selection_of

TESTS = ROOT / "tests"


def taken(*changed):
    """Rooms whose slow tests run after a change; None for all tests."""
    places = selection_of(changed, "since then").places
    return places if places is None else set(places)


def test_a_change_takes_its_room_and_those_above():
    found = selection_of(["prunex_jax/comm/ring.py"], "since then")
    for room in ("comm", "methods", "shrink", "export", "train", "compare"):
        assert found.takes(TESTS / room / "test_it.py"), room
    for room in ("sparsity", "channels", "tasks", "models", "data", "mesh"):
        assert not found.takes(TESTS / room / "test_it.py"), room
    assert taken("prunex_jax/compare/probe.py") == {"__main__", "compare", "benchmarks"}
    assert taken("prunex_jax/__main__.py") == {"__main__", "benchmarks"}
    # A room that went away is in no contract.
    assert taken("prunex_jax/gone/it.py") is None


def test_every_room_has_tests_that_can_be_taken():
    rooms = {path.name for path in TESTS.iterdir() if [*path.glob("test_*.py")]}
    assert rooms - {"benchmarks"} == set(rooms_from_the_top()) - {"__main__"}


@pytest.mark.parametrize(
    "changed",
    [
        "prunex_jax/base/trees.py",
        "prunex_jax/__init__.py",
        "tests/conftest.py",
        "tests/helpers/selection.py",
        "tests/helpers/common.py",
        "pyproject.toml",
        "Makefile",
        ".ci/run",
        ".ci/oldest.txt",
        "a_new_file",
    ],
)
def test_what_all_stand_on_takes_all(changed):
    assert taken("README.md", changed) is None


def test_tests_take_themselves_and_who_imports_them():
    assert taken("tests/comm/test_ring.py") == {"comm/test_ring.py"}
    assert "train/test_drills_of_machines.py" in taken("tests/train/test_language.py")
    # Through another helper, by a string, and by the folder it is imported from.
    assert "methods/test_hsadmm.py" in taken("tests/helpers/consensus_cases.py")
    assert taken("tests/helpers/bench_host.py") == {"benchmarks/test_runner.py"}
    assert taken("benchmarks/compression.py") >= {
        *("benchmarks", "benchmarks/test_scripts.py", "methods/test_many_hosts.py")
    }


def test_files_outside_of_the_package_take_their_readers():
    for path in ROOT.iterdir():
        is_tracked = path.name not in {".git", ".venv", ".venvs", "build", "dist"}
        if is_tracked and path.is_file():
            assert taken(path.name) in (None, set()), path
    assert taken("configs/digits_resnet20_hsadmm.py") == {
        "train",
        "compare",
        "benchmarks",
    }
    assert taken("docs/index.md", "README.md", ".ci/tested") == set()
    assert selection_of(["README.md"], "since then").takes(TESTS / "test_docs.py")


def test_what_differs_from_a_commit_is_found(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(selection, "ROOT", tmp_path)
    assert selection.changed_files("HEAD") is None
    git("init", "--quiet")
    for name in ("kept", "moved", "changed"):
        (tmp_path / name).write_text(name * 20)
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    git("tag", "before")
    git("mv", "moved", "elsewhere")
    git("commit", "--quiet", "--message=two")
    (tmp_path / "changed").write_text("otherwise")
    (tmp_path / "new").touch()
    wanted = {"moved", "elsewhere", "changed", "new"}
    assert selection.changed_files("before") == wanted
    assert selection.changed_files("0123456") is None
    assert selection.select("0123456").places is None
    assert selection.select("").places is None


def test_every_case_has_its_turn_once_in_a_while():
    cases = [f"test_{number}" for number in range(400)]
    runs = [{case for case in cases if has_its_turn(case, f"{n}")} for n in range(40)]
    shares = [len(run) / len(cases) for run in runs]
    assert all(0.15 < share < 0.35 for share in shares)
    assert set.union(*runs) == set(cases)
    assert runs[0] == {case for case in cases if has_its_turn(case, "0")}


CASES = """
import pytest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(40))
def test_sampled(case):
    pass


@pytest.mark.rotates
@pytest.mark.parametrize("case", range(40))
def test_rotating(case):
    pass


@pytest.mark.slow
def test_slow():
    pass


def test_quick():
    pass
"""


COLLECT = """
import contextlib, io, json, os, pytest

found, settings = [], ["-c", os.environ["PYTHONPATH"] + "/pyproject.toml"]
settings += ["--rootdir=.", "-q", "--collect-only"]
for flags in (["-m", "not slow"], [], *(["--sample", sample] for sample in "aab")):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        pytest.main([*settings, "-m", "slow", *flags, "test_it.py"])
    lines = said.getvalue().splitlines()
    found.append([line.partition("::")[2] for line in lines if "::" in line])
print(json.dumps(found))
"""


def test_quick_and_slow_tests_are_a_whole_and_cases_are_drawn_of_the_slow(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *  # noqa\n")
    (tmp_path / "test_it.py").write_text(CASES)
    (tmp_path / "collect.py").write_text(COLLECT)
    printed = run_script(tmp_path / "collect.py")
    quick, slow, drawn, again, other = json.loads(printed.splitlines()[-1])
    assert quick == ["test_sampled[0]", "test_sampled[20]", "test_quick"]
    assert len({*quick, *slow}) == len(quick) + len(slow) == 82
    assert drawn == again != other and {*drawn, *other} < set(slow)
    assert "test_slow" in drawn and 4 < len(drawn) < 40
    # Cases of the same parameters share programs, and come together.
    sampled, rotating = (
        {name.partition("[")[2] for name in drawn if name.startswith(test)}
        for test in ("test_sampled", "test_rotating")
    )
    assert sampled == rotating - {"0]", "20]"}
