"""What is compiled while steps run is what the run then calls, and changes nothing."""

import collections
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from prunex_jax.train import run
from prunex_jax.train.changes.ahead import Call, CompilerAhead
from prunex_jax.train.steps.compiled import Ledger, Program
from tests.helpers.common import ROOT
from tests.helpers.tiny_runs import merged, rows_of, settings, start_two

SETTINGS = settings(
    # A stair, the freeze, the cut, and the small network.
    sparsity={
        "start_share": 0.1,
        "freeze_share": 0.4,
        "shrink_share": 0.6,
        "num_stairs": 1,
    },
    method={"hsadmm": {"sync_period": 2}},
    run={"steps": 14, "eval_every_steps": 4, "log_every_steps": 2},
)


def make_program(build):
    return Program("f", build, {"host": 1, "device": 1}, Ledger())


def without_times(row):
    return {key: value for key, value in row.items() if "second" not in key}


def wait_until(is_done):
    deadline = time.monotonic() + 20
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run without and with it: results, folders, and who built what."""
    found = {}
    build_now = Program._build_now
    for choice in ("off", "on"):
        built = collections.defaultdict(list)

        def record(self, args, static, built=built):
            is_ahead = threading.current_thread() is not threading.main_thread()
            built[is_ahead].append((self.name, *sorted(map(str, static.items()))))
            return build_now(self, args, static)

        folder = tmp_path_factory.mktemp(choice) / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Program, "_build_now", record)
            values = merged(SETTINGS, {"run": {"compile_ahead": choice}})
            result = run.train(values, folder)
        found[choice] = result, folder, built
    return found


@pytest.mark.slow
def test_a_run_calls_what_was_foreseen(runs):
    plain, ahead = runs["off"][2], runs["on"][2]
    assert not plain[True] and sorted(plain[False]) == sorted(
        ahead[False] + ahead[True]
    )
    by_name = collections.Counter(name for name, *_ in plain[False])
    assert by_name["exchange"] == 5 and by_name["local_step"] == 2
    # The first step is compiled before anything can be ahead of it. What is needed at
    # once may be compiled by either thread; of the rest, here is who must do it.
    early = {"init", "local_step", "exchange", "report", "clear"}
    behind = {"shrink", "evaluate"}  # Evaluation of the network at the end.
    assert {name for name, *_ in ahead[False]} <= early | behind | {"network"}
    assert sum(name == "exchange" for name, *_ in ahead[True]) >= 2
    small_step = [build for build in ahead[False] if build[0] == "local_step"]
    assert len(small_step) <= 2


@pytest.mark.slow
def test_nothing_else_changes(runs):
    (plain, folder, _), (ahead, other, _) = runs["off"], runs["on"]
    for row, wanted in zip(rows_of(other), rows_of(folder), strict=True):
        assert without_times(row) == without_times(wanted)
    for key, value in plain.summary.items():
        assert "second" in key or ahead.summary[key] == value, key


@pytest.mark.rotates
def test_processes_that_compile_ahead_do_not_wait_for_ever(tmp_path):
    for choice in ("off", "on"):
        values = merged(SETTINGS, {"run": {"compile_ahead": choice}})
        (tmp_path / choice).mkdir()
        for process in start_two(tmp_path / choice, values, tmp_path / choice / "run"):
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    rows, wanted = (rows_of(tmp_path / choice / "run") for choice in ("on", "off"))
    assert [*map(without_times, rows)] == [*map(without_times, wanted)]


def test_threads_build_once():
    started = threading.Barrier(4)
    builds = []

    def build(times):
        builds.append(times)
        time.sleep(0.2)
        return lambda x: times * x

    program = make_program(build)

    def ask():
        started.wait()
        program.compile_ahead(jnp.ones(3), times=2)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    assert program(jnp.ones(3), times=2).tolist() == [2, 2, 2]
    for thread in threads:
        thread.join()
    assert builds == [2]


def test_what_was_foreseen_wrongly_is_compiled_again():
    program = make_program(lambda: lambda x: x + 1)
    program.compile_ahead(jax.ShapeDtypeStruct((7,), jnp.float32))
    assert not program.is_compiled()
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]


def test_an_error_is_met_by_who_calls():
    calls = []

    def build():
        calls.append(1)
        raise ValueError("cannot be built")

    program, other = make_program(build), make_program(lambda: lambda x: x)
    with CompilerAhead(True) as ahead:
        ahead.foresee(Call(p, (jnp.ones(2),), {}) for p in (program, other))
        wait_until(lambda: other._builds)
    assert other._builds and not program._builds
    with pytest.raises(ValueError, match="cannot be built"):
        program(jnp.ones(2))
    assert len(calls) == 2


def test_what_is_left_is_dropped_at_the_end_and_by_news():
    built, going_on = [], threading.Event()

    def build(number):
        built.append(number)
        going_on.wait(10)
        return lambda x: x

    program = make_program(build)

    def calls(*numbers):
        for number in numbers:
            yield Call(program, (jnp.ones(2),), {"number": number})

    with CompilerAhead(True) as ahead:
        ahead.foresee(calls(1, 2, 3))
        wait_until(lambda: built)
        ahead.foresee(calls(4))
        going_on.set()
        wait_until(lambda: 4 in built)
    assert built == [1, 4]


def test_an_error_does_not_wait_for_what_is_being_compiled():
    built, going_on = [], threading.Event()

    def build(number):
        built.append(number)
        going_on.wait(60)
        return lambda x: x

    program = make_program(build)
    calls = (Call(program, (jnp.ones(2),), {"number": n}) for n in (1, 2))
    with pytest.raises(ValueError, match="of the run"), CompilerAhead(True) as ahead:
        ahead.foresee(calls)
        wait_until(lambda: built)
        raise ValueError("of the run")
    assert program._builds and not any(b.done() for b in program._builds.values())
    going_on.set()
    wait_until(lambda: all(b.done() for b in program._builds.values()))
    assert built == [1]


SLOW_COMPILATION = """
import threading, time
from prunex_jax.train.changes.ahead import Call, CompilerAhead
started = threading.Event()
class Slow:
    def compile_ahead(self):
        started.set()
        time.sleep(1)
        print("compiled", flush=True)
with CompilerAhead(True) as ahead:
    ahead.foresee([Call(Slow(), (), {})])
    started.wait()
    raise ValueError("of the run")
"""


@pytest.mark.slow
def test_an_error_is_printed_before_python_waits_for_what_is_being_compiled():
    done = subprocess.run(
        [sys.executable, "-c", SLOW_COMPILATION],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.index("ValueError: of the run") < done.stdout.index("compiled")


def test_contexts_of_the_calling_thread_are_not_lost():
    """Their programs would be others, so none is compiled elsewhere."""
    program, plain = (make_program(lambda: lambda x: x @ x) for _ in range(2))
    with jax.default_matmul_precision("highest"), CompilerAhead(True) as ahead:
        ahead.foresee([Call(program, (jnp.ones((2, 2)),), {})])
        ahead._thread.submit(lambda: None).result()
        assert not program._builds
    with CompilerAhead(True) as ahead:
        ahead.foresee([Call(plain, (jnp.ones((2, 2)),), {})])
        ahead._thread.submit(lambda: None).result()
        assert plain._builds


def test_off_does_nothing():
    with CompilerAhead(False) as ahead:
        ahead.foresee(iter([Call(make_program(lambda: 1 / 0), (), {})]))
