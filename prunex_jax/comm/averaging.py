"""Means of whole trees over the mesh, each as one fused buffer.

Sits on `comm.collectives`; knows nothing of channels: a compact tree is a tree.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from prunex_jax.comm import collectives
from prunex_jax.trees import PyTree


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
) -> PyTree:
    """Averages a tree over hosts; each device carries an equal slice of it.

    Args:
      tree: Floating leaves, per_host.
      host_axis: Axis of the hosts, or None to leave the tree as it is.
      device_axis: Axis of the devices, or None.
      wire_dtype: Type in which values cross the host axis and are summed. Values are
        divided by the number of hosts first, so that float16 does not overflow in the
        sum; it still does beyond 65504, and below 6e-8 it is zero. With one host,
        nothing crosses and nothing is rounded.
    Returns:
      The mean, replicated, in the types of the tree.
    Collectives:
      As `collectives.sum_over_hosts` for the number of elements of the tree.
    """
    num_hosts = collectives.axis_size(host_axis)

    def mean(buffer: jax.Array) -> jax.Array:
        wire = buffer.dtype if num_hosts == 1 else jnp.dtype(wire_dtype)
        wide = jnp.promote_types(buffer.dtype, wire)
        sent = (buffer.astype(wide) / num_hosts).astype(wire)
        total = collectives.sum_over_hosts(sent, host_axis, device_axis)
        return total.astype(buffer.dtype)

    return _fused(tree, mean)


def mean_over_mesh(
    tree: PyTree, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Averages a tree over all devices of all hosts, hierarchically.

    Args:
      tree: Floating leaves, per_device.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      The mean, replicated.
    Collectives:
      As `collectives.sum_over_mesh` for the number of elements of the tree.
    """
    count = collectives.axis_size(host_axis) * collectives.axis_size(device_axis)
    if count == 1:  # fusing would only copy
        return jax.tree.map(
            lambda leaf: collectives.sum_over_mesh(leaf, host_axis, device_axis), tree
        )
    return _fused(
        tree, lambda x: collectives.sum_over_mesh(x / count, host_axis, device_axis)
    )


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
    if not jax.tree.leaves(tree):
        return tree
    buffer, split = ravel_pytree(tree)
    return split(fn(buffer))
