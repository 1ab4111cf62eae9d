"""From sizes alone: what is left of a tree, and how its largest numbers are sent."""

import dataclasses
import math
from collections.abc import Mapping

from prunex_jax.channels.groups import Layouts, kept_shape
from prunex_jax.comm.accounting import Collective, wire_bytes
from prunex_jax.comm.largest import CHUNK, Route, TopK, largest_buffer
from prunex_jax.comm.wires import FLOAT32, Wire

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
    return sum(
        math.prod(kept_shape(shape, layouts.get(path), keep_counts))
        for path, shape in shapes.items()
    )


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


def _sizes(num_elements: int, room: int) -> list[int]:
    """Elements of the buffers in which a tree is sent, which have so much room."""
    if not room or not num_elements:
        return [num_elements]
    full, rest = divmod(num_elements, room)
    return [room] * full + [rest] * (rest > 0)
