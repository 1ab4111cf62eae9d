"""Closed formulas for what the means of `comm.averaging` send, written independently.

They are built from sizes alone. Tests hold their bytes against the traced program;
reports use them where there is no program, as for the dense baseline of a sparse run.
"""

from collections.abc import Mapping

from prunex_jax.comm.accounting import Collective

MeshShape = Mapping[str, int]


def device_sum(
    num_elements: int, mesh_shape: MeshShape, dtype: str = "float32"
) -> list[Collective]:
    """What `averaging.mean_over_devices` sends for a tree of `num_elements`."""
    _, (device_axis, num_devices) = mesh_shape.items()
    return [Collective("sum", (device_axis,), (num_devices,), num_elements, dtype)]


def host_sum(
    num_elements: int, mesh_shape: MeshShape, dtype: str = "float32"
) -> list[Collective]:
    """What `averaging.mean_over_hosts` sends: each device carries one share."""
    (_, num_hosts), _ = mesh_shape.items()
    return _shared_sum(num_elements, mesh_shape, dtype) if num_hosts > 1 else []


def mesh_sum(
    num_elements: int, mesh_shape: MeshShape, dtype: str = "float32"
) -> list[Collective]:
    """What `averaging.mean_over_mesh` sends: scatter, sum over hosts, gather."""
    _, (device_axis, num_devices) = mesh_shape.items()
    share = -(-num_elements // num_devices)
    padded = share * num_devices
    scatter = Collective("scatter", (device_axis,), (num_devices,), padded, dtype)
    return [scatter, *_shared_sum(num_elements, mesh_shape, dtype)]


def _shared_sum(
    num_elements: int, mesh_shape: MeshShape, dtype: str
) -> list[Collective]:
    """A sum over hosts of one share per device, and the gather of the shares."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    share = -(-num_elements // num_devices)
    over_hosts = Collective("sum", (host_axis,), (num_hosts,), share, dtype)
    gather = Collective("gather", (device_axis,), (num_devices,), share, dtype)
    return [over_hosts, gather]
