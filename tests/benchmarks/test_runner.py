"""Studies: what is refused, in which order things are measured, what is recorded."""

import collections
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.links import __main__ as command_line
from benchmarks.links.cluster import run_on_cluster
from benchmarks.links.kernel import share_cores
from benchmarks.links.links import PlainHosts
from benchmarks.links.part import part_of
from benchmarks.links.processes import Processes, ProcessFailedError
from benchmarks.links.records import (
    RECORDS_FILE,
    Curve,
    Measurement,
    forget_study,
    read_records,
    write_record,
)
from benchmarks.links.runner import run_study
from benchmarks.links.tasks import Planner, row_settings
from benchmarks.study import LinkRow, LinkStudy
from prunex_jax.base.errors import UserError
from prunex_jax.compare.drill.sandbox import sandbox_kind
from prunex_jax.compare.sweep.figure import Figure
from prunex_jax.compare.sweep.study import check_study, load_study, narrow_study
from prunex_jax.data import open_dataset
from prunex_jax.data.settings import DataConfig
from prunex_jax.processes import LaunchFlags, start
from tests.helpers.bench_records import make_curve, make_measurement
from tests.helpers.common import free_port

ROOT = Path(__file__).parents[2]
STUDIES = sorted(
    path
    for path in (ROOT / "benchmarks" / "studies").glob("*.py")
    if "def get_study" in path.read_text()
)
DIGITS = ROOT / "benchmarks/studies/digits.py"
STAND_IN = ROOT / "tests/helpers/bench_host.py"
STUDY = LinkStudy(
    name="made-up",
    config=str(ROOT / "configs" / "digits_resnet20_dense.py"),
    rows=(
        LinkRow("dense", settings={"method.name": "dense"}),
        LinkRow("hsadmm", "H-SADMM", settings={"method.name": "hsadmm"}, period=4),
    ),
    links=("unlimited", "r=4", "8 Mbit/s"),
    held_out=("r=4",),
    rounds=2,
)


class CountingHosts:
    """Hosts without links: remembers speeds, and counts 500 bytes per look and host."""

    kind, interface = "namespaces", "lo"

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self.speeds: list[float | None] = []
        self.looks = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def command(self, host, argv):
        module = argv.index("-m")
        return [argv[0], str(STAND_IN), *argv[module + 2 :]]

    def address(self, host):
        return "127.0.0.1"

    def shape(self, megabits):
        self.speeds.append(megabits)

    def sent_bytes(self):
        look = next(self.looks)
        return tuple(500 * look * (1 + host) for host in range(self.num_hosts))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a study with processes that only say what they would have measured."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said: list[str] = []
    made: list[CountingHosts] = []

    def make(num_hosts):
        made.append(CountingHosts(num_hosts))
        return made[-1]

    def call(study: LinkStudy = STUDY):
        records = run_study(study, tmp_path, make, said.append)
        return records, made, said

    return call


def test_steps_are_measured_over_every_link(run):
    records, made, _ = run()
    assert [(r.setup.row, r.setup.link) for r in records] == [
        ("computation", "unlimited"),
        *itertools.product(("dense", "hsadmm"), STUDY.links),
    ]
    # Host 1 is slower; the first round after a change of speed is not measured.
    assert records[0].seconds == (2.0,) * 29, "links are measured in it"
    assert all(r.seconds == (2.0, 2.0) for r in records[1:])
    # r = 4 of 2 s for 5 MB; after every phase the limit is lifted.
    speeds = [None, 5e6 * 8 / 1e6 / 8.0, 8.0]
    over_all = [None, *(s for x in speeds for s in (x, None))]
    assert made[0].speeds == [None, None, None, *over_all, *over_all]
    assert [r.setup.r for r in records[1:4]] == [0.0, 4.0, 2.5]
    for record in records:
        steps = {"computation": 30, "dense": 3, "hsadmm": 3 * 4}[record.setup.row]
        assert record.interface_bytes == (500 + 1000) / 2 / steps
        assert (record.traced_bytes, record.formula_bytes) == (1000.0, 1000.0)
        assert record.hops == 4.0


def test_processes_are_told_how_many_hosts_share_the_data(tmp_path):
    planner = Planner(STUDY, row_settings(STUDY), 4, tmp_path)
    assert planner.steady(STUDY.rows[0], STUDY.links).spec.num_hosts == 4


