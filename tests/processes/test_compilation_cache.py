"""Compiled programs stay on disk for the next process, and never end a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prunex_jax.processes import compilation_cache
from tests.helpers.common import ROOT, free_port

# A process that compiles for all devices of the run and for one; prints what it found.
PROGRAM = """
import collections, json, resource, sys
import jax, jax.numpy as jnp, numpy as np
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start_processes

asked = json.loads(sys.argv[1])
if asked["largest_file"]:  # As on a full disk: what is longer cannot be written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (asked["largest_file"],) * 2)
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
flags = LaunchFlags(**asked["flags"], owns_process=asked["owns_process"])
start_processes(TopologyConfig(cpu_devices=2), flags, compile_cache=asked["where"])

count = jax.device_count()
mesh = jax.make_mesh((count,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.NamedSharding(mesh, jax.P("all"))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=jax.P("all"), out_specs=jax.P())
def total(x):
    return jax.lax.psum(jnp.sin(x) @ jnp.cos(x.T), "all")

values = np.linspace(0.1, 0.9, count * 12, dtype=np.float32).reshape(-1, 4)
shards = jax.make_array_from_callback(
    values.shape, sharding, lambda index: values[index]
)
result = np.asarray(total(shards).addressable_data(0)), np.asarray(jnp.arange(5) ** 3)
print(json.dumps({
    "result": [part.tobytes().hex() for part in result],
    "asked": seen["/jax/compilation_cache/compile_requests_use_cache"],
    "found": seen["/jax/compilation_cache/cache_hits"],
}))
"""


def start(folder, where="auto", owns_process=True, largest_file=0, flags=None, **more):
    """Starts the program in a process whose user cache folder is `folder`."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environ |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), **more}
    asked = {"where": str(where), "owns_process": owns_process}
    asked |= {"largest_file": largest_file, "flags": flags or {}}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(asked)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process):
    """What a process printed at its end, and its warnings."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1]), errors


def run(folder, *arguments, **more):
    return outcome(start(folder, *arguments, **more))[0]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*-cache"))


@pytest.mark.slow
def test_the_second_start_compiles_nothing_and_computes_the_same(tmp_path):
    without = run(tmp_path / "a", "off")
    assert without["found"] == 0 and not (tmp_path / "a").exists()
    first, second = run(tmp_path / "b"), run(tmp_path / "b")
    assert first["found"] == 0 and first["asked"] == second["asked"] >= 3
    assert second["found"] == second["asked"]
    assert without["result"] == first["result"] == second["result"]
    (made,) = (tmp_path / "b/prunex_jax/compiled").iterdir()
    assert len(entries(made)) == first["asked"]
    assert made.stat().st_mode & 0o777 == 0o700, "others could write what is run"


@pytest.mark.slow
def test_every_process_of_a_run_finds_what_it_needs(tmp_path):
    for is_warm in (False, True):
        shared = {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2}
        flags = [{**shared, "process_id": number} for number in range(2)]
        processes = [start(tmp_path, flags=each) for each in flags]
        for found, _ in map(outcome, processes):
            assert found["found"] == (found["asked"] if is_warm else 0)


@pytest.mark.slow
def test_full_disks_and_damaged_programs_cost_time_only(tmp_path):
    expected = run(tmp_path, largest_file=300)
    cut = entries(tmp_path)
    assert len(cut) >= 3 and all(path.stat().st_size <= 300 for path in cut)
    assert run(tmp_path) == {**expected, "found": 0}, "what was cut short is replaced"
    assert run(tmp_path) == {**expected, "found": expected["asked"]}
    for path in entries(tmp_path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
        os.utime(path, (1, 1))
    assert run(tmp_path) == {**expected, "found": 0}


@pytest.mark.slow
def test_processes_may_start_at_once(tmp_path):
    processes = [start(tmp_path, tmp_path / "chosen") for _ in range(3)]
    results = [outcome(process)[0]["result"] for process in processes]
    assert results[0] == results[1] == results[2]
    assert entries(tmp_path / "chosen") and not (tmp_path / "prunex_jax").exists()
    warm = run(tmp_path, tmp_path / "chosen")
    assert warm["found"] == warm["asked"] and warm["result"] == results[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["auto", "~nobody-of-this-name/compiled"])
def test_a_folder_that_cannot_be_used_is_said_once(where, tmp_path):
    """Neither a file in its place nor a missing home folder ends a run."""
    (tmp_path / "file").write_text("")
    found, errors = outcome(start(tmp_path / "file", where))
    assert found["found"] == 0
    assert errors.count("compiled programs are not kept: ") == 1


@pytest.mark.slow
def test_programs_of_other_people_and_their_folders_stay_as_they_are(tmp_path):
    assert run(tmp_path, owns_process=False)["found"] == 0
    assert not entries(tmp_path)
    told = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "told"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000",
    }
    run(tmp_path, **told)
    assert not entries(tmp_path), "jax was told to keep nothing so small"
    told["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    run(tmp_path, **told)
    assert len(entries(tmp_path)) == len(entries(tmp_path / "told")) >= 3


@pytest.mark.parametrize("limit", [0, 3, 7, 100])
def test_what_was_not_used_for_longest_goes_first(limit, tmp_path):
    least = compilation_cache._LEAST_BYTES
    sizes = [3 * least, 10, 2 * least, 10, 10]
    for age, size in enumerate(sizes):
        folder = tmp_path / f"cpu{age % 2}"
        folder.mkdir(exist_ok=True)
        path = folder / f"jit_{age}-cache"
        path.write_bytes(bytes(size))
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "cpu0" / "thesis.txt").write_text("of somebody else")
    compilation_cache._trim(tmp_path, limit * least)
    # The newest ones that fit together: 3, 1, 2, 1 and 1 times the least.
    kept = {0: 0, 3: 1, 7: 4, 100: 5}[limit]
    names = {path.name for path in entries(tmp_path)}
    assert names == {f"jit_{age}-cache" for age in range(kept)}
    assert (tmp_path / "cpu0" / "thesis.txt").exists()


def test_a_writer_of_another_form_is_left_alone(monkeypatch, tmp_path):
    """As a later version of jax may have."""
    from jax._src import compiler

    def write(cache_key: str, entry: bytes) -> None:
        del cache_key, entry

    monkeypatch.setattr(compiler, "_cache_write", write)
    compilation_cache._write_on_every_process(tmp_path)
    assert compiler._cache_write is write
    monkeypatch.delattr(compiler, "_cache_write")
    compilation_cache._write_on_every_process(tmp_path)
    assert not hasattr(compiler, "_cache_write")
