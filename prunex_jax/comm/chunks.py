"""Means over hosts of the few largest numbers of every chunk of a buffer.

Positions inside a chunk of 4,096 take twelve bits, where those in a whole buffer take
32, and numbers are chosen chunk by chunk, so nothing as large as the buffer is sorted.
What a host does not send, and what a wire rounds away, is its error: it goes into what
the host sends next.

Sits on `comm.collectives` and `comm.wires`, as `comm.averaging` does.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.comm import collectives, wires
from prunex_jax.comm.buffers import in_buffers
from prunex_jax.comm.wires import FLOAT32, Wire
from prunex_jax.mesh import MeshAxes, axis_size, position, vary

# Numbers of which a few are sent. Twelve bits are a position.
CHUNK = 4096

# gather: all hosts get the entries of all. owners: every chunk has a host that adds up
# what all send of it, and sends the largest of the sum to all. auto: see `route_of`.
Route = Literal["auto", "gather", "owners"]
# Up to so many hosts all get the entries of all: owners would send half as much at the
# least, which is not much for a sum that is cut down once more.
FEW_HOSTS = 4


@dataclasses.dataclass(frozen=True)
class TopK:
    """Which numbers of a chunk are sent, and how.

    Attributes:
      per_chunk: Numbers of each chunk that a host sends; even, since two positions
        make three bytes.
      route: gather sends M - 1 times the entries of a host of M; owners about twice,
        whatever M, but cuts the sum down to as many entries once more.
    """

    per_chunk: int
    route: Route = "gather"

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions of a chunk: twelve bits each."""
        return self.per_chunk * 3 // 2

    def __post_init__(self) -> None:
        """Raises UserError for what cannot be sent."""
        if not 2 <= self.per_chunk <= CHUNK or self.per_chunk % 2:
            raise UserError(
                f"top_k={self.per_chunk} must be an even number from 2 to {CHUNK}, the "
                "numbers of a chunk; 0 sends all of them"
            )
        if self.route not in ("auto", "gather", "owners"):
            raise UserError(
                f"top_k_route={self.route!r} must be auto, gather or owners"
            )


