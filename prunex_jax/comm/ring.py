"""A ring of hosts in which every hop can be seen: neighbour sends to neighbour.

The all-reduce of a backend may take any form. This one is written out as shifts over
the host axis, so that what each hop carries is in the program, can be listed, and can
be seen at the network interface. The shift itself is `comm.collectives`' business, what
numbers look like on the way that of `comm.wires`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from prunex_jax.comm import collectives
from prunex_jax.comm.wires import FLOAT32, Wire, refuse_biased
from prunex_jax.mesh import MeshAxes, axis_size, position, vary
from prunex_jax.mesh.varying import agreed


def ring_mean_over_hosts(
    buffer: jax.Array,
    axes: MeshAxes,
    wire: Wire = FLOAT32,
    key: jax.Array | None = None,
) -> jax.Array:
    """Averages a buffer over hosts, neighbour to neighbour.

    Every device carries an equal share of the buffer of its host, cut into as many
    pieces as there are hosts. In the first half of the hops each piece goes round and
    collects what every host has of it; in the second half the finished piece goes
    round once more. All hosts end with the same bits.

    Args:
      buffer: float32[n], per_host: the same on every device of a host.
      axes: Mesh axes.
      wire: How values travel; partial sums are rounded in every hop. A hop is one
        message, whatever the bucket size.
      key: As in `mean_over_hosts`.
    Returns:
      [n], replicated.
    Raises:
      UserError: int2.
    Collectives:
      With P devices per host and M hosts: 2 (M - 1) shifts over the host axis of
      ceil(n / (P M)) elements, in whole blocks of narrow formats; then a gather over
      the device axis of as many from each device for every host. With one host,
      nothing that moves.
    """
    refuse_biased(wire, "the ring")
    num_hosts = axis_size(axes.host)
    if axes.host is None or num_hosts == 1:
        return collectives.sum_over_hosts(buffer, axes)
    unit = wire.format.block
    parts = num_hosts * axis_size(axes.device) * unit
    padded = jnp.pad(buffer / num_hosts, (0, -buffer.size % parts))
    own = collectives.share_of(padded, axes.device)
    if key is not None:
        key = jax.random.fold_in(key, position(axes.device))
        key = jax.random.fold_in(key, position(axes.host))
    total = _ring_sum(own, axes.host, _Message(wire, key))
    return collectives.join_shares(total, axes.device)[: buffer.size]


@dataclasses.dataclass(frozen=True, eq=False)
class _Message:
    """How pieces look on the way."""

    wire: Wire
    key: jax.Array | None

    def write(self, values: jax.Array, hop: int) -> jax.Array:
        if not self.wire.is_narrow:
            return values
        blocks, noise = values.reshape(-1, self.wire.format.block), None
        if self.key is not None:
            noise = jax.random.uniform(jax.random.fold_in(self.key, hop), blocks.shape)
        return self.wire.format.encode(blocks, noise)

    def read(self, message: jax.Array) -> jax.Array:
        if not self.wire.is_narrow:
            return message
        return self.wire.format.decode(message).ravel()


def _ring_sum(own: jax.Array, axis: str, message: _Message) -> jax.Array:
    """The two halves of the ring, on the share of one device."""
    size, here = axis_size(axis), position(axis)
    pieces = vary(own, (axis,)).reshape(size, -1)
    partial = pieces[here]
    for hop in range(size - 1):
        arrived = collectives.shift(message.write(partial, hop), axis)
        partial = message.read(arrived) + pieces[(here - 1 - hop) % size]
    # The host that finished a piece reads what the others will get.
    done = message.write(partial, size - 1)
    whole = jnp.zeros_like(pieces).at[(here + 1) % size].set(message.read(done))
    for hop in range(size - 1):
        done = collectives.shift(done, axis)
        whole = whole.at[(here - hop) % size].set(message.read(done))
    return agreed(whole.ravel(), axis)
