"""Fault drills: what they do to real processes, and that their judgement can fail."""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from prunex_jax.__main__ import main
from prunex_jax.compare.drill.crew import Crew, Record
from prunex_jax.compare.drill.hosts import LoopbackHosts
from prunex_jax.compare.drill.plan import (
    CHECKPOINT_STEPS,
    FAULTS,
    HANG,
    LINK,
    RANDOM,
    Blow,
    Plan,
    every_fault,
    random_faults,
)
from prunex_jax.compare.drill.verdicts import (
    MOST_STEPS_LOST,
    by_fault,
    by_kind,
    judge,
    write_tables,
)
from prunex_jax.methods import METHODS
from tests.helpers.common import ROOT, free_port, outputs_of

PLAN = Plan("dense", (Blow("kill", 1, 10),))
# After these the other process says whom it misses.
LOSSES = ("kill", "stop", "error", "full_disk")
LOST_LINE = (
    "error: process 1 on m has not answered for 4 s; it was at step 10, phase step; "
    "start the run again with the same command\n"
)


def drill(*flags):
    """Starts the command in another process."""
    return subprocess.Popen(
        [sys.executable, "-m", "prunex_jax", "drill", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_run_survives_eight_faults(sample, tmp_path):
    """Of the nine kinds, at steps, of processes and of a method that the sample draws.

    Each is judged by what the drill knows of it: exit codes of all, a line of those who
    are left with the process, the place and the remedy, no process left over, few steps
    lost, and in the end the bits of a run that was left alone.
    """
    chooser = random.Random(f"faults {sample}")
    faults, method = chooser.sample([*FAULTS], 8), chooser.choice([*METHODS])
    flags = (f"--workdir={tmp_path}", "--processes=2", f"--faults={','.join(faults)}")
    flags += (f"--method={method}", f"--seed={chooser.randrange(1000)}")
    process = drill(*flags)
    (said,) = outputs_of([process], within=560)
    assert process.returncode == 0, said
    result = json.loads((tmp_path / "drill.json").read_text())
    done = [fault for fault in faults if fault not in result["skipped"]]
    assert set(result["skipped"]) <= {LINK}
    assert [row["fault"] for row in result["faults"]] == done
    for row in result["faults"]:
        assert row["same"] and not row["problems"] and row["method"] == method
        log = Path(row["log"]).read_text()
        if row["fault"] == "error":
            assert "Traceback" in log and "a drill: this process fails" in log
        if row["fault"] == HANG:
            assert "in _suffer" in log, "the stack of the thread that hangs"
    table = (tmp_path / "table.md").read_text()
    assert table.count("| good |") == len(done) + 1
    # What is recorded is only judged again.
    lost = next(row for row in result["faults"] if row["fault"] in LOSSES)
    log = tmp_path / method / "logs" / Path(lost["log"]).name
    for other in log.parent.glob(f"{log.name.rpartition('_')[0]}_*"):
        other.write_text("nothing that helps")
    again = drill(*flags)
    (said,) = outputs_of([again], within=60)
    assert again.returncode == 1
    assert f"error: {method}, {lost['fault']} of process" in said and str(log) in said


@pytest.mark.rotates
def test_two_drills_look_after_a_process_each(tmp_path):
    workdir = tmp_path / "shared"
    shared = [f"--workdir={workdir}", f"--coordinator=127.0.0.1:{free_port()}"]
    shared += ["--num_processes=2", "--faults=kill,term,link", "--method=dgc"]
    processes = [drill(*shared, f"--process_id={number}") for number in range(2)]
    said = outputs_of(processes, within=400)
    assert [process.returncode for process in processes] == [0, 0], said
    assert "links of a cluster are left alone" in said[0] and said[1] == ""
    found = json.loads((workdir / "drill.json").read_text())["faults"]
    assert [row["outcome"] for row in found][1] == "75, 75"
    assert "SIGKILL" in found[0]["outcome"] and "69" in found[0]["outcome"]
    # Nobody may join a drill that has ended.
    late = drill(*shared, "--process_id=1")
    (said,) = outputs_of([late], within=60)
    assert late.returncode == 2 and "holds a drill already" in said


def test_plans_are_the_same_for_all_and_end_after_the_last_fault():
    plans = random_faults(list(METHODS), RANDOM, 4, 60, seed=3)
    assert plans == random_faults(list(METHODS), RANDOM, 4, 60, seed=3)
    assert plans != random_faults(list(METHODS), RANDOM, 4, 60, seed=4)
    assert [plan.method for plan in plans] == list(METHODS)
    blows = [blow for plan in plans for blow in plan.blows]
    assert len(blows) == 60
    counts = [sum(blow.fault == fault for blow in blows) for fault in RANDOM]
    assert counts == [60 // len(RANDOM)] * len(RANDOM)
    for plan in plans:
        steps = [blow.step for blow in plan.blows]
        assert steps == sorted(steps) and steps[-1] + 4 < plan.num_steps
        assert all(0 <= blow.process < 4 for blow in plan.blows)
        # The run is past its last fault before the next one.
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert all(gap >= CHECKPOINT_STEPS for gap in gaps)


def test_every_fault_comes_once_for_each_method():
    plans = every_fault(["dense", "dgc"], list(FAULTS), 2, seed=0)
    assert [[blow.fault for blow in plan.blows] for plan in plans] == [[*FAULTS]] * 2
    first = next(blow for blow in plans[0].blows if blow.fault == "full_disk")
    assert first.process == 0, "the only one that writes rows"


class Recorded:
    """A drill of two processes as its files say it went, which is well."""

    def __init__(self, folder):
        with LoopbackHosts(2) as hosts:
            self.crew = Crew(
                num_processes=2,
                workdir=folder,
                hosts=hosts,
                coordinator=str,
                silence_seconds=12,
                limit_seconds=60,
            )
        undisturbed, killed, last = PLAN.starts
        self.killed = killed
        for start in (undisturbed, last):
            for process in range(2):
                resumed = 8 if start is last and process == 0 else 0
                self.write(
                    start,
                    Record(process, 0, 40, 100.0, resumed=resumed, digest=f"{process}"),
                )
            rows = [
                {"step": step, "loss": 1 / step, "seconds": step} for step in (9, 40)
            ]
            self.rows(start, rows)
        self.write(killed, Record(0, 69, 10, 57.5))
        self.write(killed, Record(1, -9, 10, 50.5, acted=50.0))
        self.say(0, LOST_LINE)

    def write(self, start, record):
        file = self.crew.record_file(start, record.process)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dataclasses.asdict(record)))

    def rows(self, start, rows):
        folder = self.crew.run_folder(start)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def say(self, process, text):
        log = self.crew.log(self.killed, process)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)

    def verdict(self):
        (verdict,) = judge(PLAN, self.crew)
        return verdict


