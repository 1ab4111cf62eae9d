"""The job scripts in `examples/`, as far as a machine without their schedulers can."""

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys

import pytest

from prunex_jax.base.command import (
    EXIT_FAILED,
    EXIT_LOST,
    EXIT_STALLED,
    EXIT_STOPPED,
    run_command,
)
from prunex_jax.processes import LaunchFlags
from prunex_jax.processes.environments import Probes
from prunex_jax.processes.launcher import detect_launch
from prunex_jax.train.commands.command import COMMAND, load_config
from tests.helpers.common import ROOT
from tests.helpers.tiny_runs import settings, write_config

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(
    path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch")
)
# A process was lost, failed or halted, or a signal has ended it.
LOST = (EXIT_LOST, EXIT_FAILED, EXIT_STALLED, 137)
# Writes the arguments it was called with, and ends as it is told.
RECORDING = """#!{python}
import json, os, sys
with open(sys.argv[0] + ".called", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("CODE", "0")))
"""
# As srun on one node: two tasks, each with what Slurm would tell it.
SRUN = """#!{python}
import os, subprocess, sys
processes = []
for rank in "01":
    environ = dict(
        os.environ, SLURM_STEP_NODELIST="localhost", SLURM_STEP_ID="0",
        SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2", SLURM_PROCID=rank,
        SLURM_LOCALID=rank, SLURM_NODEID="0", SLURM_STEP_TASKS_PER_NODE="2",
    )
    processes.append(subprocess.Popen([{python!r}, *sys.argv[2:]], env=environ))
sys.exit(max(process.wait() for process in processes))
"""


def write_program(folder, name, text):
    path = folder / name
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_script(script, folder, **environ):
    """Runs a script with the programs of a folder in front of all others."""
    path = f"{folder}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **environ}
    return subprocess.run(
        ["bash", str(EXAMPLES / script)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def calls_of(folder, name):
    return [
        json.loads(line)
        for line in (folder / f"{name}.called").read_text().split("\n")
        if line
    ]


def check_trains(arguments):
    """Whether a command line after `prunex_jax.train` is understood."""
    found = []
    run = lambda values, settings: found.append(values)  # noqa: E731
    assert run_command(COMMAND, run, arguments) == 0
    assert load_config(found[0].config).data.name == "digits"
    assert found[0].workdir


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "-m prunex_jax.train --config=" in script.read_text()


@pytest.mark.parametrize(
    ("script", "launcher"),
    [("slurm.sbatch", "srun"), ("openmpi.sh", "mpirun"), ("torchrun.sh", "torchrun")],
)
def test_scripts_start_the_demo(script, launcher, tmp_path):
    write_program(tmp_path, launcher, RECORDING)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "prunex"}
    done = run_script(script, tmp_path, **slurm)
    assert done.returncode == 0, done.stderr
    (arguments,) = calls_of(tmp_path, launcher)
    check_trains(arguments[arguments.index("prunex_jax.train") + 1 :])
    assert re.fullmatch(r"(\S+ slots=\d+\n)+", (EXAMPLES / "hostfile").read_text())


@pytest.mark.parametrize(
    ("code", "restarts", "goes_on"),
    [
        *((code, 0, False) for code in (0, 1, 2)),
        *((code, 0, True) for code in (EXIT_STOPPED, *LOST)),
        *((code, 99, True) for code in LOST),
        *((code, 100, False) for code in LOST),
        (EXIT_STOPPED, 100, True),
    ],
)
def test_a_slurm_job_that_can_go_on_is_put_into_the_queue_again(
    code, restarts, goes_on, tmp_path
):
    write_program(tmp_path, "srun", RECORDING)
    write_program(tmp_path, "scontrol", RECORDING.replace('"CODE"', '"NONE"'))
    environ = {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "prunex", "CODE": str(code)}
    if restarts:
        environ["SLURM_RESTART_COUNT"] = str(restarts)
    assert run_script("slurm.sbatch", tmp_path, **environ).returncode == code
    was_requeued = (tmp_path / "scontrol.called").exists()
    assert was_requeued == goes_on
    if was_requeued:
        assert calls_of(tmp_path, "scontrol") == [["requeue", "42"]]


def test_slurm_warns_the_tasks_in_time():
    text = (EXAMPLES / "slurm.sbatch").read_text()
    (signal,) = re.findall(r"^#SBATCH --signal=(.*)$", text, re.M)
    assert re.fullmatch(r"USR1@\d{3}", signal), "B: would tell the shell only"
    assert re.search(r"^#SBATCH --requeue$", text, re.M)


@pytest.mark.slow
def test_the_slurm_script_trains_over_two_tasks(tmp_path):
    write_program(tmp_path, "srun", SRUN)
    values = settings(topology={"cpu_devices": 2, "layout": "process"})
    config = write_config(tmp_path, values)
    environ = {"SLURM_JOB_ID": "4211", "SLURM_JOB_NAME": "prunex"}
    done = run_script("slurm.sbatch", tmp_path, CONFIG=str(config), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Slurm job 4211, task 0 of 2" in done.stdout
    assert "2 processes, layout process" in done.stdout
    assert (tmp_path / "runs" / "prunex" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package", "more"),
    [
        ("submitit_job.py", "submitit", ["--cluster=local"]),
        ("ray_actors.py", "ray", []),
    ],
)
def test_two_processes_of_this_machine_are_one_run(script, package, more, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    values = settings(
        topology={"cpu_devices": 1, "layout": "process"},
        run={"steps": 6},
        method={"name": "dense"},
    )
    config = write_config(tmp_path, values)
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / script), f"--config={config}"),
            *(f"--workdir={tmp_path / 'run'}", "--hosts=2", *more),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["hosts"], summary["steps"]) == (2, 6)
    assert str(summary["test_accuracy"]) in done.stdout


