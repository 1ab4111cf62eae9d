"""Means of whole trees over the mesh, each as one fused buffer.

Sits on `comm.collectives`; knows nothing of channels: a compact tree is a tree.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import collectives, wires
from prunex_jax.comm.buckets import apply_fused, bucket_elements


def mean_over_devices(tree: PyTree, device_axis: str | None) -> PyTree:
    """Averages a tree over the devices of each host.

    Args:
      tree: Floating leaves, per_device.
      device_axis: Axis of the devices, or None to leave the tree as it is.
    Returns:
      The mean, per_host.
    Collectives:
      One sum over `device_axis` of all leaves in one buffer; none that moves anything
      if there is one device.
    """
    num_devices = collectives.axis_size(device_axis)
    if num_devices == 1:  # fusing would only copy
        return jax.tree.map(
            lambda leaf: collectives.sum_over_devices(leaf, device_axis), tree
        )
    return _fused(
        tree, lambda x: collectives.sum_over_devices(x / num_devices, device_axis)
    )


def mean_over_hosts(
    tree: PyTree,
    host_axis: str | None,
    device_axis: str | None,
    wire_dtype: str = "float32",
    key: jax.Array | None = None,
    bucket_bytes: int = 0,
) -> PyTree:
    """Averages a tree over hosts; each device carries an equal slice of it.

    Args:
      tree: Floating leaves, per_host.
      host_axis: Axis of the hosts, or None to leave the tree as it is.
      device_axis: Axis of the devices, or None.
      wire_dtype: Format in which values cross the host axis: float32, or one of
        `wires.encode`. Sums are always taken in float32. With one host, nothing crosses
        and nothing is rounded.
      key: Random key, the same everywhere and another one in every call: narrow formats
        round stochastically and the mean is unbiased, so nothing has to be remembered
        between calls. None rounds to nearest, which is biased: over many steps, what is
        always rounded away is lost unless the caller adds what its host lost in one
        call, the tree less `wires.decode(wires.encode(...))` of it, to the next.
      bucket_bytes: Largest message that stands for a buffer; 0 sends one for the whole
        tree. See `comm.buckets` for when a limit pays. The result is the same.
    Returns:
      The mean, replicated, in the types of the tree. The same bits on every host,
      whatever the number of devices and of buckets.
    Raises:
      UserError: No such format.
    Collectives:
      float32: as `collectives.sum_over_hosts` for the number of elements of every
      buffer. Otherwise, with M hosts, P devices per host and b = ceil(n / (128 P M))
      blocks: an exchange over `host_axis` of M * b messages of a block, a gather over
      it of b messages from each host, a gather over `device_axis` of M * b messages
      from each device. 2 (M - 1) / M of the bytes of the narrow tree per host.
    """
    wires.check_wire_dtype(wire_dtype)
    num_hosts = collectives.axis_size(host_axis)
    wire = _Wire(wire_dtype, key)

    def mean(buffer: jax.Array, offset: int) -> jax.Array:
        if host_axis is None or num_hosts == 1:
            return collectives.sum_over_hosts(buffer, host_axis, device_axis)
        if not wires.is_narrow(wire_dtype):
            wide = buffer.astype(jnp.promote_types(buffer.dtype, wire_dtype))
            sent = (wide / num_hosts).astype(wire_dtype)
            total = collectives.sum_over_hosts(sent, host_axis, device_axis)
            return total.astype(buffer.dtype)
        whole = wire.pad(buffer, num_hosts * collectives.axis_size(device_axis))
        share = collectives.share_of(whole, device_axis)
        return wire.mean(share, host_axis, device_axis, offset, buffer)

    return apply_fused(tree, mean, bucket_elements(bucket_bytes, wire_dtype))


def mean_over_mesh(
    tree: PyTree,
    host_axis: str | None,
    device_axis: str | None,
    wire_dtype: str = "float32",
    key: jax.Array | None = None,
    bucket_bytes: int = 0,
) -> PyTree:
    """Averages a tree over all devices of all hosts, hierarchically.

    Args:
      tree: Floating leaves, per_device.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
      wire_dtype: Format in which values cross the host axis, as in `mean_over_hosts`;
        between the devices of a host they are summed as they are.
      key: As in `mean_over_hosts`.
      bucket_bytes: As in `mean_over_hosts`.
    Returns:
      The mean, replicated.
    Raises:
      UserError: No such format.
    Collectives:
      float32: as `collectives.sum_over_mesh` for the number of elements of every
      buffer. Otherwise a scattered sum over `device_axis` of 128 P M b elements, then
      as `mean_over_hosts`.
    """
    wires.check_wire_dtype(wire_dtype)
    num_hosts = collectives.axis_size(host_axis)
    num_devices = collectives.axis_size(device_axis)
    count = num_hosts * num_devices
    if count == 1:  # fusing would only copy
        return jax.tree.map(
            lambda leaf: collectives.sum_over_mesh(leaf, host_axis, device_axis), tree
        )
    wire = _Wire(wire_dtype, key)

    def mean(buffer: jax.Array, offset: int) -> jax.Array:
        if host_axis is None or num_hosts == 1 or not wires.is_narrow(wire_dtype):
            return collectives.sum_over_mesh(buffer / count, host_axis, device_axis)
        whole = wire.pad(buffer / num_devices, count)
        share = collectives.scatter_sum(whole, device_axis)
        return wire.mean(share, host_axis, device_axis, offset, buffer)

    return apply_fused(tree, mean, bucket_elements(bucket_bytes, wire_dtype))


def flat_mean_over_mesh(
    tree: PyTree,
    host_axis: str | None,
    device_axis: str | None,
    wire_dtype: str = "float32",
    key: jax.Array | None = None,
    bucket_bytes: int = 0,
) -> PyTree:
    """Averages a tree over all devices at once, as if all links were the same.

    What data parallelism does that knows no hosts. The bytes that are counted are those
    of one ring through all devices; a backend that finds out which links are slow may
    do better. Narrow formats save less than between hosts: every device sends its own
    numbers, so P (M - 1) / M + 1 times the bytes of the narrow tree leave a host.

    Args:
      tree: Floating leaves, per_device.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
      wire_dtype: As in `mean_over_hosts`, here also between the devices of a host; with
        one host, nothing is rounded.
      key: As in `mean_over_hosts`.
      bucket_bytes: As in `mean_over_hosts`.
    Returns:
      The mean, replicated.
    Raises:
      UserError: No such format.
    Collectives:
      float32, or one host: one sum over both axes of every buffer. Otherwise an
      exchange and a gather over both, as `mean_over_hosts` with P M hosts.
    """
    wires.check_wire_dtype(wire_dtype)
    axes = tuple(axis for axis in (host_axis, device_axis) if axis is not None)
    if not axes:
        return tree
    count = collectives.axis_size(axes)
    is_exact = collectives.axis_size(host_axis) == 1 or not wires.is_narrow(wire_dtype)
    wire = _Wire(wire_dtype, key)

    def mean(buffer: jax.Array, offset: int) -> jax.Array:
        if is_exact:
            return collectives.sum_at_once(buffer / count, axes)
        return wire.mean(wire.pad(buffer, count), axes, None, offset, buffer)

    return apply_fused(tree, mean, bucket_elements(bucket_bytes, wire_dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class _Wire:
    """A narrow format and the key of one mean."""

    dtype: str
    key: jax.Array | None

    def pad(self, buffer: jax.Array, num_parts: int) -> jax.Array:
        """The buffer in float32, in whole blocks for every part of it."""
        multiple = num_parts * wires.BLOCK
        return jnp.pad(buffer.astype(jnp.float32), (0, -buffer.size % multiple))

    def mean(
        self,
        share: jax.Array,
        axis: collectives.MeshAxes,
        device_axis: str | None,
        offset: int,
        buffer: jax.Array,
    ) -> jax.Array:
        """The mean over an axis of what every device has a share of, like `buffer`."""
        here = collectives.position(device_axis)
        first_block = (offset + here * share.size) // wires.BLOCK
        own = wires.mean_of_shares(share, axis, first_block, self.dtype, self.key)
        whole = wires.decode(collectives.join_shares(own, device_axis), self.dtype)
        return whole.ravel()[: buffer.size].astype(buffer.dtype)


def min_over_mesh(
    value: jax.Array, host_axis: str | None, device_axis: str | None
) -> jax.Array:
    """Smallest value over all devices of all hosts; for single numbers.

    Args:
      value: A scalar, per_device.
      host_axis: Mesh axis of the hosts, or None.
      device_axis: Mesh axis of the devices, or None.
    Returns:
      The minimum, replicated.
    Collectives:
      As `collectives.sum_over_mesh` for one number per device of a host.
    """
    # Each device writes its own entry of a vector of zeros, so that the sum gathers.
    num_hosts = collectives.axis_size(host_axis)
    num_devices = collectives.axis_size(device_axis)
    own = collectives.position(host_axis) * num_devices
    own = own + collectives.position(device_axis)
    entries = jnp.zeros(num_hosts * num_devices, value.dtype).at[own].set(value)
    return jnp.min(collectives.sum_over_mesh(entries, host_axis, device_axis))


def gather_over_hosts(
    tree: PyTree, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Collects a tree from all hosts, leaf by leaf; for trees of few leaves.

    Args:
      tree: Leaves [n] of any type, per_host.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      Leaves [hosts, n], replicated.
    Collectives:
      As `collectives.gather_over_hosts` for every leaf.
    """
    return jax.tree.map(
        lambda leaf: collectives.gather_over_hosts(leaf, host_axis, device_axis), tree
    )


