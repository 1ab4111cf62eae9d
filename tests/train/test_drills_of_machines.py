"""Faults of disks, files and links while two processes train: all end, and say why.

As in `test_drills`, with what a machine rather than the program does wrong.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

from prunex_jax.base.command import EXIT_BAD_INPUT, EXIT_LOST
from prunex_jax.compare.drill.sandbox import sandbox_kind
from tests.helpers.common import ROOT, outputs_of, processes_with
from tests.helpers.image_folders import CLASSES, break_file, write_images
from tests.helpers.tiny_runs import merged, rows_of, wait_for_rows, write_config
from tests.train.test_drills import VALUES, ended, running, start_both
from tests.train.test_language import SETTINGS as LANGUAGE


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch):
    """Whatever a test starts has ended with it, workers of loaders as well."""
    token = str(uuid.uuid4())
    monkeypatch.setenv("TEST_TOKEN", token)
    yield
    deadline = time.monotonic() + 15
    while left := processes_with(token):
        assert time.monotonic() < deadline, f"{left} still live"
        time.sleep(0.1)


def stop_soon(processes):
    """Ends processes that train as a scheduler does; what they have said."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    return outputs_of(processes, 120)


@pytest.mark.rotates
def test_a_full_disk_of_process_1_ends_both_and_the_restart_goes_on(tmp_path):
    """Of process 0, which writes the rows as well, drills make one."""
    # The save of step 400 is the first thing to be written after the row of step 250.
    run = {"log_every_steps": 250, "checkpoint_every_steps": 200}
    values = merged(VALUES, {"run": run})
    processes, workdir = running(tmp_path, values, rows=1)
    # From now on no file of it can grow, as on a full disk.
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (0, 0))
    outputs = ended(processes, [EXIT_LOST, EXIT_BAD_INPUT])
    for said in outputs:
        found = re.search(r"error: process 1 on .* failed at step (\d+)", said)
        assert found and "cannot write the checkpoint of step 400" in said, said
        assert int(found[1]) < 600, "noticed by the next save only"
    assert "File too large" in outputs[1] and "free space" in outputs[1]
    again = start_both(tmp_path, (workdir, workdir))
    try:
        wait_for_rows(again[0], workdir, 4)
    finally:
        outputs = stop_soon(again)
    assert "resumed at step 200" in outputs[0]


def own_folders(tmp_path, make):
    """Data in a place of the same name on both machines: here, their folders."""
    for index in range(2):
        own = tmp_path / f"process{index}"
        own.mkdir()
        make(own)
    return tmp_path / "process1"


def cut(file):
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)
    return file


@pytest.mark.slow
def test_images_cut_on_one_machine_are_named_and_workers_end(tmp_path):
    second = own_folders(tmp_path, lambda own: write_images(own / "photos", 30))
    data = {"name": "folder", "dir": "photos", "loader": "grain", "num_workers": 1}
    values = merged(VALUES, {"data": {**data, "augment": "none", "batch_size": 16}})
    processes, _ = running(tmp_path, values, rows=2)
    for name in CLASSES:
        for file in (second / "photos" / name).iterdir():
            break_file(file)
    first, said = ended(processes, [EXIT_LOST, EXIT_BAD_INPUT])
    assert "error: process 1 on" in said and "photos/" in said and "is broken" in said
    assert "error: process 1 on" in first and "is broken" in first


@pytest.mark.rotates
def test_tokens_cut_on_one_machine_are_named(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 90, 90_000).astype("<u2")
    second = own_folders(tmp_path, lambda own: tokens.tofile(own / "tokens.bin"))
    data = {"name": "tokens", "dir": "tokens.bin", "vocabulary": 100}
    changes = {name: VALUES[name] for name in ("topology", "run")}
    values = merged(LANGUAGE, {**changes, "data": data})
    processes, _ = running(tmp_path, values, rows=2)
    cut(second / "tokens.bin")
    for said in ended(processes, [EXIT_LOST, EXIT_BAD_INPUT]):
        assert "error: process 1 on" in said and "put the whole file back" in said
        assert "tokens.bin has 90000 bytes and had 180000" in said


