"""Two processes that refuse to start together, or start again: all say why.

What happens to a run when a process is lost is tried by `prunex-jax drill`, in
`tests/compare/test_drill.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from prunex_jax.base.command import EXIT_BAD_INPUT, EXIT_LOST
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


@pytest.mark.rotates
def test_a_run_folder_that_vanishes_and_is_made_anew_ends_both(tmp_path):
    """As a save makes it anew that is in flight; drills move folders away."""
    processes, workdir = running(tmp_path)
    shutil.move(workdir, tmp_path / "elsewhere")
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


# Ends a process like a power cut, where all begin to write a checkpoint.
DIES_IN_SAVE = """
import os
import signal

import jax
from orbax.checkpoint import CheckpointManager

save = CheckpointManager.save


def save_or_die(self, step, *args, **options):
    if step >= 20 and jax.process_index() == {process}:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, step, *args, **options)


CheckpointManager.save = save_or_die
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [1, 0])
def test_a_process_that_dies_in_a_save_is_named_by_the_other(lost, tmp_path):
    """It is lost; the disk is not full, and the other one has done nothing wrong."""
    plugin, workdir = tmp_path / "dies.py", tmp_path / "run"
    plugin.write_text(DIES_IN_SAVE.format(process=lost))
    values = merged(VALUES, {"method": {"plugins": (str(plugin),)}})
    processes = start_both(tmp_path, (workdir, workdir), (values, values))
    codes = [EXIT_LOST, EXIT_LOST]
    codes[lost] = -signal.SIGKILL
    said = ended(processes, codes, within=2 * SOON)[1 - lost]
    (line,) = (each for each in said.splitlines() if each.startswith("error: "))
    assert f"process {lost}" in line and "has not answered for" in line, said
    assert "Traceback" not in said and "free space" not in said
    assert saved(workdir) == [10]


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


@pytest.mark.rotates
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
