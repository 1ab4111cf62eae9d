"""Command line that examines machines before a long run.

    prunex-jax doctor [--workdir=FOLDER] [--layout=LAYOUT] [--cpu_devices=N]
        [--checkpoint_bytes=N] [--seconds=N] [--join_seconds=N]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I] [--launcher=NAME]

Started like training, on all hosts. It shows which devices form which host, compares
versions and clocks, tries the run folder and the links, and checks sums over both axes
of the mesh. With the size of a checkpoint, which `train --dry_run` prints as `disk`, it
says whether the folder holds three and how long one takes. Its last lines say for each
of them ok, warning or FAILED, and what to do. Nothing is left in FOLDER. Exit code 0:
nothing failed; 1: something did; 2: bad input.
"""

import dataclasses
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.environment import source_revision, versions
from prunex_jax.base.errors import UserError, one_line
from prunex_jax.base.files import expanded
from prunex_jax.comm import mean_over_devices, mean_over_hosts
from prunex_jax.compare.probe import probe_links
from prunex_jax.mesh import (
    DEVICE_AXIS,
    HOST_AXIS,
    AnyMesh,
    MeshAxes,
    Topology,
    gather_texts,
    make_topology,
    map_over,
    placed,
    run_together,
)
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.processes import Heartbeat, Limits, start_processes
from prunex_jax.processes.gpus import visible_gpus
from prunex_jax.train.build.joining import check_shared_folder
from prunex_jax.train.commands.command import LAUNCH_FLAGS, given_launch

OK, WARNING, FAILED = "ok", "warning", "FAILED"
EXIT_UNWELL = 1
# What a process found, as JSON.
Found = Mapping[str, Any]

# More than this apart, times in logs of several hosts tell no order.
_MOST_CLOCK_SECONDS = 1.0
_CLOCK_READINGS = 5
# Without a sign of life, and in one check, until a process says so and ends.
_LIMITS = Limits(silence=60.0, stall=300.0)
_WRITTEN_BYTES = 2**26
# Below these a run folder is too full, or too slow for checkpoints of a large network.
_LEAST_FREE_BYTES = 2**30
_LEAST_BYTES_PER_SECOND = 20e6
# Where the size of a checkpoint is known, these take their place: a run keeps two, and
# writes the next one.
_LEAST_CHECKPOINTS = 3
_MOST_SAVE_SECONDS = 300.0
# Channels that the exchange is tried with, and every which is kept.
_NUM_CHANNELS, _KEPT_STRIDE = 4096, 3
# Of a large mean, and how often it is made: some faults show in large ones, and rarely.
_NUM_LARGE, _REPEATS = 2**22, 5