@pytest.fixture
def recorded(tmp_path):
    return Recorded(tmp_path)


def test_a_good_record_is_judged_good(recorded):
    verdict = recorded.verdict()
    assert verdict.problems == () and verdict.same
    assert verdict.seconds == 7.5 and verdict.steps_lost == 2
    assert verdict.outcome == "69, SIGKILL"


def break_code(recorded):
    recorded.write(recorded.killed, Record(0, 70, 10, 57.5))


def break_end(recorded):
    recorded.write(recorded.killed, Record(0, None, 10, 57.5))


def break_message(recorded):
    recorded.say(0, LOST_LINE.replace("process 1", "process 0"))


def break_phase(recorded):
    recorded.say(0, LOST_LINE.replace(", phase step", ""))


def break_time(recorded):
    recorded.write(recorded.killed, Record(1, -9, 60, 50.5))


def break_rows(recorded):
    recorded.rows(PLAN.starts[-1], [{"step": 9, "loss": 1 / 9}, {"step": 40}])


def break_digest(recorded):
    recorded.write(PLAN.starts[-1], Record(1, 0, 40, 100.0, digest="other"))


def break_loss(recorded):
    lost = 8 + MOST_STEPS_LOST + 1
    recorded.write(recorded.killed, Record(1, -9, lost, 50.5, acted=50.0))


