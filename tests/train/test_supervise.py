"""A command that is lost is started again; one that has ended is not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from prunex_jax.base.command import EXIT_FAILED, EXIT_LOST, EXIT_STALLED
from prunex_jax.train.commands.supervise import main
from tests.helpers.common import ROOT

# Ends with the codes in turn, one at each start; a negative one is a signal.
COMMAND = """
import os, pathlib, signal, sys
starts = pathlib.Path(sys.argv[1])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))
code = int(sys.argv[2:][number])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def run(tmp_path, *codes, flags=("--pause=0",)):
    """The exit code, and how often the command was started."""
    starts = tmp_path / "starts"
    command = [sys.executable, "-c", COMMAND, str(starts), *map(str, codes)]
    found = main([*flags, "--", *command])
    return found, len(starts.read_text())


@pytest.mark.parametrize("code", [EXIT_LOST, EXIT_FAILED, EXIT_STALLED, -9, -6])
def test_a_lost_command_is_started_again(code, tmp_path, capfd):
    assert run(tmp_path, code, code, 0) == (0, 3)
    assert capfd.readouterr().err.count("supervise: the command ended with") == 2


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_an_ended_command_is_not(code, tmp_path):
    assert run(tmp_path, code, 0) == (code, 1)


def test_there_is_an_end_of_it(tmp_path):
    flags = ("--pause=0", "--restarts=2")
    assert run(tmp_path, *[EXIT_LOST] * 9, flags=flags) == (EXIT_LOST, 3)
    (tmp_path / "starts").unlink()
    assert run(tmp_path, *[-9] * 9, flags=flags) == (128 + 9, 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no command after --"),
        (["--"], "no command after --"),
        (["--restarts=-1", "--", "true"], "--restarts=-1 must be at least 0"),
        (["--", "/no/such/program"], "cannot run '/no/such/program'"),
    ],
)
def test_bad_command_lines(arguments, text, capsys):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_signals_go_on_to_the_command_which_is_its_end(tmp_path):
    waiting = "import time; print('there', flush=True); time.sleep(60)"
    supervisor = subprocess.Popen(
        [
            *(sys.executable, "-m", "prunex_jax", "supervise", "--pause=0", "--"),
            *(sys.executable, "-c", waiting),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        assert supervisor.stdout.readline() == "there\n"
        began = time.monotonic()
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20
