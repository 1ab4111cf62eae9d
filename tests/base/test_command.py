"""Command lines: what they understand, and one line with exit code 2 for the rest."""

import os
import subprocess
import sys

import pytest

from prunex_jax.base.command import (
    Command,
    Flag,
    call_in_file,
    find_file,
    run_command,
)
from prunex_jax.base.errors import TrainingDivergedError, UserError
from tests.helpers.common import ROOT

COMMAND = Command(
    "Greets.",
    (
        Flag("name", "", "Whom.", is_required=True),
        Flag("times", 1, "How often, 100 % sure.", at_least=-3),
        Flag("loud", False, "In capitals."),
        Flag("tone", "kind", "How.", choices=("kind", "stern")),
    ),
    takes_settings=True,
)


def parse(*arguments):
    """Values and settings that a command is given."""
    given = []
    code = run_command(COMMAND, lambda *values: given.extend(values), arguments)
    assert code == 0
    values, settings = given
    return vars(values) | {"settings": settings}


def test_defaults_and_both_ways_to_give_a_value():
    expected = {"name": "a b", "times": 1, "loud": False, "tone": "kind"}
    for form in (["--name=a b"], ["--name", "a b"]):
        found = parse(*form)
        assert expected.items() <= found.items() and found["settings"] == []
    assert parse("--name=x", "--times", "-3", "--tone=stern")["times"] == -3


@pytest.mark.parametrize(
    ("flags", "loud"),
    [
        (["--loud"], True),
        (["--noloud"], False),
        (["--loud=true"], True),
        (["--loud=0"], False),
        (["--loud", "--noloud"], False),
        (["--loud", "--times=2"], True),
        ([], False),
    ],
)
def test_switches(flags, loud):
    assert parse(*flags, "--name=x")["loud"] is loud


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (["--config.a.b=3"], ["--config.a.b=3"]),
        (["--config.a.b", "3"], ["--config.a.b=3"]),
        (["--config.a.b", "-0.5"], ["--config.a.b=-0.5"]),
        (["--config.a.b", "('x', 'y')"], ["--config.a.b=('x', 'y')"]),
        (["--config.a.b", "--loud"], ["--config.a.b"]),
        (["--loud", "--config.a.b"], ["--config.a.b"]),
        (["--config.a.b", "c=d"], ["--config.a.b=c=d"]),
        (["--noconfig.a.b", "--config.c=1"], ["--noconfig.a.b", "--config.c=1"]),
    ],
)
def test_settings_are_handed_on(given, settings):
    assert parse(*given, "--name=x")["settings"] == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--name is required"),
        (["--name="], "--name is required"),
        (["--name"], "expected one argument"),
        (["--nam=x"], "'--nam=x' is not understood, did you mean '--name'"),
        (["-name=x"], "'-name=x' is not understood, did you mean '--name'"),
        (["--name=x", "stray"], "'stray' is not understood"),
        (["--name=x", "--times=often"], "invalid int value: 'often'"),
        (["--name=x", "--times=-4"], "--times=-4 must be at least -3"),
        (["--name=x", "--loud=often"], "--loud: invalid true_or_false value: 'often'"),
        (["--name=x", "--tone=rude"], "choose from"),
        (["--name=x", "config.a=1"], "'config.a=1' is not understood"),
    ],
)
def test_what_is_not_understood_is_one_line(arguments, message, capsys):
    assert run_command(COMMAND, lambda *_: pytest.fail("it ran"), arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_settings_are_for_commands_that_take_them(capsys):
    command = Command("Greets.", (Flag("name", "", "Whom."),))
    assert run_command(command, lambda *_: None, ["--config.a=1"]) == 2
    assert "'--config.a=1' is not understood" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("a\nb"), 2), (TrainingDivergedError("a b"), 1)]
)
def test_errors_become_one_line_and_a_code(error, code, capsys):
    def fail(*_):
        raise error

    assert run_command(COMMAND, fail, ["--name=x"]) == code
    assert capsys.readouterr().err == "error: a b\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError("4 TiB"), 2, "error: there is not enough memory for this (Mem"),
        (
            FileExistsError(17, "File exists", "runs/a"),
            2,
            "error: runs/a cannot be used",
        ),
        (NotADirectoryError(20, "Not a directory", "a/b"), 2, "(Not a directory)"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 2, "error: a device has"),
        (SystemExit(0), 70, "error: sys.exit(0) was called before the command had"),
    ],
)
def test_what_a_path_or_a_plugin_does_is_one_line(error, code, said, capsys):
    def run(values, rest):
        raise error

    assert run_command(COMMAND, run, ["--name=x"]) == code
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_errors_of_the_program_keep_their_traceback():
    for kind in (OSError, RuntimeError):

        def run(values, rest, kind=kind):
            raise kind("of nothing that was given")

        with pytest.raises(kind, match="of nothing"):
            run_command(COMMAND, run, ["--name=x"])


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    script = tmp_path / "talks.py"
    script.write_text(
        "import sys\n"
        "from prunex_jax.base.command import Command, run_command\n"
        "def talk(*_):\n"
        "    for _ in range(10**6):\n"
        "        sys.stdout.write('much\\n')\n"
        "sys.exit(run_command(Command('Talks.', ()), talk, []))"
    )
    command = f"{sys.executable} {script} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("much\n", "", 1)


def test_a_command_may_give_its_own_code():
    assert run_command(COMMAND, lambda *_: 7, ["--name=x"]) == 7


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_flag(flag, capsys):
    assert run_command(COMMAND, lambda *_: pytest.fail("it ran"), [flag]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Greets.")
    for part in ("--name NAME", "Required.", "100 % sure. Default: 1.", "kind,stern"):
        assert part in text
    assert "--noloud" not in text


def test_files_are_found_by_path_or_by_the_name_of_a_shipped_one(tmp_path, monkeypatch):
    shipped = ROOT / "configs"
    monkeypatch.chdir(tmp_path)
    config = shipped / "digits_resnet20_hsadmm.py"
    assert find_file("digits_resnet20_hsadmm", "config") == config
    assert find_file("digits_resnet20_hsadmm.py", "config") == config
    assert find_file("digits", "sweep") == shipped / "sweeps/digits.py"
    own = tmp_path / "digits"
    own.write_text("")
    assert find_file("digits", "sweep").resolve() == own, "a path goes first"
    with pytest.raises(UserError, match=r"is not a file.*did you mean .digits_resn"):
        find_file("digits_resnet20_hsadm", "config")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_study(", "cannot be loaded: SyntaxError"),
        ("x = 1", "cannot be loaded: AttributeError"),
        ("import nowhere_at_all", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_files_that_fail_are_named(text, message, tmp_path):
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(UserError, match=message):
        call_in_file(tmp_path / "f.py", "study", "get_study")


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "f.py").write_text("from beside_it import get_study")
    (tmp_path / "beside_it.py").write_text("def get_study(x):\n    return x + 1")
    assert call_in_file(tmp_path / "f.py", "study", "get_study", 1) == 2
