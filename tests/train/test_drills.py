"""Faults of runs of two processes: all end soon, say why, and the restart goes on.

What a user sees is tried here with real processes: a line with the process, the phase
and the remedy, an exit code that is documented, and no process that is left over.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from prunex_jax.base.command import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_STALLED,
)
from tests.helpers.common import ROOT, free_port
from tests.helpers.tiny_runs import (
    merged,
    rows_of,
    settings,
    start,
    wait_for_rows,
    write_config,
)

# How soon the other process has to be gone.
SOON = 60
VALUES = settings(
    topology={"cpu_devices": 2, "layout": "process"},
    run={
        "steps": 4000,
        "log_every_steps": 5,
        "checkpoint_every_steps": 10,
        "silence_seconds": 12.0,
    },
)


def start_both(folder, workdirs, values=(VALUES, VALUES), flags=((), ())):
    """Two processes of one run, each with its own settings and folder."""
    port = free_port()
    processes = []
    for index in range(2):
        own = folder / f"process{index}"
        own.mkdir(exist_ok=True)
        shared = (f"--coordinator=127.0.0.1:{port}", "--num_processes=2")
        all_flags = (*shared, f"--process_id={index}", *flags[index])
        processes.append(start(own, values[index], workdirs[index], *all_flags))
    return processes


def ended(processes, codes=None, within=SOON, among=()):
    """What both have said, having ended in time and with these codes."""
    began, outputs = time.monotonic(), []
    try:
        for process in processes:
            left = within - (time.monotonic() - began)
            outputs.append(process.communicate(timeout=max(left, 1))[0])
    finally:
        for process in processes:
            process.kill()
    found = [process.returncode for process in processes]
    fits = set(found) <= set(among) if codes is None else found == list(codes)
    assert fits, "\n---\n".join([str(found), *outputs])
    return outputs


def saved(workdir):
    folders = (workdir / "checkpoints").iterdir()
    return [int(p.name) for p in folders if (p / "manifest.json").exists()]


def running(tmp_path, values=VALUES, rows=6):
    """Two processes that have trained for a while."""
    workdir = tmp_path / "run"
    processes = start_both(tmp_path, (workdir, workdir), (values, values))
    try:
        wait_for_rows(processes[0], workdir, rows)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes, workdir


@pytest.mark.sampled(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_is_named_and_the_restart_goes_on(lost, tmp_path):
    processes, workdir = running(tmp_path)
    processes[lost].kill()
    codes = [EXIT_LOST, EXIT_LOST]
    codes[lost] = -signal.SIGKILL
    said = ended(processes, codes)[1 - lost]
    assert f"error: process {lost}" in said and "has not answered for" in said
    assert "at step" in said and "the same command" in said
    assert "free space" not in said

    newest = max(saved(workdir))
    # One save may be in flight, which lasts longer than ten such steps.
    assert newest >= rows_of(workdir)[-1]["step"] - 25, "more than an interval lost"
    again = merged(VALUES, {"run": {**VALUES["run"], "max_host_drift": 0.0}})
    processes = start_both(tmp_path, (workdir, workdir), (again, again))
    wait_for_rows(processes[0], workdir, len(rows_of(workdir)) + 2)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert f"resumed at step {newest}" in outputs[0]


@pytest.mark.sampled(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named(stopped, tmp_path):
    """As one whose machine hangs, or whose link is lost."""
    processes, _ = running(tmp_path)
    processes[stopped].send_signal(signal.SIGSTOP)
    other = processes[1 - stopped]
    try:
        said, _ = other.communicate(timeout=SOON)
    finally:
        processes[stopped].kill()
        processes[stopped].communicate()
        other.kill()
    assert other.returncode == EXIT_LOST, said
    assert f"error: process {stopped}" in said and "has not answered for" in said


BREAKING = """
import os, sys
from prunex_jax.mesh import LaunchFlags
from prunex_jax.train.command import load_config
from prunex_jax.train.run import train

config, workdir, coordinator, process, what = sys.argv[1:]


def watch(progress, state):
    if progress.step == 12 and process == "1":
        if what == "error":
            raise RuntimeError("a fault of this process alone")
        if what == "hang":
            import time
            time.sleep(1000)


