"""What crosses the links: fused means over the mesh, compact arrays, their bytes."""

from prunex_jax.comm.accounting import (
    Collective,
    count_hops,
    list_collectives,
    ring_bytes,
    wire_bytes,
)
from prunex_jax.comm.averaging import (
    flat_mean_over_mesh,
    gather_over_hosts,
    mean_over_devices,
    mean_over_hosts,
    mean_over_mesh,
    min_over_mesh,
    sum_over_hosts,
    sum_over_mesh,
    take_from_host,
)
from prunex_jax.comm.collectives import (
    axis_size,
    check_local,
    position,
    vary,
)
from prunex_jax.comm.compaction import (
    compact_size,
    dense_size,
)
from prunex_jax.comm.entries import mean_of_entries
from prunex_jax.comm.ring import (
    Hop,
    ring_hops,
    ring_mean_over_hosts,
)
from prunex_jax.comm.wires import WIRE_DTYPES, check_wire_dtype

__all__ = [
    "WIRE_DTYPES",
    "Collective",
    "Hop",
    "axis_size",
    "check_local",
    "check_wire_dtype",
    "compact_size",
    "count_hops",
    "dense_size",
    "flat_mean_over_mesh",
    "gather_over_hosts",
    "list_collectives",
    "mean_of_entries",
    "mean_over_devices",
    "mean_over_hosts",
    "mean_over_mesh",
    "min_over_mesh",
    "position",
    "ring_bytes",
    "ring_hops",
    "ring_mean_over_hosts",
    "sum_over_hosts",
    "sum_over_mesh",
    "take_from_host",
    "vary",
    "wire_bytes",
]
