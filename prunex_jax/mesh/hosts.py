"""Finds the machine of every process, and groups devices into hosts."""

import collections
import dataclasses
import hashlib
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from prunex_jax.base.errors import UserError
from prunex_jax.mesh.agreement import gather_texts
from prunex_jax.mesh.settings import MAX_SIMULATED

LAYOUTS = ("auto", "host", "process", "slice")


@dataclasses.dataclass(frozen=True)
class Machine:
    """One computer, whatever number of processes it runs."""

    key: str  # Equal for processes on the same machine, and for them only.
    name: str  # For people.


def local_machine(
    environ: Mapping[str, str] = os.environ,
    boot_id_file: Path = Path("/proc/sys/kernel/random/boot_id"),
) -> Machine:
    """Identifies the machine this process runs on.

    The kernel's boot identifier is the same in all containers of a machine, where
    the hostname is not, and differs between machines that were given the same name.
    Without it the hostname is the identity. `PRUNEX_HOST_ID` replaces both, to make one
    machine several hosts, or several one.
    """
    chosen = environ.get("PRUNEX_HOST_ID")
    name = chosen or socket.gethostname()
    try:
        identity = chosen or boot_id_file.read_text().strip() or name
    except OSError:
        identity = name
    return Machine(hashlib.sha256(identity.encode()).hexdigest(), name)


def gather_machines() -> tuple[Machine, ...]:
    """Exchanges the machines between all processes of the run.

    Raises:
      UserError: Processes have different numbers of devices.
    Collectives:
      As `gather_texts`.
    """
    local = local_machine()
    if jax.process_count() == 1:
        return (local,)
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        # The gather below needs equal counts, and so does every mesh.
        listed = ", ".join(f"process {p}: {n}" for p, n in sorted(counts.items()))
        raise UserError(
            f"processes have different numbers of devices ({listed}): give each the "
            "same number (CUDA_VISIBLE_DEVICES, --gpus-per-task, or "
            "topology.cpu_devices for simulated ones)"
        )
    texts = gather_texts(f"{local.key} {local.name}")
    return tuple(Machine(*text.split(" ", 1)) for text in texts)


@dataclasses.dataclass(frozen=True, order=True)
class DeviceRecord:
    """One device and where it is; orders by process, then by device."""

    process: int
    device: int  # jax's identifier, unique over all processes.
    machine: str = ""  # Key of the machine that the process runs on.
    machine_name: str = ""
    slice: int | None = None  # Domain of fast links, where the platform has one.


def fast_domain(device: jax.Device) -> int | None:
    """The slice of TPUs, or the GPUs joined by NVLink, that a device tells it is in.

    `partition_index` in newer versions of jax, where `slice_index` is deprecated.
    Processes on CPU are all in slice 0 for jax, which says nothing of their links.
    """
    if getattr(device, "platform", "") == "cpu":
        return None
    for name in ("partition_index", "slice_index"):
        found = getattr(device, name, None)
        if found is not None:
            return int(found)
    return None


