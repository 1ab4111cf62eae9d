"""The doctor finds what is wrong with machines, and leaves nothing behind."""

import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from prunex_jax.__main__ import main
from prunex_jax.compare import doctor
from tests.helpers.common import ROOT, free_port, make_mesh


def start_two(*flags, first=(), second=()):
    """Starts the command in two processes that find each other on this machine."""
    command = [
        *(sys.executable, "-m", "prunex_jax", "doctor"),
        f"--coordinator=127.0.0.1:{free_port()}",
        "--num_processes=2",
        "--layout=process",
        "--cpu_devices=2",
        "--seconds=1",
        *flags,
    ]
    return [
        subprocess.Popen(
            [*command, *own, f"--process_id={process}"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process, own in enumerate((first, second))
    ]


def process_found(**changes):
    """What a process finds out about itself."""
    versions = {"jax": "1", "jaxlib": "1", "python": "3", "prunex_jax": "1"}
    found = {
        "name": "node1",
        "address": "10.0.0.1",
        "versions": {**versions, "platform": "cpu"},
        "num_devices": 1,
        "num_gpus": 0,
    }
    return {**found, **changes}


@pytest.mark.slow
def test_one_process_is_well_and_the_folder_stays_as_it_was(tmp_path, capsys):
    workdir = tmp_path / "run"
    flags = ["--layout=2", "--seconds=1", f"--workdir={workdir}"]
    assert main(["doctor", *flags]) == 0
    printed = capsys.readouterr().out
    for item in ("devices", "versions", "clocks", "workdir", "sums", "exchange"):
        assert f"ok       {item}:" in printed
    assert "links of the host axis" in printed and "links of the device" in printed
    assert list(tmp_path.iterdir()) == []
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")
    assert main(["doctor", *flags]) == 0
    assert [path.name for path in workdir.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_two_processes_are_well(tmp_path):
    processes = start_two(f"--workdir={tmp_path / 'run'}")
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 processes" in outputs[0] and "FAILED" not in outputs[0]
    assert "is the same on 2 processes" in outputs[0]
    assert "Traceback" not in outputs[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rotates  # Waits for a file that never shows.
def test_a_folder_that_is_not_shared_fails_on_both(tmp_path):
    (tmp_path / "one").mkdir()
    processes = start_two(
        first=(f"--workdir={tmp_path / 'one'}",),
        second=(f"--workdir={tmp_path / 'other'}",),
    )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert "FAILED   workdir:" in outputs[0] and "that all hosts share" in outputs[0]
    assert [path.name for path in tmp_path.rglob("*")] == ["one"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_fails(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", f"--workdir={tmp_path / 'file' / 'run'}"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED   workdir:" in printed and "ok       sums" in printed


def test_processes_that_cannot_be_joined_fail(capsys):
    assert main(["doctor", "--layout=7"]) == 1
    assert "FAILED   processes: topology.layout=7" in capsys.readouterr().out
    assert main(["doctor", "--seconds=0"]) == 2


def test_other_versions_are_named_with_their_process():
    other = process_found(name="node2")
    other["versions"] = {**other["versions"], "jaxlib": "2"}
    verdict = doctor.judge_versions([process_found(), other])
    assert verdict.status == doctor.FAILED
    assert "jaxlib is 2 on process 1 (node2) and 1 on process 0" in str(verdict)
    assert doctor.judge_versions([process_found()] * 2).status == doctor.OK


def test_clocks_are_compared_by_the_best_reading():
    assert doctor.judge_clocks([[5.0, 9.0], [10.0, 10.1]]).status == doctor.OK
    verdict = doctor.judge_clocks([[5.0, 9.0], [10.0, 13.0]])
    assert verdict.status == doctor.WARNING
    assert "process 1 is 3.0 s ahead of process 0" in verdict.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_gpus": 4}, "jax uses the CPU"),
        (
            {"num_gpus": 4, "num_devices": 1, "versions": {"platform": "gpu"}},
            "2 processes on node1 use 2 of the 4 GPUs",
        ),
    ],
)
def test_idle_gpus_are_a_warning(changes, said):
    verdict = doctor.judge_devices([process_found(**changes)] * 2)
    assert verdict.status == doctor.WARNING and said in verdict.text


def test_one_process_per_gpu_is_well():
    own = process_found(num_gpus=1, versions={"platform": "gpu"})
    assert doctor.judge_devices([own] * 4).status == doctor.OK


def test_a_name_that_leads_to_the_machine_itself_is_a_warning_with_several():
    alone = [process_found(address="127.0.1.1")]
    assert doctor.judge_addresses(alone).status == doctor.OK
    both = [*alone, process_found(name="node2", address="10.0.0.2")]
    verdict = doctor.judge_addresses(both)
    assert verdict.status == doctor.WARNING and "node1 an address" in verdict.remedy


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, doctor.OK),
        ({"speed": 1e6}, doctor.WARNING),
        ({"free": 5e8}, doctor.WARNING),
        ({"free": 1e6, "speed": 0.0}, doctor.FAILED),
    ],
)
def test_full_and_slow_folders(changes, status):
    good = {"free": 1e12, "speed": 1e9}
    assert doctor.judge_speed([good, {**good, **changes}]).status == status
    assert doctor.judge_speed([good, {"error": "no"}]).status == doctor.FAILED


@pytest.mark.parametrize(
    ("checkpoint_bytes", "status", "said"),
    [
        (10**9, doctor.OK, "a checkpoint of 1.0 GB takes about 5.0 s"),
        (4 * 10**9, doctor.FAILED, "takes about 20.0 s; make room for 3 checkpoints"),
    ],
)
def test_a_folder_is_compared_with_what_checkpoints_need(
    checkpoint_bytes, status, said
):
    found = [{"free": 10e9, "speed": 1e8}] * 2
    verdict = doctor.judge_speed(found, checkpoint_bytes)
    assert verdict.status == status and said in str(verdict)
    slow = [{"free": 10e9, "speed": 1e6}] * 2
    verdict = doctor.judge_speed(slow, 10**9)
    assert verdict.status == doctor.WARNING and "save less often" in verdict.remedy
    assert doctor.judge_speed(slow, 10**7).status == doctor.OK
    full = [{"free": 1e6, "speed": 0.0}]
    assert doctor.judge_speed(full, 10**3).status == doctor.FAILED


def test_the_size_of_a_checkpoint_needs_a_folder(tmp_path, capsys):
    assert main(["doctor", "--checkpoint_bytes=1000"]) == 2
    assert "--checkpoint_bytes needs --workdir" in capsys.readouterr().err
    shared, disk = doctor._try_folder(tmp_path, 10**16)
    assert (shared.status, disk.status) == (doctor.OK, doctor.FAILED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_sums_and_exchanges_are_right_on_any_mesh(shape):
    mesh = make_mesh(*shape)
    assert doctor.check_sums(mesh).status == doctor.OK
    assert doctor.check_exchange(mesh).status == doctor.OK
    assert doctor.check_large_sums(mesh).status == doctor.OK


def test_wrong_numbers_fail(monkeypatch):
    monkeypatch.setattr(doctor, "mean_over_hosts", lambda x, axes: x + jnp.ones(()))
    verdict = doctor.check_sums(make_mesh(2, 2))
    assert verdict.status == doctor.FAILED and "sum over the host axis" in verdict.text
    verdict = doctor.check_exchange(make_mesh(2, 2))
    assert verdict.status == doctor.FAILED and "process 0" in verdict.text

    def wrong_in_one_place(x, axes):
        return x if len(x) < doctor._NUM_LARGE else x.at[-5].add(1.0)

    monkeypatch.setattr(doctor, "mean_over_hosts", wrong_in_one_place)
    verdict = doctor.check_large_sums(make_mesh(1, 2))
    assert verdict.status == doctor.FAILED and "4,194,304 numbers" in verdict.text
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "mean_over_devices", lambda x, axes: 3 * x)
    verdict = doctor.check_sums(make_mesh(2, 2))
    assert verdict.status == doctor.FAILED and "over the device axis" in verdict.text
