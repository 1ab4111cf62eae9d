"""The front door lists every command and hands on to it."""

import pytest

import prunex_jax
from prunex_jax.__main__ import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, what) in COMMANDS.items():
        assert f"  {name} " in text and what in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"prunex-jax {name}" in out and "--help" in out


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == shown


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prunex-jax {prunex_jax.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["--config=x"], "'--config=x' is no command"),
        (["train"], "--config is required"),
        (["export", "--nowhere"], "'--nowhere' is not understood"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
