"""Whole runs in little time, in this process and in others."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tests.helpers.tiny_network  # noqa: F401
from prunex_jax.train.loop import Progress, Watch
from prunex_jax.train.steps.state import TrainState
from tests.helpers.common import ROOT, free_port

Settings = Mapping[str, Mapping[str, Any]]

# Two processes split their matrix products otherwise than one: distance of the results
# over the distance that training went. Anything but rounding makes it nearly 1.
ROUNDING = 1e-3

SETTINGS = {
    "topology": {"layout": "2"},
    "data": {"name": "digits", "batch_size": 32, "augment": "shift"},
    "model": {"name": "tiny"},
    "sparsity": {"num_stairs": 2},
    "run": {"steps": 26, "log_every_steps": 3, "checkpoint_every_steps": 5},
}


# On two simulated hosts: a stair, the freeze, and the cut at 60 %.
OVER_A_CUT = {
    "topology": {"layout": "2"},
    "method": {"hsadmm": {"sync_period": 2}},
    "sparsity": {
        "num_stairs": 1,
        "start_share": 0.1,
        "freeze_share": 0.4,
        "shrink_share": 0.6,
    },
    "run": {"log_every_steps": 5, "checkpoint_every_steps": 10},
}


def merged(settings: Settings, changes: Settings) -> dict[str, dict[str, Any]]:
    """Settings with some sections changed in part."""
    result = {section: dict(values) for section, values in settings.items()}
    for section, values in changes.items():
        result[section] = {**result.get(section, {}), **values}
    return result


def settings(**changes):
    """The small experiment, with some sections changed."""
    return merged(SETTINGS, changes)


# Two hosts of four devices; masks move in rounds 1 to 4, and channels go at step 24.
THROUGH_A_CUT = settings(
    method={"hsadmm": {"sync_period": 4}},
    sparsity={
        "sparsity": 0.5,
        "start_share": 0.1,
        "freeze_share": 0.5,
        "shrink_share": 0.6,
    },
    run={"steps": 40},
)


def write_config(folder: Path, values: dict) -> Path:
    """A config file that the command line can load, whole at any time.

    Processes of one run are given one file, and one may read it while it is written.
    """
    path = folder / "settings.py"
    unfinished = folder / f"settings-{uuid.uuid4()}"
    unfinished.write_text(
        "import tests.helpers.tiny_network\n"
        "from prunex_jax.train.build.config import default_config\n\n\n"
        "def get_config():\n"
        "    config = default_config()\n"
        f"    config.update({values!r})\n"
        "    return config\n"
    )
    return unfinished.replace(path)


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
    port = free_port()
    shared = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        start(folder, values, workdir, *shared, f"--process_id={index}")
        for index in range(2)
    ]


class StopAtOnce(Exception):
    """What `stop_after` ends a run by."""


def stop_after(step: int) -> Watch:
    """A watch that ends a run when so many steps are done, as a crash would."""

    def watch(progress: Progress, state: TrainState) -> None:
        del state
        if progress.step == step:
            raise StopAtOnce

    return watch


def rows_of(workdir: Path) -> list[dict]:
    """The logged rows of a run."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def wait_for_rows(process: subprocess.Popen, workdir: Path, count: int) -> None:
    """Waits until a run has logged, and fails with its output if it ends before."""
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= count):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no progress within four minutes"
        time.sleep(0.01)


def wait_for_checkpoint(process: subprocess.Popen, workdir: Path, step: int) -> None:
    """Waits until the checkpoint of a step, or of a later one, is complete."""
    deadline = time.monotonic() + 480
    while max(complete_steps(workdir), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no progress within eight minutes"
        time.sleep(0.005)


def complete_steps(workdir: Path) -> list[int]:
    """Steps whose checkpoints are complete."""
    manifests = (workdir / "checkpoints").glob("[0-9]*/manifest.json")
    return [int(p.parent.name) for p in manifests if p.parent.name.isdigit()]
