"""A dry run says what the run then does, and writes nothing."""

import itertools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.mesh import make_topology
from prunex_jax.train import train
from prunex_jax.train.build.config import resolve_config
from prunex_jax.train.build.experiment import make_experiment
from prunex_jax.train.commands.command import main
from prunex_jax.train.commands.dry_run import dry_run, find_needs
from prunex_jax.train.steps.compiled import shapes_of
from tests.helpers.common import free_port
from tests.helpers.gpu_programs import needs_compiler
from tests.helpers.tiny_runs import rows_of, settings, start, write_config


def saved_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_it_says_what_the_run_sends_and_saves(tmp_path, capsys):
    values = settings(
        method={"name": "hsadmm", "hsadmm": {"sync_period": 4}},
        sparsity={"num_stairs": 1, "shrink_share": 1.0},
        run={"steps": 24, "log_every_steps": 4, "checkpoint_every_steps": 0},
    )
    needs = dry_run(values, tmp_path / "run", how="measure")
    assert not (tmp_path / "run").exists()
    printed = capsys.readouterr().out
    assert "768 examples seen" in printed
    assert needs.step_seconds > 0 and needs.exchange_seconds > 0
    assert all(each.total > 0 and each.aliased > 0 for each in needs.memory)
    assert [each.program for each in needs.memory] == ["local_step", "exchange"]

    train(values, tmp_path / "run")
    rows = [row for row in rows_of(tmp_path / "run") if "loss" in row]
    sent = [row["host_wire_bytes"] for row in rows]
    rounds = [after - before for before, after in itertools.pairwise(sent)]
    dense, step, *exchanges = needs.sent
    assert step.what == "a step"
    assert f"{exchanges[-1].host_bytes:,.0f}" in printed
    # What is logged is gathered in a few numbers, which are no part of a round.
    report = rounds[-1] - 4 * step.host_bytes - exchanges[-1].host_bytes
    assert 0 <= report < 1000 < exchanges[-1].host_bytes
    assert rounds[0] - report in [
        4 * step.host_bytes + each.host_bytes for each in exchanges
    ]
    assert rows[-1]["host_wire_ratio"] == pytest.approx(
        sent[-1] / (24 * dense.host_bytes)
    )


@pytest.mark.rotates
def test_checkpoints_are_as_large_as_it_says(tmp_path):
    values = settings(
        method={"name": "dense"},
        model={"name": "resnet20"},
        run={"steps": 2, "checkpoint_every_steps": 0},
    )
    needs = dry_run(values, tmp_path / "run")
    train(values, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "2"
    leaves = json.loads((saved / "manifest.json").read_text())["leaves"].values()
    arrays = [leaf.rstrip("]").split("[") for leaf in leaves]
    listed = sum(
        jnp.dtype(dtype).itemsize * math.prod(map(int, filter(None, shape.split(","))))
        for dtype, shape in arrays
    )
    assert needs.checkpoint_bytes == listed
    # A slow disk makes Orbax write in more parts, some of which it writes twice.
    assert 0.95 * listed < saved_bytes(saved) < 1.6 * listed


def test_the_command_writes_nothing(tmp_path, capsys):
    config = write_config(tmp_path, settings(method={"name": "dense"}))
    workdir = tmp_path / "run"
    assert main([f"--config={config}", f"--workdir={workdir}", "--dry_run"]) == 0
    assert not workdir.exists()
    printed = capsys.readouterr().out
    assert "a step of dense" in printed and "ms per step" not in printed
    both = [f"--config={config}", f"--workdir={workdir}", "--dry_run=fast"]
    assert main(both) == 2
    assert "--dry_run=fast is none of compile, measure" in capsys.readouterr().err


@pytest.mark.parametrize("settings_of", [{}, {"distill": {"teacher": "self"}}])
def test_shapes_of_a_batch_are_known_without_it(settings_of):
    values = settings(method={"name": "hsadmm"}, **settings_of)
    experiment = make_experiment(resolve_config(values), make_topology("2"))
    with experiment.batches() as batches:
        batch = next(batches)
    if experiment.teaching is not None:
        batch = experiment.teaching.taught(batch, 0)
    wanted, found = shapes_of(batch), experiment.batch_shapes()
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for shape, like in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (shape.shape, shape.dtype) == (like.shape, like.dtype)
        assert shape.sharding == like.sharding


def needs_of(devices, shard):
    """Of a step of H-SADMM with AdamW, on eight devices."""
    values = settings(
        method={"name": "hsadmm"},
        optimizer={"name": "adamw"},
        topology={"shard": shard},
    )
    topology = make_topology(str(8 // devices))
    return find_needs(make_experiment(resolve_config(values), topology))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8, 4])
def test_slices_take_their_share_of_memory(devices):
    """By the compiler's word, and but for what fills them up to equal slices."""
    needs = {shard: needs_of(devices, shard) for shard in ("none", "state", "params")}
    # A step is given all that trains, the same batch, and statistics and sums.
    given = {shard: found.memory[0].arguments for shard, found in needs.items()}
    params, whole = needs["none"].params_bytes, needs["none"].state_bytes
    # Parameters, consensus and its momentum, and two moments.
    assert 5 < whole / params < 5.1
    for shard, kept in (("state", params), ("params", 0)):
        saved = (whole - kept) * (1 - 1 / devices)
        constant = given[shard] - (given["none"] - saved)
        assert 0 <= constant < 0.01 * whole, shard
        step, exchange = needs[shard].memory
        assert exchange.total <= step.total + params / devices


def test_gpus_that_are_not_here_have_no_teacher(tmp_path):
    taught = settings(distill={"teacher": "self"})
    with pytest.raises(UserError, match="teacher='self' has to lie on devices"):
        dry_run(taught, tmp_path / "run", how="h100:2x8")


@needs_compiler
def test_it_compiles_for_gpus_that_are_not_here(tmp_path):
    config = write_config(tmp_path, settings(method={"name": "hsadmm"}))
    workdir = tmp_path / "run"
    named = [f"--config={config}", f"--workdir={workdir}", "--dry_run=h100:2x8"]
    done = subprocess.run(
        [sys.executable, "-m", "prunex_jax.train", *named],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 hosts x 8 devices" in done.stdout and "exchange" in done.stdout
    assert not workdir.exists()


def test_it_refuses_what_the_run_refuses(tmp_path):
    with pytest.raises(UserError, match="micro_batches"):
        dry_run(settings(optimizer={"micro_batches": 7}), tmp_path / "run")


@pytest.mark.slow
def test_two_processes_find_the_same_as_one(tmp_path):
    values = settings(topology={"cpu_devices": 2, "layout": "process"})
    port = free_port()
    processes = [
        start(
            tmp_path,
            values,
            tmp_path / "run",
            "--dry_run=measure",
            f"--coordinator=127.0.0.1:{port}",
            "--num_processes=2",
            f"--process_id={process}",
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=170)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert not (tmp_path / "run").exists()
    assert "ms per exchange" in outputs[0] and "dry run" not in outputs[1]
    topology = make_topology("2", devices=jax.devices()[:4])
    needs = find_needs(make_experiment(resolve_config(values), topology))
    assert f"disk      {needs.checkpoint_bytes:,} bytes" in outputs[0]
    for sent in needs.sent:
        line = f"{sent.host_bytes:>17,.0f} {sent.device_bytes:>17,.0f}  {sent.what}"
        assert line in outputs[0]
