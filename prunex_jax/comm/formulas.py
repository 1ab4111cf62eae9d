"""Closed formulas for what the means of `comm.averaging` send, written independently.

They are built from sizes alone. Tests hold their bytes against the traced program;
reports use them where there is no program, as for the dense baseline of a sparse run.
"""

from collections.abc import Mapping

import numpy as np

from prunex_jax.comm.accounting import Collective

MeshShape = Mapping[str, int]

# Narrow formats go in blocks of 128 numbers. Format -> what carries them, and how many
# of it make a block: float16 has one more and int8 two for a scale of 16 bits.
_BLOCKS = {
    "float16": ("uint16", 129),
    "bfloat16": ("uint16", 128),
    "int8": ("int8", 130),
}


def payload_bytes(num_elements: int, wire_dtype: str = "float32") -> int:
    """Bytes that stand for so many numbers on the wire: those of whole blocks.

    Every device carries whole blocks to every host, so what is sent may be a few more.

    Example:
      >>> payload_bytes(1280), payload_bytes(1280, 'int8')
      (5120, 1300)
    """
    if wire_dtype == "ternary":
        return num_elements
    if wire_dtype not in _BLOCKS:
        return num_elements * np.dtype(wire_dtype).itemsize
    carrier, width = _BLOCKS[wire_dtype]
    return -(-num_elements // 128) * width * np.dtype(carrier).itemsize


def device_sum(
    num_elements: int, mesh_shape: MeshShape, dtype: str = "float32"
) -> list[Collective]:
    """What `averaging.mean_over_devices` sends for a tree of `num_elements`."""
    _, (device_axis, num_devices) = mesh_shape.items()
    return [Collective("sum", (device_axis,), (num_devices,), num_elements, dtype)]


def host_sum(
    num_elements: int,
    mesh_shape: MeshShape,
    wire_dtype: str = "float32",
    bucket_bytes: int = 0,
) -> list[Collective]:
    """What `averaging.mean_over_hosts` sends: each device carries one share."""
    (_, num_hosts), _ = mesh_shape.items()
    if num_hosts == 1:
        return []
    return [
        sent
        for size in _bucket_sizes(num_elements, wire_dtype, bucket_bytes)
        for sent in _shared_sum(size, mesh_shape, wire_dtype)
    ]


def host_gather(
    num_elements: int, mesh_shape: MeshShape, dtype: str = "float32"
) -> list[Collective]:
    """What `averaging.gather_over_hosts` sends for one leaf of `num_elements`."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return []
    share = -(-num_elements // num_devices)
    return [
        Collective("gather", (host_axis,), (num_hosts,), share, dtype),
        Collective("gather", (device_axis,), (num_devices,), num_hosts * share, dtype),
    ]


def mesh_sum(
    num_elements: int,
    mesh_shape: MeshShape,
    wire_dtype: str = "float32",
    bucket_bytes: int = 0,
) -> list[Collective]:
    """What `averaging.mean_over_mesh` sends: scatter, sum over hosts, gather."""
    (_, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    dtype = "float32" if num_hosts == 1 else wire_dtype
    unit = num_devices * (128 * num_hosts if dtype in _BLOCKS else 1)
    sent = []
    for size in _bucket_sizes(num_elements, wire_dtype, bucket_bytes):
        padded = -(-size // unit) * unit
        sent.append(
            Collective("scatter", (device_axis,), (num_devices,), padded, "float32")
        )
        sent += _shared_sum(size, mesh_shape, dtype)
    return sent


def flat_sum(
    num_elements: int,
    mesh_shape: MeshShape,
    wire_dtype: str = "float32",
    bucket_bytes: int = 0,
) -> list[Collective]:
    """What `averaging.flat_mean_over_mesh` sends: everything over both axes."""
    axes, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    sent = []
    for size in _bucket_sizes(num_elements, wire_dtype, bucket_bytes):
        if sizes[0] == 1 or wire_dtype not in _BLOCKS:
            sent.append(Collective("sum", axes, sizes, size, "float32"))
        else:
            count = sizes[0] * sizes[1]
            carrier, width = _BLOCKS[wire_dtype]
            own = -(-size // (128 * count)) * width
            sent.append(Collective("exchange", axes, sizes, count * own, carrier))
            sent.append(Collective("gather", axes, sizes, own, carrier))
    return sent


def ring_sum(
    num_elements: int, mesh_shape: MeshShape, wire_dtype: str = "float32"
) -> list[Collective]:
    """What `ring.ring_mean_over_hosts` sends: each device passes pieces to the next."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return []
    carrier, width = _BLOCKS.get(wire_dtype, (wire_dtype, 128))
    unit = 128 if wire_dtype in _BLOCKS else 1
    num_units = -(-num_elements // (unit * num_devices * num_hosts))
    piece, share = num_units * unit * width // 128, num_units * unit * num_hosts
    hops = 2 * (num_hosts - 1)
    return [
        Collective("shift", (host_axis,), (num_hosts,), piece, carrier, hops),
        Collective("gather", (device_axis,), (num_devices,), share, "float32"),
    ]


def entry_gather(
    num_entries: int, mesh_shape: MeshShape, wire_dtype: str = "float32"
) -> list[Collective]:
    """What `entries.mean_of_entries` sends: values, and a position for each."""
    carrier, num_carriers = wire_dtype, num_entries
    if wire_dtype in _BLOCKS:
        carrier, width = _BLOCKS[wire_dtype]
        num_carriers = -(-num_entries // 128) * width
    values = host_gather(num_carriers, mesh_shape, carrier)
    return values + host_gather(num_entries, mesh_shape, "int32")


def ternary_sum(num_elements: int, mesh_shape: MeshShape) -> list[Collective]:
    """What `optim.pactrain` sends of ternary values: a scale, and a byte for each."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return mesh_sum(num_elements, mesh_shape)
    share = -(-num_elements // num_devices)
    return [
        *device_sum(num_elements, mesh_shape),
        *mesh_sum(num_hosts * num_devices, mesh_shape),
        Collective("sum", (host_axis,), (num_hosts,), share, "int8"),
        Collective("gather", (device_axis,), (num_devices,), share, "int8"),
    ]


def _shared_sum(
    num_elements: int, mesh_shape: MeshShape, wire_dtype: str
) -> list[Collective]:
    """A sum over hosts of one share per device, and the gather of the shares."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if wire_dtype in _BLOCKS:
        carrier, width = _BLOCKS[wire_dtype]
        own = -(-num_elements // (128 * num_devices * num_hosts)) * width
        share = num_hosts * own
        over_hosts = [
            Collective("exchange", (host_axis,), (num_hosts,), share, carrier),
            Collective("gather", (host_axis,), (num_hosts,), own, carrier),
        ]
    else:
        carrier, share = wire_dtype, -(-num_elements // num_devices)
        over_hosts = [Collective("sum", (host_axis,), (num_hosts,), share, carrier)]
    gather = Collective("gather", (device_axis,), (num_devices,), share, carrier)
    return [*over_hosts, gather]


def _bucket_sizes(num_elements: int, wire_dtype: str, bucket_bytes: int) -> list[int]:
    """Elements of the buffers in which a tree is sent; 0 bytes set no limit."""
    if wire_dtype in _BLOCKS:
        room = 128 * max(1, bucket_bytes // payload_bytes(128, wire_dtype))
    else:
        room = max(1, bucket_bytes // np.dtype(wire_dtype).itemsize)
    if not bucket_bytes or not num_elements:
        return [num_elements]
    full, rest = divmod(num_elements, room)
    return [room] * full + [rest] * (rest > 0)
