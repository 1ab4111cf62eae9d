"""Slow processes of real runs are named by process 0, and others are not."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.common import ROOT, free_port
from tests.helpers.tiny_runs import merged, settings, wait_for_rows, write_config

VALUES = settings(
    topology={"cpu_devices": 2, "layout": "process"},
    run={"steps": 10**6, "checkpoint_every_steps": 0, "silence_seconds": 12.0},
)
SLOW_DATA = """
import os, sys, time
from prunex_jax.data import loader
from prunex_jax.processes import LaunchFlags
from prunex_jax.train.commands.command import load_config
from prunex_jax.train.run import train

config, workdir, coordinator, process, mark = sys.argv[1:]
read = loader.TrainingExamples.__call__


def read_slowly(examples, positions):
    if process == "1" and os.path.exists(mark):
        time.sleep(0.15)
    return read(examples, positions)


loader.TrainingExamples.__call__ = read_slowly
flags = LaunchFlags(coordinator, 2, int(process), owns_process=True)
train(load_config(config), workdir, launch=flags)
"""


@contextlib.contextmanager
def running(tmp_path, values):
    """Two processes that train, the file of what process 0 says, and the slow mark."""
    config, port, mark = write_config(tmp_path, values), free_port(), tmp_path / "slow"
    processes = []
    with (tmp_path / "said").open("w") as said:
        for index in range(2):
            command = [sys.executable, "-c", SLOW_DATA, str(config)]
            command += [str(tmp_path / "run"), f"127.0.0.1:{port}", str(index)]
            processes.append(
                subprocess.Popen(
                    [*command, str(mark)],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    cwd=tmp_path,
                    stdout=said if index == 0 else subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        wait_for_rows(processes[0], tmp_path / "run", 6)
        yield processes, tmp_path / "said", mark
    finally:
        for process in processes:
            process.kill()
            process.wait()


def warnings_of(said):
    lines = said.read_text().splitlines()
    return [line for line in lines if line.startswith("warning: process")]


def wait_for_warning(said, count, act=lambda: time.sleep(0.2)):
    """The warning of this number, while something is done again and again."""
    deadline = time.monotonic() + 90
    while len(warnings_of(said)) < count:
        assert time.monotonic() < deadline, said.read_text()[-3000:]
        act()
    return warnings_of(said)[count - 1]


@pytest.mark.rotates
def test_a_slow_process_is_named_with_its_cause_and_equal_ones_are_not(tmp_path):
    with running(tmp_path, VALUES) as (_, said, mark):
        time.sleep(20)  # More than three comparisons.
        assert not warnings_of(said), "both are equally fast"
        mark.touch()
        line = wait_for_warning(said, 1)
        assert line.startswith("warning: process 1 on ") and "needs" in line
        assert "times as long as the median of the others per step" in line
        assert line.endswith("of it waits for its data")
        mark.unlink()
        assert "process 1" in (line := wait_for_warning(said, 2))
        assert line.endswith("is as fast as the others again")


@pytest.mark.slow
def test_a_process_that_is_stopped_again_and_again_is_named(tmp_path):
    """As on a machine that is too hot, or shared."""
    with running(tmp_path, VALUES) as (processes, said, _):

        def throttle():
            processes[1].send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            processes[1].send_signal(signal.SIGCONT)
            time.sleep(0.02)

        line = wait_for_warning(said, 1, throttle)
        assert line.startswith("warning: process 1 on ") and "needs" in line


@pytest.mark.slow
def test_slow_data_are_named_where_every_step_has_an_exchange(tmp_path):
    values = merged(VALUES, {"method": {"name": "dgc"}})
    with running(tmp_path, values) as (_, said, mark):
        mark.touch()
        line = wait_for_warning(said, 1)
        assert line.startswith("warning: process 1 on ") and "holds up" in line
        assert "per step it waits for its data, the others for" in line