def test_what_is_recorded_is_not_measured_again(run, tmp_path):
    first, _, _ = run(narrow_study(STUDY, rows=["dense"], links=["r=4"]))
    assert len(first) == 2
    records, _, said = run()
    assert len(records) == 7, "the computation, and two rows over three links"
    assert sum("computation" in line for line in said) == 1
    forget_study(tmp_path, "another")
    assert read_records(tmp_path) == records
    forget_study(tmp_path, STUDY.name)
    assert read_records(tmp_path) == []


def test_accuracy_is_followed_with_links_lifted_while_it_is_scored(run):
    settings = {"run.epochs": 0.0, "run.steps": 50, "run.eval_every_steps": 20}
    study = dataclasses.replace(
        STUDY, goal="accuracy", links=("r=4",), held_out=(), settings=settings
    )
    records, made, _ = run(narrow_study(study, rows=["dense"]))
    curve = records[-1]
    assert isinstance(curve, Curve)
    assert [point.step for point in curve.points] == [0, 20, 40, 50]
    assert [point.value for point in curve.points] == [0.0, 0.2, 0.4, 0.5]
    assert [point.seconds for point in curve.points] == [0.0, 140.0, 280.0, 400.0]
    assert [point.host_bytes for point in curve.points] == [0, 750, 1500, 2250]
    assert made[0].speeds[3:] == [None, 5.0, None, 5.0, None, 5.0, None]
    assert curve.reached(0.3) is curve.points[2]
    assert curve.reached(0.6) is None


def test_a_half_written_record_is_not_read(run, tmp_path):
    records, _, _ = run(narrow_study(STUDY, rows=["dense"], links=["unlimited"]))
    with open(tmp_path / RECORDS_FILE, "a") as file:
        file.write('{"kind": "measurement", "setup": {"stu')
    assert read_records(tmp_path) == records
    write_record(tmp_path, records[0])
    assert read_records(tmp_path) == [*records, records[0]]


def test_records_of_earlier_versions_are_read(tmp_path):
    record = make_measurement()
    write_record(tmp_path, record)
    path = tmp_path / RECORDS_FILE
    path.write_text(path.read_text().replace('"hops"', '"messages": 2.0, "hops"'))
    assert read_records(tmp_path) == [record]


def test_runs_of_earlier_versions_are_read(tmp_path):
    """They say nothing of their metric, which was accuracy."""
    curve = make_curve()
    write_record(tmp_path, curve)
    path = tmp_path / RECORDS_FILE
    line = json.loads(path.read_text())
    del line["figure"]
    for point in line["points"]:
        point["accuracy"] = point.pop("value")
    path.write_text(json.dumps(line) + "\n")
    assert read_records(tmp_path) == [curve]


def test_runs_scored_by_one_metric_are_not_those_of_another(run, tmp_path):
    settings = {"run.epochs": 0.0, "run.steps": 4, "run.eval_every_steps": 2}
    study = dataclasses.replace(
        narrow_study(STUDY, rows=["dense"], links=["r=4"]),
        goal="accuracy",
        settings=settings,
    )
    run(study)
    records, _, _ = run(dataclasses.replace(study, goal="loss", less_is_better=True))
    found = [record.figure for record in records[1:]]
    assert found == [Figure("accuracy"), Figure("loss", less_is_better=True)]
    assert records[2].reached(0.03) is records[2].points[0], "less is better"
    assert read_records(tmp_path) == records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"goal": "acuracy"},
            r"goal='acuracy' is neither 'step_time' nor measured .*'accuracy'.*loss",
        ),
        (
            {"goal": "loss", "settings": {"data.validation_share": 0.0}},
            "goal='loss' is that of the validation split, which is empty",
        ),
    ],
)
def test_goals_that_nothing_measures_are_refused_before_anything_runs(
    changes, message, run
):
    with pytest.raises(UserError, match=message):
        run(dataclasses.replace(STUDY, **changes))


