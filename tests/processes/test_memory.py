"""Memory that a process frees stays with it, and goes back when it is asked for."""

import json
import os
import platform

import pytest

from prunex_jax.base.command import Values
from prunex_jax.processes import LaunchFlags
from prunex_jax.train.commands.command import given_launch
from tests.helpers.common import run_script

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="these are settings of glibc"
)

# Takes and frees buffers as a step does, and counts the pages the kernel maps for it.
STEPS = """
import ctypes, json, os, resource
from pathlib import Path
import jax
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import LaunchFlags, start_processes

BYTES = 128 * 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = libc.malloc(BYTES)
    libc.memset(buffer, 1, BYTES)
    libc.free(buffer)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()

flags = LaunchFlags(owns_process=os.environ["OWNS_PROCESS"] == "yes")
start_processes(TopologyConfig(cpu_devices=2), flags)
faults = [faults_of_a_step() for _ in range(4)]
kept = resident_bytes()
libc.malloc_trim(0)
print(json.dumps({"faults": faults[1:], "returned": kept - resident_bytes()}))
"""
PAGES = 128 * 2**20 // os.sysconf("SC_PAGESIZE")


def run_steps(folder, owns_process=True, **environment):
    script = folder / "steps.py"
    script.write_text(STEPS)
    environment["OWNS_PROCESS"] = "yes" if owns_process else "no"
    return json.loads(run_script(script, **environment))


def test_later_steps_use_the_memory_of_earlier_ones(tmp_path):
    result = run_steps(tmp_path)
    assert max(result["faults"]) < PAGES // 100, "the kernel maps it in every step"
    assert result["returned"] > 0.9 * 128 * 2**20, "what was freed cannot be returned"


def test_the_process_of_somebodys_program_is_left_as_it_is(tmp_path):
    # Huge pages, where the kernel gives them, are fewer than these.
    assert min(run_steps(tmp_path, owns_process=False)["faults"]) > PAGES // 600


def test_commands_own_their_process_and_calls_of_the_library_do_not():
    assert not LaunchFlags().owns_process
    flags = {"coordinator": "", "num_processes": 0, "process_id": -1}
    assert given_launch(Values(**flags, launcher="auto")).owns_process


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"},
    ],
)
def test_settings_of_the_user_stand(tmp_path, setting):
    # Huge pages, where the kernel gives them, are fewer than these.
    assert min(run_steps(tmp_path, **setting)["faults"]) > PAGES // 600
