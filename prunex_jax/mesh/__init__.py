"""Starts the processes of a run and arranges their devices as hosts x devices.

It owns the two mesh axes, the detection of launchers (Slurm, Open MPI, Kubernetes,
flags), the start of `jax.distributed`, and the decision which devices form a host. It
leaves what runs on the mesh to everything right of it. In the flow it comes after
config and before data.

    clusters, gpus   what launchers and the machine tell a process
    launcher         one answer from them and from the flags: `detect_launch`
    start            acts on it: `start_processes`
    memory           what jax frees on CPU stays for its next step: `keep_freed_memory`
    machines         which machine each process runs on
    hosts            devices -> hosts, as plain records
    axes             names of mesh axes: `MeshAxes`, `vary`
    placement        where parts of a tree live: `Placement`, `enter`, `leave`
    mesh             the `jax.sharding.Mesh` and its table: `make_topology`
    folding          a mesh that one device simulates: `map_over` works on both
    agreement        all processes go on, or none: `run_together`, `gather_texts`
"""

from prunex_jax.mesh.agreement import gather_texts, run_together
from prunex_jax.mesh.axes import (
    ALONE,
    DEVICE_AXIS,
    HOST_AXIS,
    Axis,
    MeshAxes,
    axis_size,
    position,
    vary,
)
from prunex_jax.mesh.folding import (
    AnyMesh,
    FoldedMesh,
    map_over,
    program_to_count,
    sharding_on,
)
from prunex_jax.mesh.hosts import DeviceRecord, Host
from prunex_jax.mesh.launcher import Launch, LaunchFlags, Probes, detect_launch
from prunex_jax.mesh.memory import keep_freed_memory, return_freed_memory
from prunex_jax.mesh.mesh import Topology, check_has_links, make_topology
from prunex_jax.mesh.placement import Placement, enter, leave, settle, specs_of
from prunex_jax.mesh.start import start_processes

__all__ = [
    "ALONE",
    "DEVICE_AXIS",
    "HOST_AXIS",
    "AnyMesh",
    "Axis",
    "DeviceRecord",
    "FoldedMesh",
    "Host",
    "Launch",
    "LaunchFlags",
    "MeshAxes",
    "Placement",
    "Probes",
    "Topology",
    "axis_size",
    "check_has_links",
    "detect_launch",
    "enter",
    "gather_texts",
    "keep_freed_memory",
    "leave",
    "make_topology",
    "map_over",
    "position",
    "program_to_count",
    "return_freed_memory",
    "run_together",
    "settle",
    "sharding_on",
    "specs_of",
    "start_processes",
    "vary",
]