@pytest.mark.rotates
def test_arrays_cut_on_one_machine_before_a_restart_are_named_by_both(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (300, 8, 8, 1), np.uint8)
    labels = np.arange(300) % 3

    def write(own):
        np.savez(own / "x.npz", x_train=images, y_train=labels)

    second = own_folders(tmp_path, write)
    data = {"name": "npz", "dir": "x.npz", "augment": "none"}
    values = merged(VALUES, {"data": data})
    processes, workdir = running(tmp_path, values, rows=2)
    stop_soon(processes)
    cut(second / "x.npz")
    again = start_both(tmp_path, (workdir, workdir), (values, values))
    for said in ended(again, [EXIT_BAD_INPUT] * 2, within=90):
        assert "process 1: " in said and "x.npz cannot be read" in said
        assert "Traceback" not in said


IN_SANDBOX = """
import sys
from prunex_jax.compare.drill.sandbox import run_in_sandbox
sys.exit(run_in_sandbox([sys.executable, "-c", *sys.argv[1:]]))
"""


def found_in_sandbox(script, values, folder, timeout):
    """What a script about hosts in namespaces prints last, as JSON."""
    kind, reason = sandbox_kind()
    if not kind:
        pytest.skip(f"no network namespaces here: {reason}")
    config = write_config(folder, values)
    done = subprocess.run(
        [
            *(sys.executable, "-c", IN_SANDBOX, script),
            *(str(config), str(folder / "run")),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


FIRST_HOST_LOST = """
import json, os, pathlib, signal, subprocess, sys, time
from prunex_jax.compare.drill.hosts import NamespaceHosts

config, workdir = sys.argv[1:]
metrics = pathlib.Path(workdir, "metrics.jsonl")
train = [sys.executable, "-m", "prunex_jax.train", f"--config={config}"]
train += [f"--workdir={workdir}", "--num_processes=3"]
supervise = [sys.executable, "-m", "prunex_jax", "supervise", "--pause=1", "--"]

def rows():
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0

def start(hosts, host, *before):
    command = [*before, *train, f"--coordinator={hosts.address(0)}:5000"]
    return subprocess.Popen(
        hosts.command(host, [*command, f"--process_id={host}"]),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )

with NamespaceHosts(3) as hosts:
    processes = [start(hosts, host, *supervise) for host in range(3)]
    deadline = time.monotonic() + 150
    while rows() < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(processes[0].pid, signal.SIGKILL)
    processes[0].communicate()
    outputs = [process.communicate(timeout=240)[0] for process in processes[1:]]
    codes = [process.returncode for process in processes[1:]]
    first = start(hosts, 0)
    said = first.communicate(timeout=60)[0]
    print(json.dumps([codes, outputs, first.returncode, said]))
"""


@pytest.mark.rotates
def test_the_others_go_on_without_the_host_of_process_0(tmp_path):
    """Its machine is lost for good; when it comes back alone, it is refused."""
    run = {"steps": 400, "join_seconds": 10, "min_processes": 2}
    # 42 examples divide among 6 devices, and 40 of them among the 4 that are left.
    changes = {"run": {**VALUES["run"], **run}, "data": {"batch_size": 42}}
    codes, outputs, code, said = found_in_sandbox(
        FIRST_HOST_LOST, merged(VALUES, changes), tmp_path, 500
    )
    assert codes == [0, 0], outputs
    assert "the others meet without it" in outputs[0]
    assert "going on without process 0 of 3" in outputs[0]
    assert "2 of 3 came, this is process 0 of them" in outputs[0]
    assert "resumed at step" in outputs[0] and "(and 2 left out)" in outputs[0]
    assert rows_of(tmp_path / "run")[-1]["step"] == 400
    held = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert held["addresses"] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert code == EXIT_BAD_INPUT and "process 1, 2 of 3 did not come" in said
