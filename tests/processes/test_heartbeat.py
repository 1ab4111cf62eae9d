"""Who is lost, by beats alone; and what a process does about it."""

import dataclasses
import json
import subprocess
import sys
import threading
import time

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.processes import heartbeat as heartbeat_module
from prunex_jax.processes.heartbeat import Beat, Heartbeat, Judge, Limits

LIMITS = Limits(silence=12.0, stall=0.0)  # One beat in a second.


def beat(number, **changes):
    return dataclasses.replace(Beat(number, "node17", "step", 331), **changes)


def test_nobody_is_lost_who_goes_on_beating():
    judge = Judge(LIMITS, 2, now=0.0)
    for second in range(100):
        for process in range(2):
            judge.hear(process, beat(second), second)
        assert judge.verdict(second + 0.5) == ""


def test_silence_is_named_with_machine_time_and_place():
    judge = Judge(LIMITS, 2, now=0.0)
    for second in range(20):
        judge.hear(0, beat(second, machine="node16"), second)
        judge.hear(1, beat(min(second, 3), phase="exchange"), second)
        said = judge.verdict(second)
        assert bool(said) == (second > 3 + LIMITS.silence)
    assert said == (
        "process 1 on node17 has not answered for 16 s; it was at step 331, phase "
        "exchange"
    )


def test_a_process_that_never_beats_is_lost_too():
    judge = Judge(LIMITS, 3, now=0.0)
    for second in range(14):
        judge.hear(0, beat(second), second)
        judge.hear(2, beat(second), second)
    assert judge.verdict(13.0).startswith("process 1 has not answered for 13 s")


def test_an_error_of_one_process_is_the_verdict_at_once():
    judge = Judge(LIMITS, 2, now=0.0)
    judge.hear(0, beat(1, error="Gloo", is_victim=True), 1.0)
    judge.hear(1, beat(1, phase="save", error="disk full"), 1.0)
    assert judge.verdict(1.0) == (
        "process 1 on node17 failed at step 331, phase save: disk full"
    )


def test_who_waits_in_vain_makes_the_silent_one_lost_sooner():
    judge = Judge(LIMITS, 3, now=0.0)
    for second in range(6):
        judge.hear(0, beat(second, error="Gloo", is_victim=True), second)
        judge.hear(1, beat(0), second)
        judge.hear(2, beat(second), second)
    assert judge.verdict(5.0).startswith("process 1 on node17 has not answered for 5 s")


def test_processes_that_all_wait_have_lost_each_other():
    judge = Judge(LIMITS, 2, now=0.0)
    for process in range(2):
        judge.hear(process, beat(1, error="closed", is_victim=True), 1.0)
    assert judge.verdict(1.0) == "the processes have lost each other: closed"


class Memory:
    """A table without processes; can stop to answer."""

    def __init__(self):
        self.entries = {}

    def write(self, key, text):
        self.entries[key] = text

    def read_all(self, folder):
        found = {k: v for k, v in self.entries.items() if k.startswith(f"{folder}/")}
        return {key.rpartition("/")[2]: text for key, text in found.items()}


def test_beats_say_where_the_process_is_and_end_with_it():
    table, limits = Memory(), Limits(silence=0.6, stall=0.0)
    with Heartbeat(limits, ends_process=False, table=table) as heartbeat:
        heartbeat.at("save", 40)
        time.sleep(0.3)
        written = Beat.from_text(table.entries["beats/0"])
        assert (written.phase, written.step) == ("save", 40)
        assert json.loads(table.entries["verdict/0"])["text"] == ""
    time.sleep(0.2)
    last = table.entries["beats/0"]
    time.sleep(0.2)
    assert table.entries["beats/0"] == last
    assert not any(t.name.startswith("heartbeat") for t in threading.enumerate())


def test_an_error_is_told_to_the_others_before_it_leaves():
    table = Memory()
    with (
        pytest.raises(OSError, match="no such disk"),
        Heartbeat(Limits(0.6, 0.0), ends_process=False, table=table) as heartbeat,
    ):
        heartbeat.at("save", 40)
        raise OSError("no such disk")
    verdict = json.loads(table.entries["verdict/0"])["text"]
    assert "failed at step 40, phase save: OSError: no such disk" in verdict