def test_a_part_of_a_split_is_spread_over_it(tmp_path):
    split = open_dataset(DataConfig(), seed=0).validation
    part, numbers = part_of(split, 10), np.arange(10)
    places = numbers * len(split) // 10
    assert len(part) == 10 and places[-1] > 0.85 * len(split)
    for key, value in part.finished(part.evaluation_batch(numbers)).items():
        wanted = split.finished(split.evaluation_batch(places))[key]
        np.testing.assert_array_equal(value, wanted)
    assert part_of(split, 0) is split and part_of(split, 10_000) is split
    study = dataclasses.replace(
        STUDY,
        goal="loss",
        scored_examples=10,
        settings={"run.epochs": 0.0, "run.steps": 4, "run.eval_every_steps": 2},
    )
    planner = Planner(study, row_settings(study), 2, tmp_path)
    spec = planner.training(study.rows[0], "r=4", 0).spec
    assert (spec.metric, spec.scored_examples) == ("loss", 10)


def test_a_host_that_dies_shows_its_log_and_ends_the_others(run):
    study = dataclasses.replace(STUDY, settings={"seed": 13})
    with pytest.raises(ProcessFailedError, match=r"process 1 ended(.|\n)*out of luck"):
        run(study)


@pytest.mark.slow
def test_a_host_that_hangs_is_killed_at_the_limit(run):
    study = dataclasses.replace(STUDY, settings={"seed": 99}, limit_seconds=1.0)
    with pytest.raises(ProcessFailedError, match="not reached within"):
        run(narrow_study(study, rows=["dense"], links=["unlimited"]))


def test_processes_end_with_their_context(tmp_path):
    script = "import signal, time; signal.signal(15, lambda *_: None); time.sleep(60)"
    command = [sys.executable, "-c", script]
    with Processes([command] * 2, tmp_path, os.environ, 60.0) as processes:
        pids = [process.child.pid for process in processes._all]
        deadline = time.monotonic() + 20
        while processes.peak_memory() < 1e6:  # until both have begun
            assert time.monotonic() < deadline
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_plain_processes_end_with_a_runner_that_is_killed(tmp_path):
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv, which asks the kernel for it")
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks.links.links import PlainHosts\n"
        "from benchmarks.links.processes import Processes\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "command = PlainHosts(1).command(0, sleep)\n"
        "with Processes([command], Path(sys.argv[1]), os.environ, 60.0) as processes:\n"
        "    print(processes._all[0].child.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    host = Path("/proc") / runner.stdout.readline().strip()
    assert host.exists()
    runner.kill()
    runner.communicate()
    deadline = time.monotonic() + 20
    while host.exists() and "State:\tZ" not in (host / "status").read_text():
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def test_a_plain_process_does_not_begin_once_its_runner_has_ended():
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv, which asks the kernel for it")
    command = PlainHosts(1).command(0, ["echo", "begun"])
    assert subprocess.check_output(command) == b"begun\n"
    # Another parent than the process that has made the command: that one has ended.
    shell = ["sh", "-c", '"$@"; exit', "sh", *command]
    assert subprocess.run(shell, capture_output=True).stdout == b""


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
def test_processes_share_all_cores_evenly(processes, monkeypatch):
    cores, owned = {2, 3, 5, 7}, []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, own: owned.append(own), raising=False
    )
    for process in range(processes):
        share_cores(process, processes)
    if processes == 1:
        assert not owned, "it keeps what it has"
        return
    counts = collections.Counter(itertools.chain(*owned))
    assert set(counts) == cores and all(owned) and len(owned) == processes
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies_of_the_package_can_be_run(path):
    study = load_study(path, LinkStudy)
    rows = {row.name for row in study.rows}
    assert "dense" in rows, "everything is compared with it"
    settings = row_settings(study)
    assert set(settings) == rows | {"computation"}
    if study.figure is not None:
        return
    for row in study.rows:
        method = settings[row.name]["method"]
        periods = {"hsadmm": "hsadmm", "local_sgd": "local_sgd", "diloco": "local_sgd"}
        if row.runtime == "jax" and method["name"] in periods:
            period = method[periods[method["name"]]]["sync_period"]
            assert row.period % period == 0, row.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"links": ("4 MB/s",)}, "'4 MB/s' is not understood"),
        ({"rows": ()}, "no row"),
        ({"rows": (LinkRow("a"), LinkRow("a"))}, "row a twice"),
        ({"rows": (LinkRow("a b"),)}, "'a b' may have letters"),
        ({"held_out": ("r=1",)}, "not measured"),
        ({"num_hosts": (0,)}, "num_hosts=0 must be at least 1"),
        ({"stand_in_seconds": -1.0}, "must not be negative"),
        ({"scored_examples": -1}, "scored_examples=-1 must not be negative"),
        ({"rows": (LinkRow("a", processes_per_host=2),)}, "is for torch"),
    ],
)
def test_bad_studies_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        check_study(dataclasses.replace(STUDY, **changes))