COMMAND = Command(
    text=str(__doc__),
    flags=(
        Flag("workdir", "", "Run folder to try; without it no folder is tried."),
        Flag("checkpoint_bytes", 0, "Size of one, as in train --dry_run.", at_least=0),
        Flag("layout", "auto", "What a host is, as topology.layout says."),
        Flag("cpu_devices", 0, "As topology.cpu_devices.", at_least=0),
        Flag("seconds", 4, "Time for measuring the links.", at_least=1),
        Flag("join_seconds", 60, "How long processes wait for each other.", at_least=1),
        *LAUNCH_FLAGS,
    ),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found about one item."""

    item: str
    status: str  # OK, WARNING or FAILED.
    text: str  # What was found.
    remedy: str = ""  # What to do about it.

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.status:<8} {self.item}: {self.text}{remedy}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and examines."""
    return run_command(COMMAND, _doctor, arguments)


def examine(
    topology: Topology,
    workdir: str = "",
    seconds: float = 4.0,
    checkpoint_bytes: int = 0,
) -> list[Verdict]:
    """Tries everything; all processes of the mesh call this, and get the same verdicts.

    Args:
      topology: Hosts and devices.
      workdir: Run folder to try; empty for none.
      seconds: Time for measuring the links.
      checkpoint_bytes: Of one checkpoint, over all hosts; 0 if unknown.
    Collectives:
      Small gathers, and sums over both axes of the mesh.
    """
    found = _gather_found(_about_this_process)
    verdicts = [
        judge_devices(found),
        judge_addresses(found),
        judge_versions(found),
        judge_clocks(_clock_readings()),
    ]
    if workdir:
        verdicts += _try_folder(expanded(workdir), checkpoint_bytes)
    mesh = topology.mesh
    verdicts += _tried("sums", lambda: [check_sums(mesh)])
    verdicts += _tried("exchange", lambda: [check_exchange(mesh)])
    verdicts += _tried("large sums", lambda: [check_large_sums(mesh)])
    verdicts += _tried("links", lambda: _links(topology, seconds))
    return verdicts


def _gather_found(find: Callable[[], Found]) -> list[Found]:
    """What every process finds, in the order of processes.

    `find` must not communicate. An OSError that it raises is found too, as `error`.

    Collectives:
      As `mesh.gather_texts`.
    """
    try:
        found = find()
    except OSError as error:
        found = {"error": one_line(error)}
    return [json.loads(text) for text in gather_texts(json.dumps(found))]


def _about_this_process() -> Found:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    source = source_revision(Path(__file__).parents[1])
    local = jax.local_devices()
    return {
        "name": name,
        "address": address,
        "versions": {
            **versions(),
            "source": source and source["revision"],
            "platform": jax.default_backend(),
            "device kind": local[0].device_kind,
        },
        "num_devices": len(local),
        "num_gpus": len(visible_gpus(os.environ)),
    }


def judge_devices(found: Sequence[Found]) -> Verdict:
    """Whether machines use the GPUs they have, each once."""
    processes = Counter(each["name"] for each in found)
    kinds = {each["versions"]["platform"] for each in found}
    for name, count in sorted(processes.items()):
        here = [each for each in found if each["name"] == name]
        num_gpus = max(each["num_gpus"] for each in here)
        used = sum(each["num_devices"] for each in here)
        if num_gpus and kinds == {"cpu"}:
            text = f"{name} has {num_gpus} GPUs, and jax uses the CPU"
            remedy = "install jax[cuda13], or give --cpu_devices on purpose"
            return Verdict("devices", WARNING, text, remedy)
        # A process that sees its own GPU only cannot say what others have.
        if num_gpus > 1 and used < num_gpus:
            text = f"{count} processes on {name} use {used} of the {num_gpus} GPUs"
            remedy = "start one process per node, or one per GPU"
            return Verdict("devices", WARNING, text, remedy)
    total = sum(each["num_devices"] for each in found)
    text = f"{total} ({', '.join(sorted(kinds))}) of {len(found)} processes on "
    return Verdict("devices", OK, f"{text}{len(processes)} machines")


def judge_addresses(found: Sequence[Found]) -> Verdict:
    """Whether the name of every machine leads to an address that others can reach."""
    listed = {each["name"]: each["address"] for each in found}
    text = ", ".join(f"{name} {where or '(none)'}" for name, where in listed.items())
    hidden = [
        name for name, where in listed.items() if not where or where.startswith("127.")
    ]
    if len(listed) > 1 and hidden:
        remedy = f"give {', '.join(hidden)} an address in /etc/hosts that others reach"
        remedy += ": collectives on CPU listen there"
        return Verdict("addresses", WARNING, text, remedy)
    return Verdict("addresses", OK, text)


def judge_versions(found: Sequence[Found]) -> Verdict:
    """Whether all processes run the same programs on the same devices."""
    first = found[0]["versions"]
    for process, each in enumerate(found):
        for name, version in each["versions"].items():
            if version != first[name]:
                text = (
                    f"{name} is {version} on process {process} ({each['name']}) and "
                    f"{first[name]} on process 0 ({found[0]['name']})"
                )
                remedy = "install the same on every machine"
                return Verdict("versions", FAILED, text, remedy)
    shown = ("prunex_jax", "jax", "jaxlib", "python")
    text = ", ".join(f"{name} {first[name]}" for name in shown)
    return Verdict("versions", OK, f"{text}, the same on {len(found)} processes")


def _clock_readings() -> list[list[float]]:
    """Clocks of all processes, several times, each just after a barrier."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        gather_texts("here")
        now = repr(time.time())
        readings.append([float(text) for text in gather_texts(now)])
    return readings


def judge_clocks(readings: Sequence[Sequence[float]]) -> Verdict:
    """Whether clocks agree; the reading with the least difference counts."""
    best = min(readings, key=lambda reading: max(reading) - min(reading))
    apart = max(best) - min(best)
    if apart > _MOST_CLOCK_SECONDS:
        ahead, behind = best.index(max(best)), best.index(min(best))
        text = f"process {ahead} is {apart:.1f} s ahead of process {behind}"
        remedy = "start time synchronisation (chrony, ntpd) on both"
        return Verdict("clocks", WARNING, text, remedy)
    return Verdict("clocks", OK, f"at most {apart:.3f} s apart")


def _try_folder(workdir: Path, checkpoint_bytes: int) -> list[Verdict]:
    """Whether all processes see one folder, and how fast and how empty it is."""
    is_primary, was_there = jax.process_index() == 0, workdir.exists()
    try:
        run_together(lambda: _make(workdir) if is_primary else None)
        check_shared_folder(workdir)
        count = jax.process_count()
        shared = Verdict("workdir", OK, f"{workdir} is the same on {count} processes")
        found = _gather_found(lambda: _speed_of(workdir))
        return [shared, judge_speed(found, checkpoint_bytes)]
    except UserError as error:
        return [Verdict("workdir", FAILED, str(error))]
    finally:
        is_new = is_primary and not was_there and workdir.is_dir()
        if is_new and not any(workdir.iterdir()):
            workdir.rmdir()


def _make(workdir: Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise UserError(
            f"{workdir}: {one_line(error)}; choose a folder that the first process can "
            "write"
        ) from error


def _speed_of(workdir: Path) -> Found:
    """Writes and removes a file."""
    part = np.random.default_rng(0).bytes(2**20)
    free = shutil.disk_usage(workdir).free
    if free < 2 * _WRITTEN_BYTES:
        return {"free": free, "speed": 0.0}
    with tempfile.TemporaryFile(dir=workdir) as file:
        started = time.perf_counter()
        for _ in range(_WRITTEN_BYTES // len(part)):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - started
    return {"free": free, "speed": _WRITTEN_BYTES / seconds}


def judge_speed(found: Sequence[Found], checkpoint_bytes: int = 0) -> Verdict:
    """Whether a folder has room, and takes checkpoints fast.

    `found` are free bytes and bytes per second of every process, all writing at once;
    `checkpoint_bytes` those of one checkpoint over all hosts, 0 if unknown.
    """
    for process, each in enumerate(found):
        if "error" in each:
            text = f"process {process} cannot write: {each['error']}"
            remedy = "every process writes its part of a checkpoint: give all the right"
            return Verdict("disk", FAILED, text, f"{remedy} to")
    free = min(each["free"] for each in found)
    speed = min(each["speed"] for each in found)
    text = f"{free / 1e9:,.1f} GB free, {speed / 1e6:,.0f} MB/s where it is slowest"
    least, is_slow = _LEAST_FREE_BYTES, speed < _LEAST_BYTES_PER_SECOND
    if checkpoint_bytes:
        least = max(_LEAST_CHECKPOINTS * checkpoint_bytes, 2 * _WRITTEN_BYTES)
        text += f"; a checkpoint of {checkpoint_bytes / 1e9:,.1f} GB"
        if speed:  # Every process writes its part.
            seconds = checkpoint_bytes / (len(found) * speed)
            is_slow = seconds > _MOST_SAVE_SECONDS
            text += f" takes about {seconds:,.1f} s"
    if free < least:
        remedy = "make room; train --dry_run says what a checkpoint takes"
        if checkpoint_bytes:
            remedy = f"make room for {_LEAST_CHECKPOINTS} checkpoints"
        is_full = checkpoint_bytes > 0 or free < 2 * _WRITTEN_BYTES
        return Verdict("disk", FAILED if is_full else WARNING, text, remedy)
    if is_slow:
        remedy = "save less often (run.checkpoint_every_steps), or use a faster disk"
        return Verdict("disk", WARNING, text, remedy)
    return Verdict("disk", OK, text)


def _tried(item: str, check: Callable[[], list[Verdict]]) -> list[Verdict]:
    """Verdicts, also where the collective itself fails."""
    try:
        return check()
    except jax.errors.JaxRuntimeError as error:
        remedy = (
            "look at the network between the machines: firewall, interface "
            "(NCCL_SOCKET_IFNAME), drivers"
        )
        return [Verdict(item, FAILED, one_line(error)[:300], remedy)]


def check_sums(mesh: AnyMesh) -> Verdict:
    """Means over each axis of the mesh, which are sums, against those of numpy."""
    shape = mesh.shape[HOST_AXIS], mesh.shape[DEVICE_AXIS]
    numbers = np.arange(1, mesh.size + 1, dtype=np.float32).reshape(shape)
    both, wrong = jax.P(HOST_AXIS, DEVICE_AXIS), list[str]()

    def over_hosts(block: jax.Array) -> jax.Array:
        return mean_over_hosts(block, MeshAxes(HOST_AXIS, None)) + 0 * block

    def over_devices(block: jax.Array) -> jax.Array:
        return mean_over_devices(block, MeshAxes(None, DEVICE_AXIS)) + 0 * block

    for number, mean in enumerate((over_hosts, over_devices)):
        what = f"the sum over the {(HOST_AXIS, DEVICE_AXIS)[number]} axis"
        wanted = np.broadcast_to(numbers.mean(number, keepdims=True), shape)
        wrong += _differences(what, _program(mesh, mean, both)(numbers), wanted)
    text = f"right over both axes of {shape[0]} x {shape[1]}"
    return _judge_numbers("sums", wrong, text)


def check_exchange(mesh: AnyMesh) -> Verdict:
    """Averages kept channels over hosts as a run does, against numpy."""
    num_hosts = mesh.shape[HOST_AXIS]
    keep = np.arange(0, _NUM_CHANNELS, _KEPT_STRIDE)
    rows = np.random.default_rng(0).normal(size=(num_hosts, _NUM_CHANNELS))
    rows = rows.astype(np.float32)

    def exchange(block: jax.Array) -> jax.Array:
        mean = mean_over_hosts(block[0, keep], MeshAxes())
        whole = jnp.zeros(_NUM_CHANNELS, block.dtype).at[keep].set(mean)
        return (whole + 0 * block[0])[None]

    means = _program(mesh, exchange, jax.P(HOST_AXIS))(rows)
    wanted = np.zeros_like(rows)
    wanted[:, keep] = rows[:, keep].mean(0)
    wrong = _differences("the mean of kept channels over hosts", means, wanted)
    text = f"{len(keep)} of {_NUM_CHANNELS} channels averaged over {num_hosts} hosts"
    return _judge_numbers("exchange", wrong, text)


def check_large_sums(mesh: AnyMesh) -> Verdict:
    """Averages as many numbers as a network has parameters, several times."""
    numbers = np.arange(1, mesh.shape[HOST_AXIS] + 1, dtype=np.float32)

    def average(number: jax.Array) -> jax.Array:
        block = number * (jnp.arange(_NUM_LARGE) % _NUM_CHANNELS).astype(jnp.float32)
        return (mean_over_hosts(block, MeshAxes()) + 0 * block)[None]

    program = _program(mesh, average, jax.P(HOST_AXIS))
    row = (np.arange(_NUM_LARGE) % _NUM_CHANNELS).astype(np.float32) * numbers.mean()
    wanted = np.broadcast_to(row, (len(numbers), _NUM_LARGE))
    wrong = list[str]()
    for _ in range(_REPEATS):
        what = f"a mean of {_NUM_LARGE:,} numbers"
        wrong += _differences(what, program(numbers), wanted)
    text = f"means of {_NUM_LARGE:,} numbers over hosts, {_REPEATS} times"
    return _judge_numbers("large sums", wrong, text)


def _program(
    mesh: AnyMesh, mean: Callable[[jax.Array], jax.Array], spec: jax.P
) -> Callable[[np.ndarray], jax.Array]:
    """A function of blocks, compiled for numbers of the host that lie on the mesh."""
    program = jax.jit(map_over(mesh, mean, spec, spec))
    return lambda numbers: program(placed(numbers, mesh, spec))


def _differences(what: str, array: jax.Array, wanted: np.ndarray) -> list[str]:
    """Names the devices of this process whose numbers are others, beyond rounding."""
    return [
        f"{what} is wrong on {shard.device} of process {jax.process_index()} "
        f"({socket.gethostname()})"
        for shard in array.addressable_shards
        if not np.allclose(shard.data, wanted[shard.index], rtol=1e-5, atol=1e-5)
    ]


def _judge_numbers(item: str, wrong: Sequence[str], text: str) -> Verdict:
    """Failed where a process has found wrong numbers; otherwise ok, with the text."""
    for each in _gather_found(lambda: {"wrong": list(wrong)}):
        if each["wrong"]:
            remedy = "a device, link or driver gives wrong numbers: run again without"
            return Verdict(item, FAILED, each["wrong"][0], f"{remedy} that machine")
    return Verdict(item, OK, text)


def _links(topology: Topology, seconds: float) -> list[Verdict]:
    """Times sums of growing size over both axes."""
    if topology.mesh.size == 1:
        return [Verdict("links", OK, "one device has none")]
    suffix = ", of hosts that share a machine: not real" * topology.is_simulated
    return [
        Verdict(f"links of the {axis} axis", OK, f"{link}{suffix}")
        for axis, link in probe_links(topology.mesh, seconds).items()
    ]


def _doctor(values: Values, _: list[str]) -> int:
    if values.checkpoint_bytes and not values.workdir:
        raise UserError("--checkpoint_bytes needs --workdir, the folder to try")
    config = TopologyConfig(layout=values.layout, cpu_devices=values.cpu_devices)
    launch = given_launch(values)
    try:
        started = start_processes(config, launch, join_seconds=values.join_seconds)
        topology = make_topology(config.layout)
    except UserError as error:
        sys.stdout.write(f"{Verdict('processes', FAILED, str(error))}\n")
        return EXIT_UNWELL
    if topology.is_primary:
        sys.stdout.write(f"start     {started.described}\n{topology.table()}\n\n")
        sys.stdout.flush()
    with Heartbeat(_LIMITS, ends_process=True):
        verdicts = examine(
            topology, values.workdir, float(values.seconds), values.checkpoint_bytes
        )
    if topology.is_primary:
        sys.stdout.write("\n".join(map(str, verdicts)) + "\n")
    is_failed = any(verdict.status == FAILED for verdict in verdicts)
    return EXIT_UNWELL if is_failed else 0


if __name__ == "__main__":
    sys.exit(main())