flags = LaunchFlags(coordinator, 2, int(process), owns_process=True)
train(load_config(config), workdir, launch=flags, watch=watch)
"""


def start_breaking(tmp_path, what, values=VALUES):
    config, port = write_config(tmp_path, values), free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-c", BREAKING, str(config), str(tmp_path / "run")),
                *(f"127.0.0.1:{port}", str(index), what),
            ],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]


@pytest.mark.slow
def test_an_error_of_one_process_ends_both(tmp_path):
    processes = start_breaking(tmp_path, "error")
    first, second = ended(processes, [EXIT_LOST, EXIT_FAILED], within=120)
    assert "Traceback" in second and "a fault of this process alone" in second
    assert "error: process 1 on" in first
    assert "failed at step 12" in first and "a fault of this process alone" in first


@pytest.mark.slow
def test_a_phase_that_hangs_shows_where(tmp_path):
    values = merged(VALUES, {"run": {**VALUES["run"], "stall_seconds": 40.0}})
    processes = start_breaking(tmp_path, "hang", values)
    codes = {EXIT_LOST, EXIT_STALLED}
    outputs = ended(processes, among=codes, within=240)
    assert EXIT_STALLED in {process.returncode for process in processes}, outputs
    assert "in watch" in outputs[1], "the stack of the thread that hangs"


@pytest.mark.sampled(1, "exhaustive")
@pytest.mark.slow
@pytest.mark.parametrize("made_anew", [False, True])
def test_a_run_folder_that_vanishes_ends_both(made_anew, tmp_path):
    processes, workdir = running(tmp_path)
    shutil.move(workdir, tmp_path / "elsewhere")
    if made_anew:  # As a save does that is in flight.
        (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
    # Both may see it, or one hears of it first.
    outputs = ended(processes, among={EXIT_BAD_INPUT, EXIT_LOST})
    assert EXIT_BAD_INPUT in {process.returncode for process in processes}, outputs
    for said in outputs:
        assert "error: process" in said and "cannot" in said and "at step" in said


@pytest.mark.slow
def test_settings_that_differ_are_named_with_both_values(tmp_path):
    workdir = tmp_path / "run"
    flags = ((), ("--config.optimizer.learning_rate=0.05",))
    processes = start_both(tmp_path, (workdir, workdir), flags=flags)
    for said in ended(processes, [EXIT_BAD_INPUT] * 2, within=90):
        assert "config.optimizer.learning_rate is '0.1' on process 0" in said
        assert "'0.05' on process 1" in said and "Traceback" not in said
    assert not (workdir / "config.json").exists()


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    workdirs = (tmp_path / "here", tmp_path / "there")
    processes = start_both(tmp_path, workdirs)
    for said in ended(processes, [EXIT_BAD_INPUT] * 2, within=90):
        assert "process 1: --workdir=" in said and "all hosts share" in said


def supervised(folder, values, workdir, index, port):
    """Process `index` of two, which is started again when it is lost."""
    config = write_config(folder, values)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "prunex_jax", "supervise", "--pause=1", "--"),
            *(sys.executable, "-m", "prunex_jax.train", f"--config={config}"),
            *(f"--workdir={workdir}", f"--coordinator=127.0.0.1:{port}"),
            *("--num_processes=2", f"--process_id={index}"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_supervised_processes_start_again_and_end_as_if_nothing_was(tmp_path):
    """A killed process takes the other one along; both come back and finish."""
    values = merged(VALUES, {"run": {**VALUES["run"], "steps": 300}})
    port, workdir = free_port(), tmp_path / "run"
    supervisors = [supervised(tmp_path, values, workdir, i, port) for i in range(2)]
    wait_for_rows(supervisors[0], workdir, 8)
    subprocess.run(["pkill", "-KILL", "-P", str(supervisors[1].pid)], check=True)
    outputs = [process.communicate(timeout=200)[0] for process in supervisors]
    assert [process.returncode for process in supervisors] == [0, 0], outputs
    assert "signal SIGKILL" in outputs[1]
    assert f"exit code {EXIT_LOST}" in outputs[0] and "resumed at step" in outputs[0]

    undisturbed = start_both(tmp_path, (tmp_path / "other",) * 2, (values, values))
    for process in undisturbed:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
    rows = [rows_of(folder)[-1] for folder in (workdir, tmp_path / "other")]
    same = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
    assert same[0] == same[1]


@pytest.mark.slow
def test_a_run_goes_on_with_those_who_are_left(tmp_path):
    """One of two is lost for good: the other restarts alone, on its checkpoint."""
    run = {"steps": 300, "join_seconds": 5, "min_processes": 1}
    values = merged(VALUES, {"run": {**VALUES["run"], **run}})
    port, workdir = free_port(), tmp_path / "run"
    first = supervised(tmp_path, values, workdir, 0, port)
    flags = (f"--coordinator=127.0.0.1:{port}", "--num_processes=2", "--process_id=1")
    second = start(tmp_path, values, workdir, *flags)
    wait_for_rows(first, workdir, 8)
    second.kill()
    second.communicate()
    said, _ = first.communicate(timeout=200)
    assert first.returncode == 0, said
    assert "going on without process 1 of 2" in said
    assert "1 of 2 came, this is process 0 of them" in said
    assert "continues on 1 host x 2 devices instead of 2 x 2" in said or (
        "continues on 1 host instead of 2" in said
    )
    assert rows_of(workdir)[-1]["step"] == 300
