"""Turns hosts into the ('host', 'device') mesh, and shows them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from prunex_jax.base.errors import UserError
from prunex_jax.mesh.axes import DEVICE_AXIS, HOST_AXIS
from prunex_jax.mesh.hosts import (
    DeviceRecord,
    Host,
    Machine,
    arrange_hosts,
    fast_domain,
    gather_machines,
    parse_layout,
    resolve_layout,
    split_grid,
)
from prunex_jax.mesh.settings import MAX_SIMULATED
from prunex_jax.mesh.simulated import AnyMesh, SimulatedMesh

# A longer table is cut in the middle, a longer list of processes is summed up.
_MAX_ROWS = 16
_MAX_PROCESSES_IN_ROW = 4


@dataclasses.dataclass(frozen=True)
class Topology:
    """Which devices form which host, and the mesh that says so to jax.

    Attributes:
      mesh: Axes (HOST_AXIS, DEVICE_AXIS), both of type Auto, over all devices of all
        processes; or folded, where one device simulates them.
      hosts: The rows of the mesh.
      layout: How hosts were found: host, process, slice, or their number.
      requested_layout: The same before auto was resolved.
      process_index: The process this object lives in.
    """

    mesh: AnyMesh
    hosts: tuple[Host, ...]
    layout: str
    requested_layout: str
    process_index: int

    @property
    def num_hosts(self) -> int:
        """Size of the host axis."""
        return len(self.hosts)

    @property
    def devices_per_host(self) -> int:
        """Size of the device axis."""
        return len(self.hosts[0].devices)

    @property
    def num_processes(self) -> int:
        """Processes that own a device of the mesh."""
        return len({r.process for host in self.hosts for r in host.devices})

    @property
    def num_machines(self) -> int:
        """Machines that the processes run on."""
        return len({r.machine for host in self.hosts for r in host.devices})

    @property
    def is_primary(self) -> bool:
        """Whether this is the process that prints and writes the run's files."""
        return self.process_index == 0

    @property
    def is_simulated(self) -> bool:
        """Whether hosts share a machine, so that no real link is between them."""
        return self.num_machines < self.num_hosts

    @property
    def num_domains(self) -> int | None:
        """Domains of fast links, such as NVLink's; None where devices do not tell."""
        domains = {r.slice for host in self.hosts for r in host.devices}
        return None if None in domains else len(domains)

    def table(self) -> str:
        """Shows host -> processes -> devices, as the start screen prints it."""
        rows = [("host", "machine", "process: devices")]
        rows += [_row(index, host) for index, host in enumerate(self.hosts)]
        if self.num_hosts > _MAX_ROWS:
            hidden = self.num_hosts - _MAX_ROWS + 1
            rows[_MAX_ROWS - 1 : -1] = [("...", f"{hidden} more", "")]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines = [self._title()]
        for host, machine, devices in rows:
            line = f"  {host:>{widths[0]}}  {machine:<{widths[1]}}  {devices}"
            lines.append(line.rstrip())
        if isinstance(self.mesh, SimulatedMesh):
            lines.append("  simulated: one device does the work of all, without links")
        elif self.is_simulated:
            lines.append(
                "  simulated: hosts share a machine, so the links between them are "
                "not real"
            )
        elif self.num_domains is not None and self.num_domains < self.num_hosts:
            lines.append(
                f"  fast links join several hosts ({_count(self.num_domains, 'domain')}"
                "): topology.layout=slice makes each domain one host"
            )
        return "\n".join(lines)

    def describe(self) -> dict[str, Any]:
        """Tells the same to `environment.json`: plain lists, one entry per host."""
        device = self.mesh.devices.flat[0]
        rows = [host.devices for host in self.hosts]
        return {
            "layout": self.layout,
            "requested_layout": self.requested_layout,
            "num_hosts": self.num_hosts,
            "devices_per_host": self.devices_per_host,
            "num_processes": self.num_processes,
            "num_machines": self.num_machines,
            "is_simulated": self.is_simulated,
            "platform": device.platform,
            "device_kind": device.device_kind,
            "machines": [list(host.machines) for host in self.hosts],
            "processes": [[record.process for record in row] for row in rows],
            "devices": [[record.device for record in row] for row in rows],
        }

    def _title(self) -> str:
        layout = self.requested_layout
        if self.layout != layout:
            layout = f"{layout} -> {self.layout}"
        counts = [
            _count(self.num_hosts, "host"),
            _count(self.devices_per_host, "device"),
        ]
        kind = self.mesh.devices.flat[0].device_kind
        processes = _count(self.num_processes, "process")
        return f"{' x '.join(counts)} ({kind}), {processes}, layout {layout}"


