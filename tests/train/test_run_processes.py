"""Runs of several processes: they give what one process gives, and end together."""

import json
import signal

import jax
import numpy as np
import optax
import pytest

from prunex_jax.base.command import EXIT_STOPPED
from prunex_jax.mesh import make_topology
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.records.checkpoint import Checkpointer
from tests.helpers.tiny_runs import (
    ROUNDING,
    merged,
    rows_of,
    settings,
    start,
    start_two,
    wait_for_rows,
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("method", "shard"),
    [
        pytest.param("hsadmm", "none", marks=pytest.mark.slow),
        pytest.param("hsadmm", "state", marks=pytest.mark.slow),
        pytest.param("dense", "none", marks=pytest.mark.rotates),
    ],
)
def test_two_processes_equal_two_simulated_hosts(method, shard, tmp_path):
    """Real processes joined by gloo give the parameters of one process."""
    values = settings(
        method={"name": method},
        run={"steps": 8, "checkpoint_every_steps": 0},
        topology={"cpu_devices": 4, "shard": shard},
        # Larger steps blow rounding up: at 0.1 it grows fivefold in every step.
        optimizer={"learning_rate": 0.001},
        data={"batch_size": 64},
    )
    per_process = merged(values, {"topology": {"cpu_devices": 2, "layout": "process"}})
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
            state, _ = checkpointer.restore(
                experiment.current.programs.abstract_state()
            )
        states.append(experiment.current.programs.network(state))
    born = experiment.current.programs.init(jax.random.key(config.seed))
    start_of_both, _ = experiment.current.programs.network(born)
    (single, _), (double, _) = states
    moved = optax.tree.norm(optax.tree.sub(single, start_of_both))
    apart = optax.tree.norm(optax.tree.sub(single, double))
    assert float(apart) < ROUNDING * float(moved)
    for one_leaf, two_leaf in zip(*map(jax.tree.leaves, (single, double)), strict=True):
        np.testing.assert_array_equal(one_leaf == 0, two_leaf == 0, "other channels")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_schedulers_signal_to_one_process_stops_all(tmp_path):
    """As those that drills send, of which this is none."""
    values = settings(
        topology={"cpu_devices": 2, "layout": "process"},
        run={"steps": 5000, "checkpoint_every_steps": 0},
    )
    processes = start_two(tmp_path, values, tmp_path / "run")
    wait_for_rows(processes[0], tmp_path / "run", 2)
    processes[1].send_signal(signal.SIGUSR1)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [EXIT_STOPPED, EXIT_STOPPED], outputs
    assert "stopped at step" in outputs[0]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]


@pytest.mark.rotates
def test_compiled_programs_of_every_process_are_found_and_are_the_same(tmp_path):
    """A run of two processes: without kept programs, keeping them, and from them."""
    kept = tmp_path / "kept"
    runs, programs = [], []
    for name, where in (("off", "off"), ("cold", str(kept)), ("warm", str(kept))):
        values = settings(
            run={"steps": 8, "checkpoint_every_steps": 0, "compile_cache": where},
            topology={"cpu_devices": 2, "layout": "process"},
        )
        processes = start_two(tmp_path, values, tmp_path / name)
        outputs = [process.communicate(timeout=500)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        rows = [
            *rows_of(tmp_path / name),
            json.loads((tmp_path / name / "summary.json").read_text()),
        ]
        runs.append([{k: v for k, v in r.items() if "second" not in k} for r in rows])
        entries = sorted(kept.rglob("*-cache"))
        programs.append({path: path.stat().st_mtime_ns for path in entries})
    assert runs[0] == runs[1] == runs[2]
    without, cold, warm = programs
    assert not without and len(cold) > 20
    assert warm == cold, "something was compiled again"
