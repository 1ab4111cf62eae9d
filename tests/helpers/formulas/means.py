"""Closed formulas of means over the mesh, from sizes alone."""

from collections.abc import Mapping

from prunex_jax.comm import FLOAT32, Collective, TopK, Wire
from prunex_jax.comm.chunks import CHUNK, largest_buffer, route_of

MeshShape = Mapping[str, int]


def device_sum(num_elements: int, mesh_shape: MeshShape) -> list[Collective]:
    """What `averaging.mean_over_devices` sends for a tree of `num_elements`."""
    _, (device_axis, num_devices) = mesh_shape.items()
    return [Collective("sum", (device_axis,), (num_devices,), num_elements, "float32")]


def host_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_over_hosts` sends: each device carries one share."""
    if next(iter(mesh_shape.values())) == 1:
        return []
    return [
        sent
        for size in _sizes(num_elements, wire.bucket_elements)
        for sent in _shared_sum(size, mesh_shape, wire)
    ]


def host_sum_with_error(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_with_error` sends: errors come together inside a host."""
    (_, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    sent = host_sum(num_elements, mesh_shape, wire)
    if num_hosts == 1 or not wire.is_narrow:
        return sent
    unit = wire.format.block * num_devices * num_hosts
    for size in _sizes(num_elements, wire.bucket_elements):
        share = -(-size // unit) * wire.format.block * num_hosts
        errors = ("gather", (device_axis,), (num_devices,), share, "float32")
        sent.append(Collective(*errors))
    return sent


def mesh_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_over_mesh` sends: scatter, sum over hosts, gather."""
    (_, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    on_hosts = FLOAT32 if num_hosts == 1 else wire
    unit = num_devices * (
        on_hosts.format.block * num_hosts if on_hosts.is_narrow else 1
    )
    sent = []
    for size in _sizes(num_elements, wire.bucket_elements):
        padded = -(-size // unit) * unit
        sent.append(
            Collective("scatter", (device_axis,), (num_devices,), padded, "float32")
        )
        sent += _shared_sum(size, mesh_shape, on_hosts)
    return sent


def ternary_sum(num_elements: int, mesh_shape: MeshShape) -> list[Collective]:
    """What `ternary_mean_over_mesh` sends: a scale, and a byte for every number."""
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


def flat_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.flat_mean_over_mesh` sends: everything over both axes."""
    axes, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    sent = []
    for size in _sizes(num_elements, wire.bucket_elements):
        if sizes[0] == 1 or not wire.is_narrow:
            sent.append(Collective("sum", axes, sizes, size, "float32"))
        else:
            count = sizes[0] * sizes[1]
            own = -(-size // (wire.format.block * count)) * wire.format.width
            sent.append(
                Collective("exchange", axes, sizes, count * own, wire.format.carrier)
            )
            sent.append(Collective("gather", axes, sizes, own, wire.format.carrier))
    return sent


def ring_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `ring.ring_mean_over_hosts` sends: each device passes pieces to the next."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return []
    unit = wire.format.block
    num_units = -(-num_elements // (unit * num_devices * num_hosts))
    piece = num_units * wire.format.width
    share, hops = num_units * unit * num_hosts, 2 * (num_hosts - 1)
    return [
        Collective(
            "shift", (host_axis,), (num_hosts,), piece, wire.format.carrier, hops
        ),
        Collective("gather", (device_axis,), (num_devices,), share, "float32"),
    ]


def host_gather(
    num_elements: int, mesh_shape: MeshShape, dtype: str = "float32"
) -> list[Collective]:
    """What `collectives.gather_over_hosts` sends for `num_elements`."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return []
    share = -(-num_elements // num_devices)
    return [
        Collective("gather", (host_axis,), (num_hosts,), share, dtype),
        Collective("gather", (device_axis,), (num_devices,), num_hosts * share, dtype),
    ]


def largest_sum(
    num_elements: int, top: TopK, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `chunks.mean_of_largest` sends for a tree of `num_elements`."""
    (_, num_hosts), _ = mesh_shape.items()
    if num_hosts == 1 or not num_elements:
        return []
    route = route_of(num_elements, top, mesh_shape, wire)
    send = _gathered_chunks if route == "gather" else _owned_chunks
    return [
        sent
        for size in _sizes(num_elements, largest_buffer(wire, mesh_shape))
        for sent in send(-(-size // CHUNK), top, mesh_shape, wire)
    ]


def _gathered_chunks(
    num_chunks: int, top: TopK, mesh_shape: MeshShape, wire: Wire
) -> list[Collective]:
    """Everybody gets the entries of all hosts."""
    gathers = [
        host_gather(n, mesh_shape, dtype)
        for n, dtype in _entries(num_chunks, top, wire)
    ]
    return [each for gather in gathers for each in gather]


def _owned_chunks(
    num_chunks: int, top: TopK, mesh_shape: MeshShape, wire: Wire
) -> list[Collective]:
    """Every device of every host gets the entries of its chunks, and sends the sums."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    own = -(-num_chunks // (num_hosts * num_devices))
    hosts, devices = ((host_axis,), (num_hosts,)), ((device_axis,), (num_devices,))
    sent = []
    for size, dtype in _entries(own, top, wire):
        sent += [
            Collective("exchange", *hosts, num_hosts * size, dtype),
            Collective("gather", *hosts, size, dtype),
            Collective("gather", *devices, num_hosts * size, dtype),
        ]
    errors = num_hosts * own * CHUNK
    return [*sent, Collective("gather", *devices, errors, "float32")]


def _entries(num_chunks: int, top: TopK, wire: Wire) -> tuple[tuple[int, str], ...]:
    """Sizes and types of the messages for values of chunks, and for their positions."""
    values = wire.num_carriers(num_chunks * top.per_chunk)
    places = num_chunks * top.position_bytes
    return (values, wire.format.carrier), (places, "uint8")


def entry_gather(
    num_entries: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_of_entries` sends: values, and a position for each."""
    num_carriers = wire.num_carriers(num_entries)
    values = host_gather(num_carriers, mesh_shape, wire.format.carrier)
    return values + host_gather(num_entries, mesh_shape, "int32")


def _shared_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire
) -> list[Collective]:
    """A sum over hosts of one share per device, and the gather of the shares."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    carrier = wire.format.carrier
    if wire.is_narrow:
        num_parts = wire.format.block * num_devices * num_hosts
        own = -(-num_elements // num_parts) * wire.format.width
        share = num_hosts * own
        over_hosts = [
            Collective("exchange", (host_axis,), (num_hosts,), share, carrier),
            Collective("gather", (host_axis,), (num_hosts,), own, carrier),
        ]
    else:
        share = -(-num_elements // num_devices)
        over_hosts = [Collective("sum", (host_axis,), (num_hosts,), share, carrier)]
    gather = Collective("gather", (device_axis,), (num_devices,), share, carrier)
    return [*over_hosts, gather]


def _sizes(num_elements: int, room: int) -> list[int]:
    """Elements of the buffers in which a tree is sent, which have so much room."""
    if not room or not num_elements:
        return [num_elements]
    full, rest = divmod(num_elements, room)
    return [room] * full + [rest] * (rest > 0)