def make_topology(
    layout: str,
    devices: Sequence[jax.Device] | None = None,
    simulated: str = "",
) -> Topology:
    """Arranges devices into hosts and builds the mesh.

    The mesh is built from an ordered array, not by `jax.make_mesh`, which refuses
    GPUs of several machines and orders devices for the speed of one axis, not by host.

    Args:
      layout: auto (by machine with several processes, otherwise one host), host (by
        machine), process, slice, or the number of hosts. In one process a number above
        one simulates hosts. "2x2" is 2 in one process, and auto with several.
      devices: The devices to use, equal on all processes; all of them by default.
      simulated: Hosts and devices that the first device simulates, as in "4x2"; empty
        for the devices there are. The layout has no say then.

    Returns:
      The topology, equal on all processes but for `process_index`.

    Collectives:
      With several processes, one small exchange over all devices: every process must
      call this function.

    Raises:
      UserError: Unknown layout, hosts that would be uneven, or something to simulate
        that is not understood or needs more than this process.
    """
    wanted = parse_layout(layout)
    chosen = list(jax.devices() if devices is None else devices)
    if simulated:
        return _simulated_topology(simulated, chosen[0])
    machines = gather_machines()
    records = [
        DeviceRecord(
            process=device.process_index,
            device=device.id,
            machine=machine.key,
            machine_name=machine.name,
            slice=fast_domain(device),
        )
        for device in chosen
        for machine in [_machine_of(device, machines)]
    ]
    resolved = resolve_layout(wanted, records)
    hosts = arrange_hosts(records, resolved)
    by_id = {device.id: device for device in chosen}
    grid = np.array([[by_id[r.device] for r in host.devices] for host in hosts])
    mesh = Mesh(
        grid,
        (HOST_AXIS, DEVICE_AXIS),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )
    return Topology(mesh, hosts, str(resolved), str(wanted), jax.process_index())


def check_has_links(simulated: str) -> None:
    """Refuses hosts that one device simulates, where links are to be measured.

    Args:
      simulated: `topology.simulated`.
    Raises:
      UserError: It is set.
    """
    if simulated:
        raise UserError(
            f"topology.simulated={simulated!r} has no links to measure; leave it "
            "empty, and use real hosts or topology.layout with topology.cpu_devices"
        )


def _machine_of(device: jax.Device, machines: Sequence[Machine]) -> Machine:
    """The machine of a device; one of its own for each process that is not here.

    Devices may be descriptions, for which programs are compiled and never run.
    """
    process = device.process_index
    if process < len(machines):
        return machines[process]
    return Machine(f"described {process}", f"described-{process}")


def _simulated_topology(text: str, device: jax.Device) -> Topology:
    """A topology whose devices are all the same real one."""
    grid = split_grid(text)
    if grid is None:
        raise UserError(
            f"topology.simulated={text!r} is not hosts x devices; write it as in 4x2"
        )
    if math.prod(grid) > MAX_SIMULATED:
        raise UserError(
            f"topology.simulated={text!r} is more than the {MAX_SIMULATED} devices "
            "that can be simulated; lower it"
        )
    if jax.process_count() > 1:
        raise UserError(
            f"topology.simulated={text!r} is for one process, and this run has "
            f"{jax.process_count()}: leave it out, or start one process"
        )
    num_hosts, num_devices = grid
    mesh = SimulatedMesh(((HOST_AXIS, num_hosts), (DEVICE_AXIS, num_devices)), device)
    machine = gather_machines()[0]
    record = DeviceRecord(0, device.id, machine.key, machine.name)
    hosts = (Host((record,) * num_devices),) * num_hosts
    return Topology(mesh, hosts, "simulated", "simulated", 0)


def _row(index: int, host: Host) -> tuple[str, str, str]:
    machines = host.machines
    machine = machines[0] if machines else ""
    if len(machines) > 1:
        machine += f" +{len(machines) - 1}"
    processes = host.processes
    if len(processes) > _MAX_PROCESSES_IN_ROW:
        numbers = _ranges(sorted(processes))
        return str(index), machine, f"{numbers}: {_count(len(host.devices), 'device')}"
    parts = [f"{process}: {_ranges(ids)}" for process, ids in processes.items()]
    return str(index), machine, "   ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Writes increasing numbers as "0-3,6"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