def largest_buffer(wire: Wire, mesh_shape: Mapping[str, int]) -> int:
    """Elements of the largest buffer that is cut into chunks; 0 is no limit.

    Choosing takes several times the memory of a buffer, and a message is but a small
    part of it: so the size of messages limits the float32 that they stand for. Whole
    chunks, at least one; where that is enough, as many for every device.

    Example:
      >>> largest_buffer(Wire('int2', 2**28), {'host': 3, 'device': 2}) // CHUNK
      16380
    """
    if not wire.bucket_bytes:
        return 0
    num_chunks = max(1, wire.bucket_bytes // (4 * CHUNK))
    num_owners = math.prod(mesh_shape.values())
    if num_chunks > num_owners:
        num_chunks -= num_chunks % num_owners
    return CHUNK * num_chunks


def mean_of_largest(
    tree: PyTree, top: TopK, axes: MeshAxes, wire: Wire = FLOAT32
) -> tuple[PyTree, PyTree]:
    """Averages the largest numbers of every chunk over hosts.

    Args:
      tree: Floating leaves of n elements, per_host; they are one buffer, or several of
        `largest_buffer`, whose chunks may hold parts of several leaves.
      top: What is sent, and to whom.
      axes: Mesh axes.
      wire: How the numbers cross hosts; they are rounded to nearest.
    Returns:
      The mean, replicated; and the error, per_host: what this host has not sent. The
      mean of the trees is the first plus the mean of the errors. With one host, the
      tree, and zero.
    Collectives:
      For every buffer, with c = ceil(n / 4096) chunks of k entries, M hosts and P
      devices per host:
      gather: as `gather_over_hosts` for the c k values, or the blocks they become, and
      for 3/2 c k bytes of positions. owners: with b = ceil(c / (M P)), exchanges over
      the host axis of the values and positions of M b chunks, and gathers of those of
      b; then gathers of as much of the mean over the device axis, and of M b chunks of
      errors in float32.
    Example:
      >>> from prunex_jax.mesh import ALONE
      >>> mean, error = mean_of_largest({'x': jnp.arange(3.0)}, TopK(2), ALONE)
      >>> mean['x'].tolist(), error['x'].tolist()
      ([0.0, 1.0, 2.0], [0.0, 0.0, 0.0])

    References:
      Sarfi et al., SparseLoCo, 2025, arXiv:2508.15706, algorithm 1.
    Differs from:
      The paper: chunks are pieces of one buffer, not 64 by 64 tiles of matrices.
      Numbers that a host does not send count as zero, as in its listing; its code
      averages over those hosts that send them. The wire
      decides the format of numbers. Messages of large norm are not clipped.
    """
    if not jax.tree.leaves(tree):
        return tree, tree
    if axes.host is None or axis_size(axes.host) == 1:
        zeros = vary(jax.tree.map(jnp.zeros_like, tree), (axes.host,))
        return jax.tree.map(lambda x: collectives.sum_over_hosts(x, axes), tree), zeros
    mesh_shape = {"host": axis_size(axes.host), "device": axis_size(axes.device)}
    num_elements = sum(leaf.size for leaf in jax.tree.leaves(tree))
    route = route_of(num_elements, top, mesh_shape, wire)
    send = _by_gather if route == "gather" else _by_owners

    def mean_and_error(buffer: jax.Array, _: int) -> tuple[jax.Array, ...]:
        found = send(_in_chunks(buffer, 1), top, axes, wire)
        return tuple(x.ravel()[: buffer.size].astype(buffer.dtype) for x in found)

    room = largest_buffer(wire, mesh_shape)
    mean, error = in_buffers(tree, mean_and_error, room, wire.in_turn)
    return mean, error


def route_of(
    num_elements: int, top: TopK, mesh_shape: Mapping[str, int], wire: Wire = FLOAT32
) -> Route:
    """How `mean_of_largest` sends a tree of `num_elements`: gather or owners.

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
    num_hosts, num_devices = mesh_shape.values()
    if num_hosts <= FEW_HOSTS or not num_elements:
        return "gather"
    room = largest_buffer(wire, mesh_shape) or num_elements
    gathered = owned = 0  # Bytes of a device, of which each other host gets as many.
    for start in range(0, num_elements, room):
        num_chunks = -(-min(room, num_elements - start) // CHUNK)
        own = -(-num_chunks // (num_hosts * num_devices))
        for size, width in _messages(num_chunks, top, wire):
            gathered += -(-size // num_devices) * width
        # Entries to the owner, and the largest of the sum from there.
        owned += 2 * sum(size * width for size, width in _messages(own, top, wire))
    return "owners" if owned < gathered else "gather"


def _messages(num_chunks: int, top: TopK, wire: Wire) -> list[tuple[int, int]]:
    """Elements, and bytes of each, of what stands for chunks: values and positions."""
    width = jnp.dtype(wire.format.carrier).itemsize
    values = wire.num_carriers(num_chunks * top.per_chunk)
    return [(values, width), (num_chunks * top.position_bytes, 1)]


def _by_gather(
    chunks: jax.Array, top: TopK, axes: MeshAxes, wire: Wire
) -> tuple[jax.Array, jax.Array]:
    """All hosts get the entries of all; [c, CHUNK] in and out, twice."""
    messages, packed, error = _send(chunks, 1, top, wire)
    rows = collectives.gather_over_hosts(messages.ravel(), axes)
    places = collectives.gather_over_hosts(packed.ravel(), axes)
    places = places.reshape(len(places), len(chunks), -1)
    return _mean_of(rows, places, top, wire), error


def _by_owners(
    chunks: jax.Array, top: TopK, axes: MeshAxes, wire: Wire
) -> tuple[jax.Array, jax.Array]:
    """Every device of every host owns some of the chunks; [c, CHUNK] in and out."""
    host_axis = axes.host
    assert host_axis is not None, "with one host, nothing is sent"
    num_hosts = axis_size(host_axis)
    whole = _in_chunks(chunks.ravel(), num_hosts * axis_size(axes.device))
    share = collectives.share_of(whole.ravel(), axes.device).reshape(-1, CHUNK)
    own = len(share) // num_hosts
    # Part i is for host i, and then from host i.
    messages, packed, error = _send(share, num_hosts, top, wire)
    rows = collectives.exchange(messages, host_axis)
    places = collectives.exchange(packed, host_axis).reshape(num_hosts, own, -1)
    mean = _mean_of(rows, places, top, wire)
    # The largest of the mean go to all; the owner alone knows what they are short of.
    messages, packed, rest = _send(mean, 1, top, wire)
    error = wires.add_to_part(error, num_hosts * rest, position(host_axis))

    def for_all(part: jax.Array) -> jax.Array:
        rows = collectives.collect(part, host_axis)
        return collectives.join_shares(rows, axes.device)

    places = unpack_positions(for_all(packed))
    values = _read(for_all(messages), own, top, wire).reshape(places.shape)
    mean = _add(jnp.zeros(whole.shape, whole.dtype), places, values)
    return mean, vary(collectives.join_shares(error, axes.device), (host_axis,))


def pack_positions(positions: jax.Array) -> jax.Array:
    """Puts two positions into three bytes: int32[n, k] to uint8[n, 3 k / 2].

    Example:
      >>> packed = pack_positions(jnp.array([[1, 4095, 256, 2]]))
      >>> packed.tolist(), unpack_positions(packed).tolist()
      ([[1, 240, 255, 0, 33, 0]], [[1, 4095, 256, 2]])
    """
    first, second = positions[:, 0::2], positions[:, 1::2]
    three = (first & 255, (first >> 8) | ((second & 15) << 4), second >> 4)
    packed = jnp.stack(three, axis=2).astype(jnp.uint8)
    return packed.reshape(len(positions), -1)


def unpack_positions(packed: jax.Array) -> jax.Array:
    """Inverse of `pack_positions`: int32[n, k]."""
    three = packed.reshape(len(packed), -1, 3).astype(jnp.int32)
    low, middle, high = three[:, :, 0], three[:, :, 1], three[:, :, 2]
    pair = (low | ((middle & 15) << 8), (middle >> 4) | (high << 4))
    return jnp.stack(pair, axis=2).reshape(len(packed), -1)


def _in_chunks(buffer: jax.Array, num_parts: int) -> jax.Array:
    """The buffer as float32[c, CHUNK], so many chunks that they can be dealt out."""
    padded = jnp.pad(buffer.astype(jnp.float32), (0, -buffer.size % CHUNK))
    chunks = padded.reshape(-1, CHUNK)
    return jnp.pad(chunks, ((0, -len(chunks) % num_parts), (0, 0)))


def _send(
    chunks: jax.Array, num_parts: int, top: TopK, wire: Wire
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes the largest of chunks [c, CHUNK], in parts of as many chunks each.

    Returns:
      The values, a message [num_parts, ...]; their positions, packed [c, ...]; and what
      remains of the chunks, [c, CHUNK].
    """
    positions = jax.lax.top_k(jnp.abs(chunks), top.per_chunk)[1]
    values = jnp.take_along_axis(chunks, positions, axis=1).reshape(num_parts, -1)
    messages = jax.vmap(lambda part: wires.write(part, wire))(values)
    sent = _read(messages, len(chunks) // num_parts, top, wire)
    rest = _add(chunks, positions, -sent.reshape(positions.shape))
    return messages, pack_positions(positions), rest


def _read(messages: jax.Array, num_chunks: int, top: TopK, wire: Wire) -> jax.Array:
    """Values of messages [n, ...] of so many chunks each: float32[n, chunks, k]."""
    size = num_chunks * top.per_chunk
    values = jax.vmap(lambda message: wires.read(message, size, wire))(messages)
    return values.reshape(len(messages), num_chunks, -1)


def _mean_of(rows: jax.Array, places: jax.Array, top: TopK, wire: Wire) -> jax.Array:
    """Averages what hosts have sent, [hosts, ...] of both messages; [c, CHUNK]."""
    num_hosts, num_chunks = places.shape[:2]
    total = jnp.zeros((num_chunks, CHUNK), jnp.float32)
    # Host after host, so that the order of every sum is the same on all devices.
    for values, place in zip(_read(rows, num_chunks, top, wire), places, strict=True):
        at = unpack_positions(place)
        total = _add(total, at, values / num_hosts)
    return total


def _add(chunks: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """Adds values [c, k] to chunks at these positions, of which none comes twice."""
    rows = jnp.arange(len(chunks))[:, None]
    return chunks.at[rows, positions].add(values, unique_indices=True)
