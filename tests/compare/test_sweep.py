"""Sweeps: what is run, what is not run again, and what is refused."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.links.tasks import row_settings
from benchmarks.study import LinkStudy
from prunex_jax.base.command import EXIT_STOPPED
from prunex_jax.base.errors import UserError
from prunex_jax.compare.subprocesses import following
from prunex_jax.compare.sweep import runs as sweep_runs
from prunex_jax.compare.sweep.__main__ import main as sweep_main
from prunex_jax.compare.sweep.runs import (
    DIVERGED,
    Findings,
    forget,
    read_findings,
    run_missing,
    runs_of,
)
from prunex_jax.compare.sweep.study import (
    Row,
    Sweep,
    check_study,
    load_study,
    narrow_study,
    settings_of,
)
from prunex_jax.compare.sweep.sweep_report import (
    divergence_table,
    price_table,
    write_report,
)
from prunex_jax.methods import METHODS
from prunex_jax.models import make_model
from prunex_jax.shrink import trace_model
from prunex_jax.shrink.cost import model_budget
from prunex_jax.train.commands.command import main as train_main
from tests.helpers.common import ROOT
from tests.helpers.tiny_runs import SETTINGS, merged, write_config

SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.py"))
LIBRARY = ("rows",)  # Imported by sweeps.
RUN = {"steps": 12, "log_every_steps": 2, "eval_every_steps": 4}
SHRUNK = {"sparsity.start_share": 0.0, "sparsity.freeze_share": 0.5}


def make_sweep(*rows: Row, folder=".", **changes) -> Sweep:
    config = f"{folder}/settings.py"
    values = {"name": "tiny", "config": config, "rows": rows, "seeds": (0, 1)}
    return Sweep(**{**values, **changes})


def in_this_process(command, log):
    """Trains without a process of its own, and writes its log as one would."""
    code = train_main(list(command[3:]))
    log.write_text("error: the loss is not finite since step 3\n" if code else "done\n")
    return code


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two rows that end and one that diverges, with two seeds, and what was said."""
    folder = tmp_path_factory.mktemp("sweep")
    write_config(folder, merged(SETTINGS, {"run": RUN, "method": {"name": "dense"}}))
    sweep = make_sweep(
        Row("dense"),
        Row("hsadmm", "H-SADMM", {"method.name": "hsadmm", **SHRUNK}),
        Row("wild", settings={"optimizer.learning_rate": 1e30}),
        baselines=("dense",),
        health_rows=("hsadmm",),
        folder=folder,
    )
    runs, said = runs_of(sweep, folder / "runs"), []
    failed = run_missing(runs, said.append, in_this_process)
    assert not failed, said
    return sweep, folder, runs, said


@pytest.mark.slow
def test_every_row_runs_with_every_seed_and_none_twice(trained):
    _, _, runs, said = trained
    places = {(run.row.name, run.seed): run.workdir for run in runs}
    assert len(places) == 6 and len(set(places.values())) == 6
    for (name, seed), place in places.items():
        if name != "wild":
            summary = json.loads((place / "summary.json").read_text())
            assert (summary["seed"], summary["method"]) == (seed, name)
    # Seed after seed, so that what a stopped sweep has can be compared.
    assert [run.seed for run in runs] == [0, 0, 0, 1, 1, 1]

    def refuse(command, log):
        raise AssertionError("ran again")

    assert run_missing(runs, said.append, refuse) == []
    assert sum("from before" in line for line in said) == 6


@pytest.mark.slow
def test_a_run_that_diverged_is_a_result_until_it_is_tried_again(trained):
    sweep, _, runs, _ = trained
    found = read_findings(sweep, runs)
    wild = found.results["wild"]
    assert [each.summary for each in wild] == [{}, {}]
    assert all("not finite" in each.reason for each in wild)
    assert price_table(found).rows[2][1].text == "diverged"
    assert len(divergence_table(found)[0].rows) == 2
    path = runs[2].workdir / DIVERGED
    kept = path.read_text()
    forget(runs[:3])
    assert not path.exists() and not runs[2].is_done and runs[0].is_done
    path.write_text(kept)


@pytest.mark.slow
def test_shares_are_of_the_first_baseline(trained):
    sweep, _, runs, _ = trained
    found = read_findings(sweep, runs)
    dense = found.results["dense"][0].summary
    small = found.results["hsadmm"][0].summary
    assert found.reference.row.name == "dense"
    share = found.shares("hsadmm", "params_kept")[0]
    assert share == small["params_kept"] / dense["params_dense"] < 0.5
    cells = price_table(found).rows[1]
    assert cells[4].value == pytest.approx(small["host_payload_ratio"], rel=0.01)
    assert found.results["hsadmm"][0].points[0].host_bytes > 0


