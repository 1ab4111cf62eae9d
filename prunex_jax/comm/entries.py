"""Means over hosts of which every host sends few entries: positions and values.

Where hosts choose entries of their own, their messages cannot be summed on the way:
they are gathered, and every device adds up all of them. So what a host sends grows with
the number of hosts M: with entries of float32 it is less than a dense sum of the whole
below a density of 1 / M only.
"""

import jax
import jax.numpy as jnp

from prunex_jax.comm import collectives, wires


def mean_of_entries(
    positions: jax.Array,
    values: jax.Array,
    size: int,
    host_axis: str | None,
    device_axis: str | None,
    wire_dtype: str = "float32",
) -> tuple[jax.Array, jax.Array]:
    """Averages buffers over hosts that are zero but for few entries.

    Args:
      positions: int32[k], per_host, without repetition.
      values: float32[k], per_host.
      size: Elements of the buffers, n.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
      wire_dtype: Format in which the values cross the host axis; narrow ones round to
        nearest. Positions are int32 always.
    Returns:
      The mean, float32[n], replicated; and what this host has put into it, float32[k],
      per_host: the values after rounding, so that values less that is still to be sent.
    Raises:
      UserError: No such format.
    Collectives:
      As `gather_over_hosts` for k values, or the ceil(k / 128) blocks they become, and
      for k positions.
    """
    wires.check_wire_dtype(wire_dtype)
    count = values.size
    message, sent = values, values
    if wires.is_narrow(wire_dtype):
        padded = jnp.pad(values, (0, -count % wires.BLOCK)).reshape(-1, wires.BLOCK)
        blocks = wires.encode(padded, wire_dtype)
        sent = wires.decode(blocks, wire_dtype).reshape(-1)[:count]
        message = blocks.reshape(-1)
    messages = collectives.gather_over_hosts(message, host_axis, device_axis)
    places = collectives.gather_over_hosts(positions, host_axis, device_axis)
    num_hosts = len(places)
    rows = messages
    if wires.is_narrow(wire_dtype):
        width = message.size // (-(-count // wires.BLOCK))
        rows = wires.decode(messages.reshape(-1, width), wire_dtype)
        rows = rows.reshape(num_hosts, -1)[:, :count]
    # Host after host: no position comes twice in one, so the order of every sum is the
    # same on all devices, whose copies would drift apart else.
    total = jnp.zeros(size, jnp.float32)
    for at, row in zip(places, rows, strict=True):
        total = total.at[at].add(row / num_hosts, unique_indices=True)
    return total, sent
