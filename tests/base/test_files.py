"""Files appear whole, damage is noticed, and one process has a folder to itself."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prunex_jax.base.errors import UserError
from prunex_jax.base.files import (
    alone_in,
    digests_of,
    find_damage,
    whole_folder,
    write_json,
    write_whole,
)
from tests.helpers.common import ROOT

HOLDER = """
import sys, time
from prunex_jax.base.files import alone_in
with alone_in(sys.argv[1], True):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_whole(path, "old ä")
    assert path.read_text(encoding="utf-8") == "old ä"
    write_whole(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    monkeypatch.setattr(os, "replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(path, "new")
    assert path.read_bytes() == b"\x00\x01", "what was there stays until the end"


def test_json_is_strict_and_ordered_on_request(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": [2]})
    assert list(json.loads(path.read_text())) == ["b", "a"]
    write_json(path, {"b": 1, "a": [2]}, sort_keys=True)
    assert path.read_text() == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="nan"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"b": 1, "a": [2]}


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "model"
    with whole_folder(path) as folder:
        (folder / "a").write_text("first")
        assert not path.exists()
    with pytest.raises(RuntimeError), whole_folder(path) as folder:
        (folder / "a").write_text("second")
        raise RuntimeError
    assert (path / "a").read_text() == "first"
    with whole_folder(path) as folder:
        (folder / "b").write_text("third")
    assert [entry.name for entry in path.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_damage_is_named(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b"):
        (tmp_path / name).write_text(name)
    written = digests_of(tmp_path)
    assert set(written) == {"a", "sub/b"}
    (tmp_path / "later").write_text("")
    assert find_damage(written, digests_of(tmp_path)) == ""
    (tmp_path / "sub/b").write_text("B")
    assert (
        find_damage(written, digests_of(tmp_path)) == "sub/b is not as it was written"
    )
    (tmp_path / "a").unlink()
    assert find_damage(written, digests_of(tmp_path)) == "a is missing"
    assert digests_of(tmp_path / "nowhere") == {}


def test_one_process_has_the_folder_until_it_ends_however_it_ends(tmp_path):
    workdir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(workdir)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match=f"--workdir={workdir} is in use"):
                with alone_in(workdir, True):
                    pass
            with alone_in(workdir, False):
                pass  # Processes that do not write may come in.
        finally:
            holder.kill()
    for _ in range(2):
        with alone_in(workdir, True):
            assert all(entry.name[0] == "." for entry in workdir.iterdir())


def test_a_file_system_that_cannot_lock_keeps_nobody_out(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_in(tmp_path, True), alone_in(tmp_path, True):
        pass


def test_what_cannot_be_locked_is_left_to_whoever_writes(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", Path("/proc/nowhere")):
        with alone_in(path, True):
            pass