def test_the_task_of_skypilot_is_one_run():
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    check_trains(task["run"].split()[3:])
    count = task["num_nodes"]
    starts = set()
    for rank in range(count):
        environ = {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{n + 1}" for n in range(count)),
            "SKYPILOT_NUM_NODES": str(count),
            "SKYPILOT_TASK_ID": "sky-prunex",
        }
        launch = detect_launch(environ, LaunchFlags(), Probes())
        assert (launch.num_processes, launch.process_id) == (count, rank)
        starts.add(launch.coordinator)
    assert len(starts) == 1
    # Checkpoints lie where all nodes see them.
    (place,) = task["volumes"]
    assert f"--workdir={place}/" in task["run"]


def test_the_train_job_of_kubeflow_is_one_run():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((EXAMPLES / "kubeflow.yaml").read_text())
    trainer, (patch,) = job["spec"]["trainer"], job["spec"]["runtimePatches"]
    assert trainer["command"] == ["python", "-m", "prunex_jax.train"]
    check_trains(trainer["args"])
    # Checkpoints lie where all pods see them.
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    # As the runtime calls its job and its container.
    assert (node["name"], container["name"]) == ("node", "node")
    assert mount["name"] == volume["name"]
    assert any(f"--workdir={mount['mountPath']}/" in each for each in trainer["args"])

    # What the runtime `jax-distributed` of Kubeflow Trainer 2.2 sets in a pod.
    name = job["metadata"]["name"]
    environ = {
        "JAX_NUM_PROCESSES": str(trainer["numNodes"]),
        "JAX_PROCESS_ID": "1",
        "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:6666",
        "JAX_COORDINATOR_PORT": "6666",
        "JAX_DISTRIBUTED_BACKEND": "gloo",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
    }
    launch = detect_launch(environ, LaunchFlags(), Probes())
    assert (launch.num_processes, launch.process_id) == (trainer["numNodes"], 1)
    assert launch.coordinator == environ["JAX_COORDINATOR_ADDRESS"]


def test_the_manifest_of_kubernetes_is_one_run():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    (container,) = pod["containers"]
    rules = spec["podFailurePolicy"]["rules"]
    by_action = {rule["action"]: rule["onExitCodes"] for rule in rules}
    assert by_action["Ignore"]["values"] == [EXIT_STOPPED]
    assert {rule["containerName"] for rule in by_action.values()} == {container["name"]}
    check_trains(container["args"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}

    # What a pod of it would find.
    environ = {entry["name"]: entry["value"] for entry in container["env"]}
    environ |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    full_name = f"{name}-1.{pod['subdomain']}.default.svc.cluster.local"
    probes = Probes(fqdn=lambda: full_name, has_module=lambda _: False)
    launch = detect_launch(environ, LaunchFlags(), probes)
    assert launch.num_processes == spec["completions"]
    assert launch.process_id == 1
    assert launch.coordinator == full_name.replace("-1.", "-0.", 1) + ":55527"


def test_the_image_has_all_that_it_needs():
    text = (EXAMPLES / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (.*) \S+$", text, re.M)
    names = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in names)
    assert {"prunex_jax", "configs", "pyproject.toml", "setup.py"} <= names
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    assert json.loads(entry) == ["python", "-m", "prunex_jax.train"]
