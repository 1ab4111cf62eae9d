"""What crosses the links: fused means over the mesh, compact arrays, their bytes.

In come trees or flat buffers inside `shard_map`, the mesh axes and a `Wire`; out come
means and sums over hosts and devices. `list_collectives` lists what a traced program
sends, and `wire_bytes` turns that into bytes per axis.
"""

from prunex_jax.comm.accounting import (
    Collective,
    count_hops,
    list_collectives,
    ring_bytes,
    wire_bytes,
)
from prunex_jax.comm.averaging import (
    flat_mean_over_mesh,
    mean_of_entries,
    mean_over_devices,
    mean_over_hosts,
    mean_over_mesh,
    mean_with_error,
    min_over_mesh,
    sum_over_hosts,
    sum_over_mesh,
    take_from_host,
)
from prunex_jax.comm.chunks import Route, TopK, mean_of_largest
from prunex_jax.comm.collectives import check_local, gather_over_hosts
from prunex_jax.comm.formats import FORMATS
from prunex_jax.comm.formulas import compact_size, dense_size
from prunex_jax.comm.ring import ring_mean_over_hosts
from prunex_jax.comm.slices import (
    Slicing,
    key_of_slice,
    part_shape,
    slices_of,
    sum_over_slices,
    whole_of,
)
from prunex_jax.comm.wires import (
    FLOAT32,
    Wire,
    refuse_biased,
)

__all__ = [
    "FLOAT32",
    "FORMATS",
    "Collective",
    "Route",
    "Slicing",
    "TopK",
    "Wire",
    "check_local",
    "compact_size",
    "count_hops",
    "dense_size",
    "flat_mean_over_mesh",
    "gather_over_hosts",
    "key_of_slice",
    "list_collectives",
    "mean_of_entries",
    "mean_of_largest",
    "mean_over_devices",
    "mean_over_hosts",
    "mean_over_mesh",
    "mean_with_error",
    "min_over_mesh",
    "part_shape",
    "refuse_biased",
    "ring_bytes",
    "ring_mean_over_hosts",
    "slices_of",
    "sum_over_hosts",
    "sum_over_mesh",
    "sum_over_slices",
    "take_from_host",
    "whole_of",
    "wire_bytes",
]
