"""Whole runs: what they leave behind, and that nothing can make them differ."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from tiny_runs import merged

from prunex_jax.checkpoint import Checkpointer
from prunex_jax.config import resolve_config
from prunex_jax.errors import TrainingDivergedError, UserError
from prunex_jax.experiment import make_experiment
from prunex_jax.metrics import SUMMARY_KEYS
from prunex_jax.run import train
from prunex_jax.topology import make_topology

ROOT = Path(__file__).parent.parent
# Two processes split their matrix products otherwise than one: distance of the results
# over the distance that training went. Anything but rounding makes it nearly 1.
ROUNDING = 1e-3

SETTINGS = {
    "topology": {"layout": "2"},
    "data": {"name": "digits", "batch_size": 32, "augment": "shift"},
    "model": {"name": "resnet20", "width": 0.5},
    "sparsity": {"num_stairs": 2},
    "run": {"steps": 26, "log_every_steps": 3, "checkpoint_every_steps": 5},
}


def settings(**changes):
    """The small experiment, with some sections changed."""
    return merged(SETTINGS, changes)


def write_config(folder: Path, values: dict) -> Path:
    """A config file that the command line can load."""
    path = folder / "settings.py"
    path.write_text(
        "from prunex_jax.config import default_config\n\n\n"
        "def get_config():\n"
        "    config = default_config()\n"
        f"    config.update({values!r})\n"
        "    return config\n"
    )
    return path


def start(folder: Path, values: dict, workdir: Path, *flags: str) -> subprocess.Popen:
    """Starts the command line in another process."""
    command = [sys.executable, "-W", "error", "-m", "prunex_jax.train"]
    command += [f"--config={write_config(folder, values)}", f"--workdir={workdir}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *flags],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(folder: Path, values: dict, workdir: Path) -> list[subprocess.Popen]:
    """Starts two processes that find each other on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        start(folder, values, workdir, *shared, f"--process_id={index}")
        for index in range(2)
    ]


def rows_of(workdir: Path) -> list[dict]:
    """The logged rows of a run."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def final_params(values: dict, workdir: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, read in this process."""
    config = resolve_config(values)
    experiment = make_experiment(config, make_topology(config.topology.layout))
    with Checkpointer(workdir / "checkpoints", keep=9) as checkpointer:
        state, extra = checkpointer.restore(experiment.programs.abstract_state())
    assert extra["step"] == config.run.steps, "the run has not ended"
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """One run without interruption, in this process."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return train(SETTINGS, workdir), workdir


def test_summary_says_what_the_contract_asks(whole_run):
    result, workdir = whole_run
    summary = json.loads((workdir / "summary.json").read_text())
    assert set(SUMMARY_KEYS) <= set(summary)
    assert (summary["hosts"], summary["devices_per_host"]) == (2, 4)
    assert summary["steps"] == 26
    assert summary["num_rounds"] == 7, "six whole rounds and a short one at the end"
    assert summary["params_kept"] == sum(
        leaf.size for leaf in jax.tree.leaves(result.network.params)
    )
    assert summary["params_kept"] / summary["params_dense"] < 0.3
    assert summary["channel_sparsity"] == 0.5
    assert summary["shrink_max_abs_error"] < 1e-4
    # The compact payload is exactly the parameters that are kept.
    assert summary["host_payload_bytes_steady"] == 4 * summary["params_kept"]


def test_bytes_add_up_from_the_formulas(whole_run):
    result, _ = whole_run
    summary = result.summary
    # Payload 2 (M - 1) / M = 1 per host; padded to a multiple of four devices.
    smallest = summary["host_payload_bytes_steady"] * summary["num_rounds"]
    dense = summary["params_dense"] * 4 * summary["num_rounds"]
    assert smallest < summary["host_wire_bytes"] < dense
    assert summary["host_wire_bytes_dense"] == pytest.approx(
        4 * summary["params_dense"] * summary["steps"], rel=1e-4
    )


def test_metrics_are_one_row_per_logged_step(whole_run):
    _, workdir = whole_run
    rows = rows_of(workdir)
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 21, 24, 26]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"host_drift", "primal_residual", "sparsity"} <= set(rows[0])


def test_same_command_again_changes_nothing(whole_run):
    result, workdir = whole_run
    again = train(SETTINGS, workdir)
    assert again.summary["test_loss"] == result.summary["test_loss"]
    assert again.summary["num_rounds"] == result.summary["num_rounds"]


@pytest.mark.slow
def test_resumed_run_equals_one_never_stopped(whole_run, tmp_path):
    """Asked to stop, then killed, then finished: the same bits as in one go."""
    _, reference_dir = whole_run
    values = settings(topology={"cpu_devices": 8})
    workdir = tmp_path / "run"

    stopped = start(tmp_path, values, workdir)
    wait_for_rows(stopped, workdir, 2)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 0, output
    assert "stopped at step" in output or "done" in output

    killed = start(tmp_path, values, workdir)
    wait_for_rows(killed, workdir, 5)
    killed.kill()
    killed.communicate(timeout=120)
    assert not (workdir / "summary.json").exists(), "it was to be killed before the end"

    finished = start(tmp_path, values, workdir)
    output, _ = finished.communicate(timeout=240)
    assert finished.returncode == 0, output
    assert "resumed at step" in output

    expected = final_params(SETTINGS, reference_dir)
    actual = final_params(SETTINGS, workdir)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)
    steps = [row["step"] for row in rows_of(workdir)]
    assert steps == [3, 6, 9, 12, 15, 18, 21, 24, 26], "no row twice, none missing"


def wait_for_rows(process: subprocess.Popen, workdir: Path, count: int) -> None:
    """Waits until a run has logged, and fails with its output if it ends before."""
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= count):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no progress within four minutes"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("hsadmm", marks=pytest.mark.slow),
        pytest.param("dense", marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_equal_two_simulated_hosts(method, tmp_path):
    """Real processes joined by gloo give the parameters of one process."""
    values = settings(
        method={"name": method},
        run={"steps": 8, "checkpoint_every_steps": 0},
        topology={"cpu_devices": 4},
        # Larger steps blow rounding up: at 0.1 it grows fivefold in every step.
        optimizer={"learning_rate": 0.001},
        data={"batch_size": 64},
    )
    per_process = {**values, "topology": {"cpu_devices": 2, "layout": "process"}}
    processes = start_two(tmp_path, per_process, tmp_path / "two")
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 processes" in outputs[0] and "done" in outputs[0]

    one = start(tmp_path, values, tmp_path / "one")
    output, _ = one.communicate(timeout=300)
    assert one.returncode == 0, output

    # Read back on the first four devices of this process, as 2 hosts x 2 devices.
    config = resolve_config(values)
    topology = make_topology("2", devices=jax.devices()[:4])
    experiment = make_experiment(config, topology)
    states = []
    for name in ("one", "two"):
        with Checkpointer(tmp_path / name / "checkpoints", keep=2) as checkpointer:
            state, _ = checkpointer.restore(experiment.programs.abstract_state())
        states.append(experiment.programs.network(state))
    born = experiment.programs.init(jax.random.key(config.seed))
    start_of_both, _ = experiment.programs.network(born)
    (single, _), (double, _) = states
    moved = optax.tree.norm(optax.tree.sub(single, start_of_both))
    apart = optax.tree.norm(optax.tree.sub(single, double))
    assert float(apart) < ROUNDING * float(moved)
    for one_leaf, two_leaf in zip(*map(jax.tree.leaves, (single, double)), strict=True):
        np.testing.assert_array_equal(one_leaf == 0, two_leaf == 0, "other channels")


def test_processes_refuse_together(tmp_path):
    """What only process 0 can see ends all of them, with one line each."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("not a run")
    values = settings(topology={"cpu_devices": 2, "layout": "process"})
    processes = start_two(tmp_path, values, tmp_path / "run")
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert all("error: process 0: --workdir" in output for output in outputs)
    assert not any("Traceback" in output for output in outputs)