def test_rows_on_simulated_devices_are_refused():
    study = dataclasses.replace(STUDY, settings={"topology.simulated": "4x1"})
    with pytest.raises(UserError, match="'4x1' has no links to measure"):
        row_settings(study)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=x"], "--study is required"),
        (["--study=no.py", "--workdir=x"], "--study=no.py is not a file"),
        (["--study={study}", "--workdir=x", "--rows=dens"], "did you mean 'dense'"),
        (
            ["--study={study}", "--workdir=x", "--links=fast"],
            "'fast' is not understood",
        ),
        (["--study={study}", "--workdir=x", "--num_hosts=two"], "not a list like 2,4"),
        (["--study={study}", "--workdir=x", "more"], "'more' is not understood"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(arguments, message, capsys):
    study = str(DIGITS)
    filled = [argument.replace("{study}", study) for argument in arguments]
    assert command_line.main(filled) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


SHORT_STUDIES = (
    DIGITS,
    ROOT / "benchmarks/studies/few_bytes.py",
    ROOT / "tests/helpers/language_study.py",
)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("file", SHORT_STUDIES, ids=lambda file: file.stem)
def test_interfaces_count_what_traces_say(file, sample, tmp_path):
    """A row that the sample draws, or all, on two real hosts, as a command."""
    kind, reason = sandbox_kind()
    if kind is None:
        pytest.skip(f"no network namespaces: {reason}")
    study = load_study(file, LinkStudy)
    if sample:
        study = narrow_study(
            study, rows=[random.Random(sample).choice(study.rows).name]
        )
    rows = [row.name for row in study.rows]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.links"),
            *(f"--study={file}", "--num_hosts=2", f"--rows={','.join(rows)}"),
            f"--workdir={tmp_path / 'bench'}",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = read_records(tmp_path / "bench")
    assert len(records) == 1 + len(rows)
    for record in records:
        assert isinstance(record, Measurement)
        assert record.formula_bytes == pytest.approx(record.traced_bytes)
        assert record.interface_bytes >= record.traced_bytes
    assert (tmp_path / "bench" / "report.html").exists()
    facts = json.loads((tmp_path / "bench" / "environment.json").read_text())
    assert facts


@pytest.mark.rotates
def test_processes_of_a_launcher_measure_themselves(tmp_path):
    """As on a cluster: nobody starts them, real links are used unchanged."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.links", "--hosts=cluster"),
                f"--study={DIGITS}",
                *(f"--workdir={tmp_path / 'bench'}", "--rows=dense,diloco"),
                *(f"--coordinator=127.0.0.1:{port}", "--num_processes=2"),
                f"--process_id={number}",
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "PRUNEX_HOST_ID": f"host {number}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    records = read_records(tmp_path / "bench")
    assert [(r.setup.row, r.setup.link) for r in records] == [
        (row, "unlimited") for row in ("computation", "dense", "diloco")
    ]
    for record in records:
        assert record.setup.hosts_kind == "cluster"
        assert (record.setup.num_hosts, record.setup.devices_per_host) == (2, 1)
        assert record.formula_bytes == pytest.approx(record.traced_bytes)
    assert [len(record.seconds) for record in records] == [29, 2, 2]
    assert (tmp_path / "bench" / "report.html").exists()


@pytest.mark.slow
def test_processes_of_a_launcher_are_waited_for_as_long_as_the_study_says(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(start, "is_used", lambda: False)
    study = load_study(DIGITS, LinkStudy)
    settings = {**study.settings, "run.join_seconds": 1}
    study = dataclasses.replace(study, settings=settings)
    launch = LaunchFlags(f"127.0.0.1:{free_port()}", num_processes=2, process_id=0)
    with pytest.raises(UserError, match="process 1 of 2 did not come within 1 s"):
        run_on_cluster(study, tmp_path, launch, print)
