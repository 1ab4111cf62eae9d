"""What crosses the links: fused means over the mesh, compact arrays, their bytes."""

from prunex_jax.comm.accounting import (
    Collective,
    list_collectives,
    ring_bytes,
    wire_bytes,
)
from prunex_jax.comm.averaging import (
    mean_over_devices,
    mean_over_hosts,
    mean_over_mesh,
    min_over_mesh,
    sum_over_hosts,
    sum_over_mesh,
)
from prunex_jax.comm.collectives import (
    axis_size,
    check_local,
    vary,
)
from prunex_jax.comm.compaction import (
    compact_size,
    dense_size,
)

__all__ = [
    "Collective",
    "axis_size",
    "check_local",
    "compact_size",
    "dense_size",
    "list_collectives",
    "mean_over_devices",
    "mean_over_hosts",
    "mean_over_mesh",
    "min_over_mesh",
    "ring_bytes",
    "sum_over_hosts",
    "sum_over_mesh",
    "vary",
    "wire_bytes",
]