VARIANTS = {
    "global budget": {"sparsity": {"budget": "global"}},
    "norms over a host": {"model": {"norm_scope": "host"}},
    "paper, copy per device": {
        "method": {
            "hsadmm": {
                "preset": "paper",
                "device_level": "consensus",
                "adapt": "residual",
            }
        }
    },
    "leaky, adamw, float16 wire": {
        "method": {"hsadmm": {"preset": "leaky"}, "wire_dtype": "float16"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 1.0},
    },
    "int8 wire in buckets": {"method": {"wire_dtype": "int8", "bucket_bytes": 4000}},
    "bfloat16, one host": {
        "model": {"compute_dtype": "bfloat16"},
        "topology": {"layout": "1"},
    },
    "dense, eight hosts": {"method": {"name": "dense"}, "topology": {"layout": "8"}},
    "dense, flat int8": {
        "method": {"name": "dense", "dense": {"levels": "flat"}, "wire_dtype": "int8"}
    },
    "vgg": {
        "model": {"name": "vgg16", "width": 0.125},
        "data": {"name": "synthetic", "image_size": 32},
    },
}


QUICKER = ("int8 wire in buckets", "dense, eight hosts", "vgg")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow if name in QUICKER else pytest.mark.exhaustive,
        )
        for name in VARIANTS
    ],
)
def test_variants_train_to_the_end(variant, tmp_path):
    values = settings(**VARIANTS[variant])
    result = train(values, tmp_path / "run")
    summary = result.summary
    assert np.isfinite(summary["test_loss"])
    assert summary["shrink_max_abs_error"] < 0.05, "bfloat16 rounds to 3 digits"
    if summary["method"] == "dense":
        assert summary["params_kept"] == summary["params_dense"]
    else:
        assert summary["params_kept"] / summary["params_dense"] < 0.4
    if summary["hosts"] == 1:
        assert summary["host_wire_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_one_process_stops_all(number, tmp_path):
    values = settings(
        topology={"cpu_devices": 2, "layout": "process"},
        run={"steps": 5000, "checkpoint_every_steps": 0},
    )
    processes = start_two(tmp_path, values, tmp_path / "run")
    wait_for_rows(processes[0], tmp_path / "run", 2)
    processes[1].send_signal(number)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "stopped at step" in outputs[0]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]


def test_divergence_names_the_step_and_keeps_the_last_checkpoint(tmp_path):
    values = settings(
        optimizer={"learning_rate": 1e30, "warmup_share": 0.5},
        run={"checkpoint_every_steps": 1},
    )
    with pytest.raises(TrainingDivergedError, match=r"since step \d+; the checkpoint"):
        train(values, tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_masks_moving_between_rounds_compile_nothing(whole_run):
    """One exchange per keep count and kind, however often the masks move."""
    result, _ = whole_run
    # init, local step, report, clear, network, evaluate; and exchanges: dense, two
    # stairs at most, freeze, frozen.
    assert result.summary["num_compilations"] <= 11


def test_another_run_in_the_folder_is_refused(whole_run):
    _, workdir = whole_run
    with pytest.raises(UserError, match="seed"):
        train({**SETTINGS, "seed": 1}, workdir)
