"""Closed formulas, from sizes alone: what is left of a tree, and what means of it send.

Tests hold their bytes against the traced program; reports use them where there is no
program, as for the dense baseline of a sparse run.
"""

import dataclasses
import math
from collections.abc import Mapping

from prunex_jax.channels.groups import Layouts
from prunex_jax.comm.accounting import Collective, wire_bytes
from prunex_jax.comm.largest import CHUNK, Route, TopK, largest_buffer
from prunex_jax.comm.wires import FLOAT32, TERNARY, Wire

MeshShape = Mapping[str, int]
# Up to so many hosts all get the entries of all: owners would send half as much at the
# least, which is not much for a sum that is cut down once more.
FEW_HOSTS = 4


def dense_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of elements of a tree.

    Example:
      >>> dense_size({'kernel': (3, 4), 'bias': (4,)})
      16
    """
    return sum(math.prod(shape) for shape in shapes.values())


def compact_size(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Layouts,
    keep_counts: Mapping[str, int],
) -> int:
    """Number of elements of a tree of which each group keeps `keep_counts[name]`.

    sum over leaves of the product over axes of (kept channels on the axis, times the
    positions of each, plus the positions that belong to no group).

    Args:
      shapes: Shape of every leaf by path.
      layouts: From `channels.layouts_of` for these shapes.
      keep_counts: Kept channels of every group.
    Returns:
      The number of elements that one exchange of kept channels carries.
    Example:
      >>> from prunex_jax.channels import ChannelGroup, ChannelSlice, layouts_of
      >>> import numpy as np
      >>> rows = ChannelSlice('kernel', 0, np.arange(4)[:, None])
      >>> shapes = {'kernel': (4, 10), 'bias': (10,)}
      >>> layouts = layouts_of([ChannelGroup('g', 4, (rows,))], shapes)
      >>> compact_size(shapes, layouts, {'g': 2})
      30
    """
    total = 0
    for path, shape in shapes.items():
        axes = layouts.get(path, {})
        total += math.prod(
            axes[axis].kept_size(keep_counts) if axis in axes else size
            for axis, size in enumerate(shape)
        )
    return total


def device_sum(num_elements: int, mesh_shape: MeshShape) -> list[Collective]:
    """What `averaging.mean_over_devices` sends for a tree of `num_elements`."""
    _, (device_axis, num_devices) = mesh_shape.items()
    return [Collective("sum", (device_axis,), (num_devices,), num_elements, "float32")]


def host_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_over_hosts` sends: each device carries one share."""
    (_, num_hosts), (_, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return []
    if wire.dtype == TERNARY:
        scale = mesh_sum(num_hosts * num_devices, mesh_shape)
        return [*scale, *_shared_sum(num_elements, mesh_shape, wire)]
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
    unit = wire.block * num_devices * num_hosts
    for size in _sizes(num_elements, wire.bucket_elements):
        share = -(-size // unit) * wire.block * num_hosts
        errors = ("gather", (device_axis,), (num_devices,), share, "float32")
        sent.append(Collective(*errors))
    return sent


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
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_over_mesh` sends: scatter, sum over hosts, gather."""
    (_, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if wire.dtype == TERNARY and num_hosts > 1:
        in_host = device_sum(num_elements, mesh_shape)
        return in_host + host_sum(num_elements, mesh_shape, wire)
    on_hosts = FLOAT32 if num_hosts == 1 else wire
    unit = num_devices * (on_hosts.block * num_hosts if on_hosts.is_narrow else 1)
    sent = []
    for size in _sizes(num_elements, wire.bucket_elements):
        padded = -(-size // unit) * unit
        sent.append(
            Collective("scatter", (device_axis,), (num_devices,), padded, "float32")
        )
        sent += _shared_sum(size, mesh_shape, on_hosts)
    return sent


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
            own = -(-size // (wire.block * count)) * wire.block_width
            sent.append(Collective("exchange", axes, sizes, count * own, wire.carrier))
            sent.append(Collective("gather", axes, sizes, own, wire.carrier))
    return sent


def ring_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `ring.ring_mean_over_hosts` sends: each device passes pieces to the next."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    if num_hosts == 1:
        return []
    unit = wire.block
    num_units = -(-num_elements // (unit * num_devices * num_hosts))
    piece = num_units * wire.block_width
    share, hops = num_units * unit * num_hosts, 2 * (num_hosts - 1)
    return [
        Collective("shift", (host_axis,), (num_hosts,), piece, wire.carrier, hops),
        Collective("gather", (device_axis,), (num_devices,), share, "float32"),
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
    return (values, wire.carrier), (places, "uint8")


def route_of(
    num_elements: int, top: TopK, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> Route:
    """How `chunks.mean_of_largest` sends a tree of `num_elements`: gather or owners.

    Returns:
      As `top` says. With "auto", gather up to `FEW_HOSTS`; beyond, the route on which a
      host sends fewer bytes to others: owners, but for trees of few chunks, of which
      not every device has a share.
    Example:
      >>> top = TopK(64, route='auto')
      >>> meshes = [{'host': n, 'device': 2} for n in (4, 5)]
      >>> [route_of(100_000, top, mesh) for mesh in meshes]
      ['gather', 'owners']
      >>> route_of(5000, top, meshes[1])
      'gather'
    """
    if top.route != "auto":
        return top.route
    (host_axis, num_hosts), _ = mesh_shape.items()
    if num_hosts <= FEW_HOSTS:
        return "gather"

    def sent_bytes(route: Route) -> float:
        chosen = dataclasses.replace(top, route=route)
        listed = largest_sum(num_elements, chosen, mesh_shape, wire)
        return wire_bytes(listed, mesh_shape)[host_axis]

    routes: tuple[Route, ...] = ("gather", "owners")
    return min(routes, key=sent_bytes)


def entry_gather(
    num_entries: int, mesh_shape: MeshShape, wire: Wire = FLOAT32
) -> list[Collective]:
    """What `averaging.mean_of_entries` sends: values, and a position for each."""
    num_carriers = wire.num_carriers(num_entries)
    values = host_gather(num_carriers, mesh_shape, wire.carrier)
    return values + host_gather(num_entries, mesh_shape, "int32")


def _shared_sum(
    num_elements: int, mesh_shape: MeshShape, wire: Wire
) -> list[Collective]:
    """A sum over hosts of one share per device, and the gather of the shares."""
    (host_axis, num_hosts), (device_axis, num_devices) = mesh_shape.items()
    carrier = wire.carrier
    if wire.is_narrow:
        num_parts = wire.block * num_devices * num_hosts
        own = -(-num_elements // num_parts) * wire.block_width
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
