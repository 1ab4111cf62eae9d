"""Eight virtual CPU devices and strict ranks for every test; set before jax is used."""

import collections
import gc
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _xla_flags() -> str:
    """Little optimisation, one part, and the generator of code that is fastest.

    Later versions end the process over the flag of that generator.
    """
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    if (int(major), int(minor)) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


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
from tests.helpers.selection import TURNS, has_its_turn, select  # noqa: E402

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
collect_ignore_glob = ["helpers/*"]

# The files that take longest are started before all others, or they would end alone.
_FIRST_FILES = (
    "benchmarks/test_runner.py",
    "train/test_sliced_runs.py",
    "channels/test_generated.py",
    "train/test_language.py",
    "train/test_shrink_and_continue.py",
    "train/test_cuda.py",
    "train/test_run.py",
    "methods/test_sliced.py",
    "methods/test_contract.py",
    "mesh/test_simulated.py",
)
_PLACES = {
    Path(__file__).parent / name: place
    for place, name in enumerate(_FIRST_FILES, -len(_FIRST_FILES))
}
# Sets of tests with packages of their own.
_SETS = ("zoo", "weights", "pytorch", "gpu_programs")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which of the slow tests run; `make test-slow` gives both."""
    group = parser.getgroup("prunex_jax")
    group.addoption("--since", default="", help="take slow tests by what changed since")
    group.addoption("--sample", default="", help="draw cases that take turns from this")


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
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Puts files in order; the sort is stable. Takes the slow tests of this run."""
    items.sort(key=lambda item: _PLACES.get(item.path, 0))
    _mark_turns(items)
    since, sample = config.getoption("since"), config.getoption("sample")
    selection = select(since)
    taken, left_out = [], []
    for item in items:
        is_taken = not item.get_closest_marker("slow") or (
            selection.takes(item.path) and _has_its_turn(item, sample)
        )
        (taken if is_taken else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = taken


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """It is no error if what changed asks for none of the tests."""
    if (
        session.config.getoption("since")
        and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    ):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says which slow tests were taken, and how to take them again."""
    since, sample = config.getoption("since"), config.getoption("sample")
    if sample:
        terminalreporter.write_line(f"slow tests: {select(since)}")
        terminalreporter.write_line(
            f"of cases that take turns, 1 in {TURNS}: SAMPLE={sample} SINCE={since}"
        )


def _mark_turns(items: list[pytest.Item]) -> None:
    """Marks the cases that take turns, all of which are slow.

    Of the quick cases of a test marked `sampled(n)`, and of its slow ones, n stay as
    they are, evenly spread; the others take turns.
    """
    tests = collections.defaultdict(list)
    for item in items:
        is_slow = bool(item.get_closest_marker("slow"))
        if item.get_closest_marker("rotates"):
            item.add_marker("slow")
        elif item.get_closest_marker("sampled") and not _is_of_a_set(item):
            tests[item.nodeid.split("[")[0], is_slow].append(item)
    for found in tests.values():
        mark = found[0].get_closest_marker("sampled")
        assert mark is not None
        (count,) = mark.args
        kept = {at * len(found) // count for at in range(count)}
        for at, item in enumerate(found):
            if at not in kept:
                item.add_marker("rotates")
                item.add_marker("slow")


def _is_of_a_set(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, _SETS))


def _has_its_turn(item: pytest.Item, sample: str) -> bool:
    """Cases of a file with the same parameters share programs, and come together."""
    if not sample or not item.get_closest_marker("rotates"):
        return True
    file, _, test = item.nodeid.partition("::")
    return has_its_turn(file + (test.partition("[")[2] or test), sample)


@pytest.fixture(scope="session")
def sample(request: pytest.FixtureRequest) -> str:
    """What is drawn this time: the text of `--sample`."""
    return str(request.config.getoption("sample"))


@pytest.fixture(params=[(1, 4), (2, 2), (4, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    """Meshes of four devices, from one host to four."""
    return make_mesh(*request.param)
