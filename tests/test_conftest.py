"""What the suite adds to a run of tests where one of its processes is lost."""

import os
import subprocess
import sys

import pytest

from tests.helpers.common import ROOT

SLEEP = "import os, time\n\n" + "\n".join(
    f"def test_{i}():\n    time.sleep(0.05)\n" for i in range(3)
)
DIE = """
def test_last():
    if not os.path.exists("died"):
        open("died", "w").close()
        os.abort()
"""


def run_pytest(folder):
    return subprocess.run(
        [sys.executable, *"-m pytest -q -ra -n 2 --dist loadfile".split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_files_of_a_lost_process_are_finished_by_others(tmp_path):
    """A process that dies costs one test, not those that come after it.

    One process is busy with a long file while the other has done some, and dies.
    """
    hook = "from tests.conftest import pytest_xdist_make_scheduler  # noqa: F401\n"
    (tmp_path / "conftest.py").write_text(hook)
    many = "\n".join(f"def test_more_{i}():\n    time.sleep(0.05)\n" for i in range(40))
    for number in range(12):
        more = {1: many, 6: DIE}.get(number, "")
        (tmp_path / f"test_{number:02}.py").write_text(f"{SLEEP}\n{more}")
    done = run_pytest(tmp_path)
    assert "1 failed, 77 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_06.py::test_last'" in done.stdout
