"""Eight virtual CPU devices and strict ranks for every test; set before jax is used."""

import collections
import gc
import importlib.metadata
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _xla_flags() -> str:
    """Little optimisation, and the generator of code that compiles in half the time.

    Later versions end the process over the flag of that generator.
    """
    flags = "--xla_backend_optimization_level=0"
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    if (int(major), int(minor)) < (0, 11):
        flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


# Nearly all the time of the tests is compilation. Programs are compiled with little
# optimisation, and kept between tests, processes and runs of the suite; processes that
# tests start inherit both, so that results can be compared bit for bit.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
os.environ.setdefault("XLA_FLAGS", _xla_flags())
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.helpers.common import make_mesh  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


# What imports leave behind is never garbage, and programs of one file are of no use to
# the next: without both, most of the time goes into looking for garbage among them.
gc.freeze()
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Lets go of what was traced and compiled for a file."""
    yield
    jax.clear_caches()


# Imported by tests and by scripts; some need packages that are not installed.
collect_ignore_glob = ["helpers/*", "benchmarks/*"]

# The files that take longest are started before all others, or they would end alone.
# Those that start processes come after all others: a run that has to end by
# `TESTS_UNTIL` leaves out what comes last.
_FIRST_FILES = (
    "bench/test_runner.py",
    "train/test_sliced_runs.py",
    "channels/test_generated.py",
    "train/test_language.py",
    "train/test_shrink_and_continue.py",
    "train/test_cuda.py",
    "train/test_run.py",
    "methods/test_sliced.py",
    "methods/test_contract.py",
    "mesh/test_folding.py",
)
_LAST_FILES = (
    "train/test_run_processes.py",
    "train/test_regroup.py",
    "train/test_drills.py",
    "train/test_drills_of_machines.py",
    "train/test_launchers.py",
    "train/test_stragglers.py",
    "train/test_ahead.py",
    "bench/test_drill.py",
)
_PLACES = {
    Path(__file__).parent / name: place
    for files, start in ((_FIRST_FILES, -len(_FIRST_FILES)), (_LAST_FILES, 1))
    for place, name in enumerate(files, start)
}
# Sets of tests beside the quick and the slow ones.
_SETS = ("exhaustive", "zoo", "weights", "gpu_programs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives test processes whole files, also when one of them was lost."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        """Hands on what a lost process has not done, without files that it has done.

        Another process would be given these, find nothing to run, and wait for ever.
        """

        def remove_node(self, node: Any) -> str | None:
            files = self.assigned_work.get(node, {})
            for file in [file for file, tests in files.items() if all(tests.values())]:
                del files[file]
            found: str | None = super().remove_node(node)
            return found

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)  # Before what `-m` deselects is chosen.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files in order; the sort is stable, so that others keep theirs."""
    items.sort(key=lambda item: _PLACES.get(item.path, 0))
    _sample(items)


def pytest_runtest_setup() -> None:
    """Skips what has not begun by `TESTS_UNTIL`, in seconds since 1970."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip("the time for tests is over (TESTS_UNTIL)")


def _sample(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `sampled(n, rest)`, n stay, evenly spread."""
    tests = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not _is_left_out(item, mark):
            tests[item.nodeid.split("[")[0]].append((item, mark))
    for found in tests.values():
        count = found[0][1].args[0]
        kept = {at * len(found) // count for at in range(count)}
        for at, (item, mark) in enumerate(found):
            if at not in kept:
                item.add_marker(_rest(mark))


def _rest(mark: pytest.Mark) -> str:
    return mark.args[1] if len(mark.args) > 1 else "slow"


def _is_left_out(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Whether a further mark puts a case into the set of the rest, or into another."""
    return any(map(item.get_closest_marker, (_rest(mark), *_SETS)))


@pytest.fixture(params=[(1, 4), (2, 2), (4, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    """Meshes of four devices, from one host to four."""
    return make_mesh(*request.param)
