"""The job scripts of `examples/` under a real Slurm and a real Open MPI.

A cluster of two nodes on this machine; each node has a name, an address, four GPUs for
Slurm and two CPU devices for jax.
"""

import json
import re
import time

import pytest

from prunex_jax.base.command import EXIT_BAD_INPUT
from prunex_jax.compare.doctor import EXIT_UNWELL
from tests.helpers.common import ROOT
from tests.helpers.small_cluster import PATIENCE, small_cluster, why_not
from tests.helpers.tiny_runs import rows_of, settings, write_config

LACKING = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=LACKING)]
SCRIPT = str(ROOT / "examples" / "slurm.sbatch")
LONG = settings(
    topology={"cpu_devices": 2, "layout": "host"},
    run={"steps": 20_000, "log_every_steps": 5, "checkpoint_every_steps": 10_000},
)
SHORT = settings(topology={"cpu_devices": 2, "layout": "host"}, run={"steps": 6})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    yield from small_cluster(tmp_path_factory.mktemp("cluster"))


def submit(cluster, folder, values, *flags):
    """Puts the example's script into the queue; returns the job and its run folder."""
    config, workdir = write_config(folder, values), folder / "run"
    log = f"--output={folder}/log"
    given = {"CONFIG": str(config), "WORKDIR": str(workdir)}
    job = cluster.submit("--gpus-per-node=4", log, *flags, SCRIPT, **given)
    return job, workdir


def wait_for_steps(cluster, job, workdir, log, past=0):
    """Waits until a job has trained beyond a step."""
    deadline, metrics = time.monotonic() + PATIENCE, workdir / "metrics.jsonl"
    while not (
        metrics.exists()
        and metrics.read_text().endswith("\n")
        and rows_of(workdir)[-1]["step"] > past
    ):
        state = cluster.state_of(job).get("JobState")
        said = log.read_text() if log.exists() else ""
        assert state in ("PENDING", "RUNNING", "CONFIGURING"), f"{state}\n{said}"
        assert time.monotonic() < deadline, said
        time.sleep(0.3)


def stops(log):
    """Steps at which a run was stopped and saved."""
    return [int(s) for s in re.findall(r"stopped at step (\d+) of", log.read_text())]


@pytest.mark.rotates
def test_a_job_that_reaches_its_limit_saves_and_goes_on_from_the_queue(
    cluster, tmp_path
):
    """Slurm's own warning, the exit code, the queue, and the rest of the run."""
    job, workdir = submit(cluster, tmp_path, LONG, "--time=30")
    log = tmp_path / "log"
    wait_for_steps(cluster, job, workdir, log)
    assert cluster.run("scontrol", "update", f"jobid={job}", "TimeLimit=1").stdout == ""
    requeued = cluster.wait_for(job, "PENDING")
    assert requeued["Restarts"] == "1"
    text = log.read_text()
    assert "Slurm job" in text and "2 hosts" in text and "task 0 of 2" in text
    (step,) = stops(log)
    assert 0 < step < 20_000

    # It starts by itself: told to start now, it would be ended by what its node still
    # says of the first start.
    update = ("scontrol", "update", f"jobid={job}", "TimeLimit=30")
    assert cluster.run(*update).stdout == ""
    wait_for_steps(cluster, job, workdir, log, past=step)
    assert rows_of(workdir)[-1]["step"] > step

    assert cluster.run("scancel", job).returncode == 0
    cluster.wait_for(job, "CANCELLED")
    _, again = stops(log)
    assert step < again < 20_000, "cancelled, and saved as well"
    assert str(again) in {path.name for path in (workdir / "checkpoints").iterdir()}
    assert not (workdir / "summary.json").exists()


def test_steps_side_by_side_in_one_job_are_two_runs(cluster, tmp_path):
    config = write_config(tmp_path, SHORT)
    train = f"srun --overlap -n2 -N2 python -m prunex_jax.train --config={config}"
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"{train} --workdir=one > one.log 2>&1 & first=$!\n"
        f"{train} --workdir=two > two.log 2>&1 & second=$!\n"
        "wait $first && wait $second\n"
    )
    job = cluster.submit("-N2", "-n4", f"--chdir={tmp_path}", str(script))
    found = cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT")
    said = [(tmp_path / f"{name}.log").read_text() for name in ("one", "two")]
    assert found["JobState"] == "COMPLETED", "\n".join(said)
    for text in said:
        assert "task 0 of 2" in text and "2 hosts" in text
    started, ended = (
        [(tmp_path / run / file).stat().st_mtime for run in ("one", "two")]
        for file in ("config.json", "summary.json")
    )
    assert max(started) < min(ended), "one after the other"


def test_gpus_that_two_tasks_are_bound_to_are_refused(cluster, tmp_path):
    config = write_config(tmp_path, settings())
    # As where jax[cuda13] is installed; no driver is asked before the refusal.
    plugin = tmp_path / "plugin" / "cuda-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cuda\nVersion: 1.0\n"
    )
    (plugin / "entry_points.txt").write_text("[jax_plugins]\nxla_cuda = no.module\n")
    bound = ("srun", "-wn1", "-n2", "--gpus-per-node=4", "--gpu-bind=mask_gpu:0x3,0x6")
    python = (*bound, "python", "-m")
    train = ("prunex_jax.train", f"--config={config}", f"--workdir={tmp_path}/run")
    refusal = "GPU 1 of n1 is taken by process 0 and by process 1"
    done = cluster.run(*python, *train, PYTHONPATH=f"{ROOT}:{plugin.parent}")
    assert done.returncode == EXIT_BAD_INPUT, done.stdout
    assert f"error: {refusal}" in done.stdout
    doctor = ("prunex_jax", "doctor")
    done = cluster.run(*python, *doctor, PYTHONPATH=f"{ROOT}:{plugin.parent}")
    assert done.returncode == EXIT_UNWELL, done.stdout
    assert f"FAILED   processes: {refusal}" in done.stdout


def test_mpirun_starts_a_process_on_each_machine(cluster, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in cluster.nodes))
    config = write_config(tmp_path, SHORT)
    done = cluster.run(
        *("shell-on", cluster.nodes[0], "bash", str(ROOT / "examples" / "openmpi.sh")),
        CONFIG=str(config),
        WORKDIR=str(tmp_path / "run"),
        HOSTFILE=str(hostfile),
        **cluster.for_mpirun,
    )
    assert done.returncode == 0, done.stdout
    assert "Open MPI, rank 0 of 2" in done.stdout and "2 hosts" in done.stdout
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.rotates
def test_a_drill_runs_in_tasks_of_slurm(cluster, tmp_path):
    """Every task does what is drilled to a process of its own."""
    workdir = tmp_path / "drill"
    drill = ("prunex_jax", "drill", f"--workdir={workdir}", "--faults=kill,term")
    done = cluster.run("srun", "-N2", "-n2", "python", "-m", *drill)
    assert done.returncode == 0, done.stdout
    rows = json.loads((workdir / "drill.json").read_text())["faults"]
    assert [row["fault"] for row in rows] == ["kill", "term"]
    assert all(row["same"] and not row["problems"] for row in rows), rows
