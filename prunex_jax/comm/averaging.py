"""Means of whole trees over the mesh, each as one fused buffer.

Sits on `comm.collectives`; knows nothing of channels: a compact tree is a tree.
"""

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
    buffer, split = ravel_pytree(tree)
    return split(collectives.sum_over_devices(buffer, device_axis) / num_devices)


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
        divided by the number of hosts first, so that float16 cannot overflow in the sum
        of what did not overflow before.
    Returns:
      The mean, replicated, in the types of the tree.
    Collectives:
      As `collectives.sum_over_hosts` for the number of elements of the tree.
    """
    num_hosts = collectives.axis_size(host_axis)
    buffer, split = ravel_pytree(tree)
    sent = (buffer / num_hosts).astype(jnp.dtype(wire_dtype))
    mean = collectives.sum_over_hosts(sent, host_axis, device_axis)
    return split(mean.astype(buffer.dtype))


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
    buffer, split = ravel_pytree(tree)
    return split(collectives.sum_over_mesh(buffer / count, host_axis, device_axis))


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
    """Adds up a tree, per_host, over hosts; see `mean_over_hosts`."""
    buffer, split = ravel_pytree(tree)
    return split(collectives.sum_over_hosts(buffer, host_axis, device_axis))


def sum_over_mesh(
    tree: PyTree, host_axis: str | None, device_axis: str | None
) -> PyTree:
    """Adds up a tree over all devices of all hosts; see `mean_over_mesh`."""
    buffer, split = ravel_pytree(tree)
    return split(collectives.sum_over_mesh(buffer, host_axis, device_axis))