def test_a_process_that_was_stopped_says_why_it_ends(capfd):
    """What it reads when it goes on knows of nobody who is lost."""

    class Stopping(Memory):
        def write(self, key, text):
            deadline = time.monotonic() + 5
            while not heartbeat._verdict and time.monotonic() < deadline:
                time.sleep(0.002)
            super().write(key, text)

    limits = Limits(silence=0.6, stall=0.0)
    heartbeat = Heartbeat(limits, ends_process=False, table=Stopping())
    with heartbeat:
        heartbeat._over.wait(10)
    said = capfd.readouterr().err
    assert said.startswith("error: process 0 has not answered for 1 s; it was"), said


def save_error(cause):
    error = UserError("cannot write the checkpoint of step 40; free space")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_victim"),
    [
        (save_error(OSError("No space left on device")), False),
        (save_error(OSError("Connection reset")), False),
        (save_error(ValueError("RESOURCE_EXHAUSTED: disk full")), False),
        (save_error(ValueError("Gloo AllGather failed")), True),
        (save_error(RuntimeError("UNAVAILABLE: Connection reset by peer")), True),
        (save_error(None), False),
        (RuntimeError("Gloo AllGather failed"), True),
        (KeyError("Gloo"), True),
        (KeyError("loss"), False),
    ],
)
def test_who_waits_for_a_lost_process_is_no_cause(error, is_victim, capfd, tmp_path):
    """Also in the midst of a save, which fails like one that finds no space."""
    table = Memory()
    with Heartbeat(Limits(0.4, 0.0), ends_process=False, table=table) as heartbeat:
        heartbeat.writes_into(tmp_path)
        heartbeat.fail(error)
    verdict = json.loads(table.entries["verdict/0"])["text"]
    assert ("lost each other" in verdict) == is_victim
    assert ("failed at" in verdict) != is_victim
    assert Beat.from_text(table.entries["beats/0"]).is_victim == is_victim


def test_pages_of_the_runtime_go_to_a_file(monkeypatch, capfd, tmp_path):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(heartbeat_module, "_leave", leave)
    beats = Heartbeat(Limits(0.4, 0.0), ends_process=True, table=Memory())
    beats.writes_into(tmp_path)
    with pytest.raises(SystemExit) as left, beats:
        try:
            raise RuntimeError("Gloo AllGather failed: a page of it")
        except RuntimeError as error:
            beats.fail(error)
    beats._over.set()
    assert left.value.code == 69
    said = capfd.readouterr().err.strip().splitlines()
    file = tmp_path / "traceback-0.txt"
    assert len(said) == 1 and f"(traceback in {file})" in said[0]
    assert "RuntimeError: Gloo AllGather failed: a page of it" in file.read_text()


SCRIPT = """
import time
from prunex_jax.processes.heartbeat import Limits, Heartbeat
with Heartbeat(Limits(1.0, {stall}), ends_process=True) as heartbeat:
    for _ in range(5):
        heartbeat.at("step", 1)
        time.sleep({usual})
    heartbeat.at("exchange", 7)
    time.sleep({last})
print("came through")
"""


def run_script(**values):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(**values)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_phase_that_does_not_end_is_shown_and_ended():
    code, output, errors = run_script(stall=1.0, usual=0.0, last=30)
    assert code == 124 and not output
    assert "warning: process 0 is at step 7, phase exchange" in errors
    assert 'File "<string>"' in errors, "stacks of the threads"
    assert "error: process 0 is at step 7, phase exchange for 1 s" in errors


@pytest.mark.slow
def test_no_limit_and_short_phases_come_through():
    assert run_script(stall=0.0, usual=0.0, last=2)[:2] == (0, "came through\n")
    assert run_script(stall=2.0, usual=0.1, last=0.5)[:2] == (0, "came through\n")