def sum_over_hosts(
    tree: PyTree, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Adds up a tree over hosts, in the widest of its types.

    Args:
      tree: per_host.
      host_axis: Axis of the hosts, or None to leave the tree as it is.
      device_axis: Axis of the devices, or None.
    Returns:
      The sum, replicated, in the types of the tree.
    Collectives:
      As `collectives.sum_over_hosts` for the number of elements of the tree.
    """
    return _fused(tree, lambda x: collectives.sum_over_hosts(x, host_axis, device_axis))


def take_from_host(
    index: int, tree: PyTree, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Gives all hosts what one of them has.

    Args:
      index: Position of that host.
      tree: per_host.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      The tree of that host, replicated.
    Collectives:
      As `sum_over_hosts`, to which the others add zeros.
    """
    is_there = collectives.position(host_axis) == index
    own = jax.tree.map(lambda x: jnp.where(is_there, x, jnp.zeros_like(x)), tree)
    return sum_over_hosts(own, host_axis, device_axis)


def sum_over_mesh(
    tree: PyTree, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Adds up a tree over all devices of all hosts, in the widest of its types.

    Args:
      tree: per_device.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      The sum, replicated, in the types of the tree.
    Collectives:
      As `collectives.sum_over_mesh` for the number of elements of the tree.
    """
    return _fused(tree, lambda x: collectives.sum_over_mesh(x, host_axis, device_axis))


def _fused(tree: PyTree, fn: Callable[[jax.Array], jax.Array]) -> PyTree:
    """Applies `fn` to all leaves in one flat buffer; to nothing, if there are none."""
    return apply_fused(tree, lambda buffer, _: fn(buffer))
