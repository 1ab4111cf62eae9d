"""Starts the processes of a run and arranges their devices as hosts x devices.

In: the settings `topology.*`, flags and the environment. Out: a `Topology`, whose mesh
has the axes ('host', 'device'), and what programs need to run on it.

    launcher     several processes? which is this, and which GPUs are its own?
    launched     what each launcher says in environment variables
    gpus         which GPUs of a machine one of its processes takes
    desk         where one process takes down who is there
    roll_call    waits for all processes, and says for whom
    start        acts on the answer, before jax computes anything
    compiled     what jax has compiled stays on disk for the next process, in commands
    memory       what jax frees on CPU stays for its next step, in commands
    hosts        which machine each process runs on; devices -> hosts, as plain records
    mesh         the `jax.sharding.Mesh` and its table
    described    GPUs that are not here, to compile for
    folding      a mesh that one device simulates: `map_over` works on both
    axes         names of mesh axes: `MeshAxes`, `vary`
    varying      the types behind it, by the names that each jax has for them
    ordering     one computation after another
    peaks        how fast devices are at best
    placement    where parts of a tree live: `Placement`, `enter`, `leave`
    agreement    all processes go on, or none
    store        a table of texts that the processes share, without collectives
    stragglers   which processes are slow and hold up the others, from their own steps
    pulse        who is lost, and where: ends all processes instead of waiting for ever
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
)
from prunex_jax.mesh.compiled import keep_compiled
from prunex_jax.mesh.described import described_topology, lacking_compiler
from prunex_jax.mesh.desk import LastStart
from prunex_jax.mesh.folding import (
    AnyMesh,
    FoldedMesh,
    map_over,
    placed,
    program_to_count,
    sharding_on,
)
from prunex_jax.mesh.launcher import Launch, LaunchFlags
from prunex_jax.mesh.memory import keep_freed_memory, return_freed_memory
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
from prunex_jax.mesh.pulse import Limits, Pulse
from prunex_jax.mesh.start import start_processes
from prunex_jax.mesh.stragglers import Pace

__all__ = [
    "ALONE",
    "DEVICE_AXIS",
    "HOST_AXIS",
    "IN_SLICES",
    "AnyMesh",
    "Axis",
    "FoldedMesh",
    "LastStart",
    "Launch",
    "LaunchFlags",
    "Limits",
    "MeshAxes",
    "Pace",
    "Placement",
    "Pulse",
    "Topology",
    "axis_size",
    "check_has_links",
    "check_same",
    "described_topology",
    "enter",
    "gather_texts",
    "keep_compiled",
    "keep_freed_memory",
    "lacking_compiler",
    "leave",
    "make_topology",
    "map_over",
    "peak_flops",
    "placed",
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
