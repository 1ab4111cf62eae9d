"""Arranges the devices of all processes as hosts x devices, and says where values live.

In: the settings `topology.*` and the devices of jax. Out: a `Topology`, whose mesh has
the axes ('host', 'device'), and what programs need to run on it.

    hosts        which machine each process runs on; devices -> hosts, as plain records
    mesh         the `jax.sharding.Mesh` and its table
    described    GPUs that are not here, to compile for
    simulated    a mesh that one device simulates: `map_over` works on both
    axes         names of mesh axes: `MeshAxes`, `vary`
    varying      the types behind it
    ordering     one computation after another
    peaks        how fast devices are at best
    placement    where parts of a tree live: `Placement`, `enter`, `leave`
    agreement    all processes go on, or none
"""

from prunex_jax.mesh.agreement import check_same, gather_texts, run_together
from prunex_jax.mesh.axes import (
    ALONE,
    DEVICE_AXIS,
    HOST_AXIS,
    Axis,
    MeshAxes,
    axis_size,
    position,
    vary,
    vary_as,
)
from prunex_jax.mesh.described import described_topology, lacking_compiler
from prunex_jax.mesh.mesh import Topology, check_has_links, make_topology
from prunex_jax.mesh.peaks import peak_flops
from prunex_jax.mesh.placement import (
    IN_SLICES,
    Placement,
    enter,
    leave,
    settle,
    specs_of,
)
from prunex_jax.mesh.simulated import (
    AnyMesh,
    SimulatedMesh,
    map_over,
    placed,
    program_to_count,
    sharding_on,
)

__all__ = [
    "ALONE",
    "DEVICE_AXIS",
    "HOST_AXIS",
    "IN_SLICES",
    "AnyMesh",
    "Axis",
    "MeshAxes",
    "Placement",
    "SimulatedMesh",
    "Topology",
    "axis_size",
    "check_has_links",
    "check_same",
    "described_topology",
    "enter",
    "gather_texts",
    "lacking_compiler",
    "leave",
    "make_topology",
    "map_over",
    "peak_flops",
    "placed",
    "position",
    "program_to_count",
    "run_together",
    "settle",
    "sharding_on",
    "specs_of",
    "vary",
    "vary_as",
]
