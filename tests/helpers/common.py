"""What many tests need: the repository, meshes, ports, scripts in other processes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from prunex_jax.base.trees import flatten_by_path
from prunex_jax.compare.subprocesses import free_port as free_port
from prunex_jax.mesh import MeshAxes
from prunex_jax.processes.registry import Roster

MESH = MeshAxes()
ROOT = Path(__file__).parents[2]


def make_mesh(num_hosts: int, devices_per_host: int) -> jax.sharding.Mesh:
    """A ('host', 'device') mesh over the first virtual devices."""
    count = num_hosts * devices_per_host
    devices = np.array(jax.devices()[:count]).reshape(num_hosts, devices_per_host)
    return jax.sharding.Mesh(devices, ("host", "device"))


def run_script(script: Path, **environment: str) -> str:
    """Runs a script as a stranger would, warnings as errors; returns its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def assert_close(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Trees are equal, up to a share of the largest number of each leaf, or of 1."""
    found, wanted = flatten_by_path(found), flatten_by_path(wanted)
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        leaf = np.asarray(leaf)
        allowed = tolerance * max(1.0, float(np.max(np.abs(leaf), initial=0.0)))
        np.testing.assert_allclose(found[path], leaf, atol=allowed, err_msg=path)


def outputs_of(processes: Sequence[subprocess.Popen], within: float) -> list[str]:
    """What processes have printed that end by themselves, each in so many seconds."""
    try:
        return [process.communicate(timeout=within)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def processes_with(token: str) -> list[str]:
    """Command lines of processes whose environment has the token."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and token in (entry / "environ").read_text():
                found.append((entry / "cmdline").read_text().replace("\0", " ")[-80:])
    return found


def everybody_is_there(coordinator: str, num_processes: int, process_id: int) -> Roster:
    """Stands for `register` where nobody is waited for."""
    return Roster(num_processes, process_id, coordinator)