def break_last(recorded):
    recorded.write(PLAN.starts[-1], Record(1, 69, 40, 100.0, digest="1"))


def break_orphan(recorded):
    recorded.write(recorded.killed, Record(0, 69, 10, 57.5, left_over=2))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (break_code, "process 0: 70 instead of 69"),
        (break_end, "process 0: did not end instead of 69"),
        (break_message, "process 0 does not say error: process 1"),
        (break_phase, "process 0 does not say error: process 1"),
        (break_time, "the run ended before the fault"),
        (break_rows, "other numbers than the undisturbed run"),
        (break_digest, "other numbers than the undisturbed run"),
        (break_loss, "17 steps lost"),
        (break_last, "disturbed run: process 1 ended with 69"),
        (break_orphan, "process 0 left 2 behind"),
    ],
)
def test_what_is_wrong_is_found(broken, problem, recorded):
    broken(recorded)
    assert any(problem in found for found in recorded.verdict().problems)


def test_a_run_that_ends_before_it_hears_of_a_signal_is_no_other_run(recorded):
    """The start after it takes no step, and so says nothing of the state."""
    for process in range(2):
        recorded.write(
            recorded.killed,
            Record(process, 0, 40, 57.5, acted=50.0, digest=f"{process}"),
        )
        recorded.write(PLAN.starts[-1], Record(process, 0, 40, 100.0, resumed=40))
    verdict = recorded.verdict()
    assert verdict.same and "process 0: 0 instead of 69" in verdict.problems


def test_a_fault_that_did_not_come_has_no_seconds(recorded, tmp_path):
    break_time(recorded)
    text = write_tables(tmp_path, "drill", [recorded.verdict()], {})
    assert "| kill | 1 | 0/1 | none | " in text
    (row,) = json.loads((tmp_path / "drill.json").read_text())["faults"]
    assert row["seconds"] is None


def test_tables_count_what_is_good(recorded):
    good = recorded.verdict()
    bad = dataclasses.replace(good, same=False, problems=("other",), seconds=9.5)
    lines = by_kind([good, bad], {"link": "no tc"}).splitlines()
    assert lines[2] == "| kill | 2 | 1/2 | 8.5 (max 9.5) | 2 (max 2) | 1/2 |"
    assert "skipped: no tc" in lines[-1]
    assert "| no | other |" in by_fault([bad])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes=1"], "--processes=1 must be at least 2"),
        (["--faults=kil"], "did you mean 'kill'"),
        (["--random=3", "--faults=hang"], "--faults=hang is not one of kill, term"),
        (["--method=dgd"], "--method='dgd' is not a method"),
        (["--random=-1"], "--random=-1 must be at least 0"),
        (["--limit_seconds=1"], "--limit_seconds=1 must be at least 60"),
        (["--processes=1000"], "must be at most 64"),
        (["--num_processes=2", "--process_id=0"], "--coordinator"),
        (["--faults=,"], "--faults=, names nothing; leave it out for all"),
        (["--method=,"], "--method=, names nothing"),
    ],
)
def test_bad_flags_are_one_line(flags, message, tmp_path, capsys):
    flags = ["--faults=kill", *flags]
    assert main(["drill", f"--workdir={tmp_path}", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [[], ["--fresh"]])
def test_a_folder_of_somebody_else_is_left_alone(more, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert main(["drill", f"--workdir={tmp_path}", "--faults=kill", *more]) == 2
    assert "holds thesis.tex and no drill; choose" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_drill_in_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "plan.json").write_text('{"processes": 3, "runs": {}}')
    assert main(["drill", f"--workdir={tmp_path}", "--faults=kill"]) == 2
    assert "holds another drill; --fresh removes it" in capsys.readouterr().err