def test_a_failing_run_is_told_and_the_others_go_on(tmp_path):
    write_config(tmp_path, SETTINGS)
    sweep = make_sweep(Row("a"), Row("b"), seeds=(0,), folder=tmp_path)
    workdir, said = tmp_path / "runs", []
    runs = runs_of(sweep, workdir)

    def start(command, log):
        log.write_text("line\nKeyError: lost\n")
        return 7

    assert run_missing(runs, said.append, start) == runs
    assert sum("exit code 7\n  line\n  KeyError: lost" in line for line in said) == 2
    assert read_findings(sweep, runs).num_missing == 2
    assert read_findings(sweep, runs, runs[:1]).num_missing == 1, "of those asked for"
    assert run_missing(runs, said.append, lambda command, log: EXIT_STOPPED) == runs
    assert "was stopped" in said[-1], "a run that saves when stopped has not failed"


def test_the_newest_line_of_a_run_is_told_while_it_works(tmp_path):
    log, said = tmp_path / "log.txt", []
    log.write_text("of an earlier start\n")
    with following(log, said.append, seconds=0.01):
        for line in ("8/40  20%", "16/40  40%"):
            with log.open("a") as file:
                file.write(f"  {line}\n")
            deadline = time.monotonic() + 20
            while line not in said and time.monotonic() < deadline:
                time.sleep(0.005)
    assert said == ["8/40  20%", "16/40  40%"], "each once, and nothing of before"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_lets_its_run_save_and_starts_no_other(
    number, tmp_path
):
    saving = tmp_path / "saving.py"
    saving.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(number, frame):\n"
        "    time.sleep(1)\n"
        "    pathlib.Path('saved').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path('started').touch()\n"
        "time.sleep(100)\n"
    )
    script = tmp_path / "sweep.py"
    script.write_text(
        "import pathlib, signal, sys\n"
        # Tests may run where it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from prunex_jax.compare.sweep.study import Row\n"
        "from prunex_jax.compare.sweep.runs import Run, run_missing\n"
        "place = pathlib.Path('runs')\n"
        "command = (sys.executable, 'saving.py')\n"
        "runs = [Run(Row('a'), s, place / str(s), command) for s in (0, 1)]\n"
        "run_missing(runs, print)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as sweep:
        while not (tmp_path / "started").exists():
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.send_signal(number)
        output, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == -number and (tmp_path / "saved").exists()
    assert "seed 0" in output and "seed 1" not in output


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused(trained):
    sweep, folder, _, _ = trained
    other = dataclasses.replace(sweep, settings={"optimizer.momentum": 0.5})
    with pytest.raises(UserError, match=r"momentum=0\.9.*asks for 0\.5"):
        runs_of(other, folder / "runs")


@pytest.mark.slow
def test_the_report_is_there_at_any_time(trained, tmp_path):
    sweep, _, runs, _ = trained
    found = read_findings(sweep, runs)
    path = write_report(found, tmp_path, tmp_path / "png")
    assert "H-SADMM" in path.read_text() and "not finite" in path.read_text()
    markdown = (tmp_path / "tables.md").read_text()
    assert "| H-SADMM |" in markdown and "minus" in markdown
    drawn = {picture.stem for picture in (tmp_path / "png").iterdir()}
    assert {"bytes_tiny", "curves-bytes_tiny", "health-host-drift_tiny"} <= drawn
    with pytest.raises(UserError, match="has no run"):
        write_report(Findings(sweep, {}), tmp_path)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "path", [p for p in SWEEPS if p.stem not in LIBRARY], ids=lambda p: p.stem
)
def test_sweeps_load_and_all_settings_resolve(path, tmp_path):
    sweep = load_study(path, Sweep)
    runs = runs_of(narrow_study(sweep, seeds=(0,)), tmp_path)
    assert len(runs) == len(sweep.rows)
    for row in sweep.rows:
        config = settings_of(sweep, row, {"seed": 0})
        can_shrink = config.method.name == "hsadmm" and config.sparsity.sparsity
        assert can_shrink or config.sparsity.shrink_share == 1, row.name
    text = path.read_text().split('"""')[1]
    assert f"configs/sweeps/{path.name}" in text, "the command that runs it"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cifar10", "cifar10_coarse", "cifar10_short"])
