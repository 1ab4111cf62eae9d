"""Benchmarks that nothing else runs still run, on networks that take no time."""

import dataclasses
import re
import sys

import pytest

from benchmarks import __main__ as front_door
from benchmarks import compression, coverage_table, gpu, one_shot, start
from prunex_jax.train.run import train
from tests.helpers.common import ROOT
from tests.helpers.tiny_runs import settings


@pytest.mark.slow
def test_what_methods_compute_is_timed_without_communication(monkeypatch, capsys):
    names = ["hsadmm", "powersgd", "local-sgd-4-top64", "topk-chunks"]
    changes = ["--model=resnet20", "--repeats=2", "--batch-size=0", "--only", *names]
    monkeypatch.setattr(sys, "argv", ["compression", *changes])
    compression.main()
    timed = re.findall(r"^(\S+) +([\d.]+) ms", capsys.readouterr().out, re.M)
    assert [name for name, _ in timed] == names
    assert all(float(milliseconds) > 0 for _, milliseconds in timed)


@pytest.mark.rotates
@pytest.mark.parametrize("how", [(), ("--budget=global", "--criterion=taylor")])
def test_what_a_network_keeps_is_scored_whole_and_repaired(
    how, monkeypatch, capsys, tmp_path
):
    train(settings(method={"name": "dense"}, run={"steps": 60}), tmp_path)
    capsys.readouterr()
    changes = [f"--workdir={tmp_path}", "--shares", "0.5", "--unit=params", *how]
    monkeypatch.setattr(sys, "argv", ["one_shot", *changes])
    one_shot.main()
    _, _, whole, half = capsys.readouterr().out.splitlines()
    dense = float(whole.split(" | ")[3])
    _, share, _, zeroed, _, repaired, *_ = half.split(" | ")
    assert 0 < float(share) <= 0.5
    assert float(zeroed) < float(repaired) <= dense + 0.1


@pytest.mark.rotates
def test_what_a_gpu_takes_is_timed_on_cpu_too(monkeypatch, capsys, tmp_path):
    tiny = {
        "model.gpt.layers": 1,
        "model.gpt.width": 64,
        "model.gpt.hidden": 64,
        "data.sequence_length": 16,
    }
    network = gpu.NETWORKS["gpt-125m"]
    tiny = dataclasses.replace(network, settings={**network.settings, **tiny})
    monkeypatch.setitem(gpu.NETWORKS, "gpt-125m", tiny)
    for name, value in {"CALLS": 2, "ROUNDS": 1, "EXCHANGES": ("hsadmm",)}.items():
        monkeypatch.setattr(gpu, name, value)
    parts = ["steps", "exchanges", "compaction"]
    changes = [f"--workdir={tmp_path}", "--networks", "gpt-125m", "--parts", *parts]
    monkeypatch.setattr(sys, "argv", ["gpu", *changes])
    gpu.main()
    ratios = re.findall(r"median ([\d.]+), quartiles", capsys.readouterr().out)
    assert len(ratios) == 5 and all(float(ratio) > 0 for ratio in ratios)


def test_the_front_door_lists_what_there_is_and_refuses_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    front_door.main()
    listed = capsys.readouterr().out
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for name in front_door.benchmarks():
        assert re.search(rf"^  {name} ", listed, re.M), name
        if not name.endswith("_torch"):  # The other side of another one.
            assert f"`python -m benchmarks {name}`" in page, name
    monkeypatch.setattr(sys, "argv", ["benchmarks", "stepz"])
    with pytest.raises(SystemExit) as ended:
        front_door.main()
    assert ended.value.code == 2
    assert "'stepz' is no benchmark" in capsys.readouterr().err


def test_benchmarks_find_the_files_that_they_read():
    assert start.DEMO.is_file()
    shares = coverage_table.earlier_shares(coverage_table.TABLE.read_text())
    assert "nnx_resnet18" in shares