@dataclasses.dataclass(frozen=True)
class Host:
    """One row of the mesh: devices joined by the fast links."""

    # In mesh order; those of a process are next to each other.
    devices: tuple[DeviceRecord, ...]

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines it spans, normally one."""
        names = {record.machine: record.machine_name for record in self.devices}
        return tuple(names.values())

    @property
    def processes(self) -> dict[int, tuple[int, ...]]:
        """Devices of each of its processes."""
        found: dict[int, tuple[int, ...]] = {}
        for record in self.devices:
            found[record.process] = (*found.get(record.process, ()), record.device)
        return found


def parse_layout(text: str) -> str | int:
    """Checks `topology.layout`, and turns a number of hosts into an int.

    Example:
      >>> parse_layout("host"), parse_layout("2")
      ('host', 2)
    """
    layout = str(text).strip()
    if layout in LAYOUTS or stand_ins(layout):
        return layout
    if layout.isdecimal() and int(layout) > 0:
        return int(layout)
    raise UserError(
        f"topology.layout={text!r} is unknown: use {', '.join(LAYOUTS)}, a number of "
        "hosts such as 2, or hosts x devices to simulate in one process such as 2x2"
    )


def stand_ins(layout: str | int) -> tuple[int, int] | None:
    """Hosts and virtual devices of each, which stand in where there is one process.

    Example:
      >>> stand_ins("3x2"), stand_ins("auto")
      ((3, 2), None)
    """
    found = split_grid(str(layout).strip())
    if found is None or math.prod(found) > MAX_SIMULATED:
        return None
    return found


def split_grid(text: str) -> tuple[int, int] | None:
    """Splits hosts x devices into two numbers; None where that is not what it says.

    Example:
      >>> split_grid("4x2"), split_grid("4x"), split_grid("0x2")
      ((4, 2), None, None)
    """
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        return None
    # Python refuses to convert thousands of digits, and nine are too many already.
    hosts, devices = (int(digits[:9]) for digits in match.groups())
    return hosts, devices


def resolve_layout(layout: str | int, records: Sequence[DeviceRecord]) -> str | int:
    """Replaces auto and stand-ins: by machine with several processes, or a number."""
    found = stand_ins(layout)
    if layout != "auto" and found is None:
        return layout
    if len({record.process for record in records}) > 1:
        return "host"
    return 1 if found is None else found[0]


def arrange_hosts(
    records: Sequence[DeviceRecord], layout: str | int
) -> tuple[Host, ...]:
    """Groups devices into hosts of equal size.

    Hosts are ordered by their first process, devices by process and identifier, so
    host 0 contains process 0 and every process finds its devices side by side.

    Args:
      records: All devices, in any order.
      layout: host (same machine), process, slice, or the number of hosts, which are
        then cut from the devices in order.
    Raises:
      UserError: The hosts would be uneven, a host would consist of parts of several
        processes, or the platform has no slices.
    Example:
      >>> records = [DeviceRecord(process=i // 2, device=i) for i in range(4)]
      >>> [[r.device for r in host.devices] for host in arrange_hosts(records, 2)]
      [[0, 1], [2, 3]]
    """
    ordered = sorted(records)
    if not ordered:
        raise UserError("there are no devices to arrange: pass at least one")
    if isinstance(layout, int):
        return _cut(ordered, layout)
    if layout == "slice" and any(record.slice is None for record in ordered):
        raise UserError(
            "topology.layout=slice, but these devices do not tell their slice (CPU "
            "devices never do): use host, process, or a number of hosts"
        )
    field = "machine" if layout == "host" else layout
    rows: dict[object, list[DeviceRecord]] = {}
    for record in ordered:
        rows.setdefault(getattr(record, field), []).append(record)
    hosts = tuple(Host(tuple(row)) for row in rows.values())
    if len({len(host.devices) for host in hosts}) > 1:
        raise UserError(_uneven(hosts, layout, ordered))
    return hosts


def _cut(ordered: list[DeviceRecord], num_hosts: int) -> tuple[Host, ...]:
    possible = [n for n in range(1, len(ordered) + 1) if _can_cut(ordered, n)]
    if num_hosts in possible:
        size = len(ordered) // num_hosts
        starts = range(0, len(ordered), size)
        return tuple(Host(tuple(ordered[i : i + size])) for i in starts)
    num_processes = len({record.process for record in ordered})
    where = "one process" if num_processes == 1 else f"{num_processes} processes"
    remedy = f"use one of {', '.join(str(n) for n in possible)}"
    if num_processes == 1:
        remedy += ", or another number of devices (topology.cpu_devices simulates them)"
    raise UserError(
        f"topology.layout={num_hosts} cannot be cut from {len(ordered)} devices of "
        f"{where} without uneven hosts or hosts made of parts of processes: {remedy}"
    )


def _can_cut(ordered: list[DeviceRecord], num_hosts: int) -> bool:
    size, rest = divmod(len(ordered), num_hosts)
    if rest:
        return False
    counts: dict[int, int] = {}
    for record in ordered:
        counts[record.process] = counts.get(record.process, 0) + 1
    for start in range(0, len(ordered), size):
        row = [record.process for record in ordered[start : start + size]]
        # One process, or several that are in this row entirely.
        if len(set(row)) > 1 and any(row.count(p) < counts[p] for p in set(row)):
            return False
    return True


def _uneven(hosts: tuple[Host, ...], layout: str, ordered: list[DeviceRecord]) -> str:
    listed = ", ".join(_count_of(i, host, layout) for i, host in enumerate(hosts))
    possible = [n for n in range(1, len(ordered) + 1) if _can_cut(ordered, n)]
    return (
        f"topology.layout={layout} gives hosts different numbers of devices ({listed}):"
        " start the same number of devices on each (CUDA_VISIBLE_DEVICES, "
        "--ntasks-per-node), or set topology.layout to a number of hosts, here one of "
        f"{', '.join(str(n) for n in possible)}"
    )


def _count_of(index: int, host: Host, layout: str) -> str:
    names = "+".join(name for name in host.machines if name)
    label = {"host": names, "process": f"process {host.devices[0].process}"}.get(layout)
    return f"{label or f'host {index}'}: {len(host.devices)}"