def test_the_small_network_is_as_wide_as_what_pruning_leaves(name):
    folder = ROOT / "configs" / "sweeps"
    sweep = load_study(folder / f"{name}.py", Sweep)
    rows = {row.name: row for row in sweep.rows}

    def channels_of(row):
        config = settings_of(sweep, rows[row], {"seed": 0})
        model = make_model(config.model, (32, 32, 3), 10)
        trace = trace_model(model)
        budget = model_budget(config.sparsity, model, trace)
        return budget.keep_counts_at(1.0), budget.keep_counts_at(0.5)

    small, _ = channels_of("small")
    dense, pruned = channels_of("hsadmm-16")
    assert small == pruned != dense == channels_of("dense")[0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rows": ()}, "no row"),
        ({"rows": (Row("a"), Row("a"))}, "row a twice"),
        ({"seeds": ()}, "no seed"),
        ({"seeds": (1, 1)}, "seed 1 twice"),
        ({"rows": (Row("a b"),)}, "letters"),
        ({"baselines": ("denes",)}, "'denes', which is no row, did you mean 'dense'"),
        ({"settings": {"seed": 3}}, "sets seed"),
        ({"rows": (Row("a", settings={"run.read_test": True}),)}, "run.read_test"),
    ],
)
def test_sweeps_that_mean_nothing_are_refused(changes, match):
    values = {"rows": (Row("dense"),), **changes}
    with pytest.raises(UserError, match=match):
        check_study(make_sweep(*values.pop("rows"), **values))


def test_every_row_is_checked_before_the_first_one_runs(tmp_path):
    late = Row("late", settings={"sparsity.shrink_share": 0.4})
    sweep = make_sweep(Row("dense"), late, folder=tmp_path)
    write_config(tmp_path, SETTINGS)
    with pytest.raises(UserError, match=r"row late: sparsity.shrink_share = 0.4 is be"):
        runs_of(sweep, tmp_path)


@pytest.mark.slow
def test_a_registered_method_is_a_row_like_any_other(tmp_path, monkeypatch):
    """Its own file and a study file; other processes import it by `method.plugins`."""
    plugin = tmp_path / "my_method.py"
    plugin.write_text(
        "import dataclasses\n"
        "from prunex_jax.methods import METHODS, Variant, register_method\n"
        "variant = Variant('mine-int8', 'mine, int8', {'method.wire_dtype': 'int8'})\n"
        "register_method(dataclasses.replace(\n"
        "    METHODS['dense'], name='mine', key='dense', variants=(variant,)\n"
        "))\n"
    )
    write_config(tmp_path, merged(SETTINGS, {"run": RUN}))
    modules = {
        "Sweep": "prunex_jax.compare.sweep.study",
        "LinkStudy": "benchmarks.study",
    }
    for kind, module in modules.items():
        (tmp_path / f"{kind}.py").write_text(
            "import my_method\n"
            f"from {module} import {kind}, variant_rows\n\n\n"
            "def get_study():\n"
            f"    return {kind}(\n"
            "        name='own', config='settings.py', seeds=(0,),\n"
            "        rows=variant_rows('mine-int8'),\n"
            f"        settings={{'method.plugins': ({str(plugin)!r},)}},\n"
            "    )\n"
        )
    monkeypatch.setitem(METHODS, "mine", None)
    del METHODS["mine"]
    sweep = load_study(tmp_path / "Sweep.py", Sweep)
    (run,) = runs_of(sweep, tmp_path / "runs")
    assert run_missing([run], lambda text: None, in_this_process) == []
    found = read_findings(sweep, [run]).results["mine-int8"][0]
    assert found.row.title == "mine, int8" and found.summary["method"] == "mine"
    told = row_settings(load_study(tmp_path / "LinkStudy.py", LinkStudy))["mine-int8"]
    assert told["method"]["plugins"] == [str(plugin)]
    assert (told["method"]["name"], told["method"]["wire_dtype"]) == ("mine", "int8")


def test_the_command_line(tmp_path, capsys, monkeypatch):
    file = tmp_path / "sweep.py"
    file.write_text(
        "from prunex_jax.compare.sweep.study import Row, Sweep\n\n\n"
        "def get_study():\n"
        "    rows = (Row('dense'),)\n"
        "    return Sweep(name='digits', config='settings.py', rows=rows)\n"
    )
    write_config(tmp_path, SETTINGS)
    flags = [f"--sweep={file}", f"--workdir={tmp_path / 'runs'}"]
    assert sweep_main([*flags, "--dry_run", "--seeds=4", "--config.run.steps=9"]) == 0
    command = capsys.readouterr().out
    own = ["--config.run.steps=9", "--config.seed=4", "--config.run.read_test=True"]
    assert "prunex_jax.train" in command and command.split()[-3:] == own
    for wrong, match in (
        ("--rows=denes", "did you mean 'dense'"),
        ("--seeds=x", "not a list"),
        ("--config.run.stepps=9", "run.stepps is not a setting"),
        ("--report", "has no run"),
    ):
        assert sweep_main([*flags, wrong]) == 2
        assert match in capsys.readouterr().err
    monkeypatch.setattr(sweep_runs, "run_process", lambda command, log: 7)
    assert sweep_main(flags) == 1, "runs that fail are no bad input"
    assert "failed with exit code 7" in capsys.readouterr().out
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "matplotlib" else found(n)
    )
    assert sweep_main(flags) == 2
    output = capsys.readouterr()
    assert "matplotlib" in output.err and not output.out, "it has begun to train"
