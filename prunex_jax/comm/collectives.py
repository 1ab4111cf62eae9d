"""The only module that calls jax collectives: sums of flat buffers over the mesh.

Everything here runs inside `shard_map` (or with axis None on one device, or inside
`vmap` with axis names, which simulates hosts without a mesh) and works on one flat
buffer, so that every exchange is one message per stage. Trees are fused and split by
`comm.averaging`. Bytes are stated per device; `comm.accounting` counts them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree

# A mesh axis, or several that are taken as one, slow axis first.
MeshAxes = str | tuple[str, ...]


def axis_size(axis: MeshAxes | None) -> int:
    """Number of positions along a mesh axis; 1 for None."""
    return 1 if axis is None else jax.lax.axis_size(axis)


def position(axis: MeshAxes | None) -> jax.Array | int:
    """Position of this device along a mesh axis; 0 for None."""
    return 0 if axis is None else jax.lax.axis_index(axis)


def vary(tree: PyTree, axes: Sequence[str | None]) -> PyTree:
    """Marks values as differing along mesh axes, without moving anything.

    `jax.grad` with respect to a value that does not vary over an axis contains a sum
    over that axis. Parameters pass through here first, so that gradients stay local
    and every sum is one that the package asked for.

    Args:
      tree: Any values; leaves that vary already pass through, as does everything where
        `shard_map` does not track types (`check_vma=False`) or there is none.
      axes: Mesh axes; None is skipped.
    Returns:
      The same values, typed as varying over the axes.
    """
    tracked = [axis for axis in axes if axis and _is_tracked(axis)]

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in tracked if not _varies(leaf, axis))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def check_local(grads: PyTree, axes: Sequence[str | None]) -> None:
    """Refuses gradients that `jax.grad` has already summed over a mesh axis.

    That happens when the parameters it differentiates do not vary over the axis. A
    mean on top would leave the sum as it is, so every gradient would be as many times
    too large as the axis is long, and would cross the axis twice. Where `shard_map`
    does not track types (`check_vma=False`), gradients are local and nothing is
    checked.

    Args:
      grads: Gradients inside `shard_map`.
      axes: Mesh axes over which they must be local; None is skipped.
    Raises:
      UserError: No leaf varies over one of the axes.
    """
    leaves = jax.tree.leaves(grads)
    for axis in axes:
        if axis is None or not leaves or not _is_tracked(axis):
            continue
        if not any(_varies(leaf, axis) for leaf in leaves):
            raise UserError(
                f"gradients do not vary over mesh axis {axis!r}: jax.grad has summed "
                "them over it already; differentiate comm.vary(params, "
                f"[{axis!r}]) instead of params"
            )


def _varies(leaf: jax.Array, axis: str) -> bool:
    """Whether `shard_map` knows a value as differing along an axis."""
    return axis in jax.typeof(leaf).manual_axis_type.varying


def _is_tracked(axis: str) -> bool:
    """Whether this runs inside a `shard_map` that tracks what varies over an axis."""
    try:
        return _varies(jax.lax.axis_index(axis), axis)
    except NameError:  # no such axis here
        return False


def sum_over_devices(buffer: jax.Array, device_axis: str | None) -> jax.Array:
    """Sums a buffer over the devices of each host.

    Args:
      buffer: Any shape, per_device.
      device_axis: Axis of the devices, or None.
    Returns:
      The sum, the same on every device of a host.
    Collectives:
      One sum over `device_axis` of the whole buffer.
    """
    if device_axis is None:
        return buffer
    return jax.lax.psum(vary(buffer, (device_axis,)), device_axis)


def sum_over_hosts(
    buffer: jax.Array, host_axis: str | None, device_axis: str | None
) -> jax.Array:
    """Sums a buffer over hosts; each device carries an equal slice of it.

    A plain sum over `host_axis` would send the whole buffer once per device. Here every
    byte crosses the host link once, and every network port of a host works.

    Args:
      buffer: [n], per_host: the same on every device of a host.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      [n], replicated.
    Collectives:
      With P devices per host and m = ceil(n / P): a sum over `host_axis` of m elements,
      then a gather over `device_axis` of m elements from each device. With one host,
      nothing that moves.
    """
    if host_axis is None:
        return buffer
    num_devices = axis_size(device_axis)
    is_single = axis_size(host_axis) == 1 and not (
        device_axis and _varies(buffer, device_axis)
    )
    if device_axis is None or num_devices == 1 or is_single:
        total = jax.lax.psum(vary(buffer, (host_axis,)), host_axis)
        return total if device_axis is None else _settle(total, device_axis)
    padded = _pad_to_multiple(buffer, num_devices)
    share = padded.size // num_devices
    start = jax.lax.axis_index(device_axis) * share
    own = jax.lax.dynamic_slice_in_dim(vary(padded, (device_axis,)), start, share)
    total = jax.lax.psum(vary(own, (host_axis,)), host_axis)
    return _gather(total, device_axis)[: buffer.size]


def gather_over_hosts(
    buffer: jax.Array, host_axis: str | None, device_axis: str | None
) -> jax.Array:
    """Collects the buffers of all hosts; each device carries an equal slice of them.

    Args:
      buffer: [n] of any type, per_host: the same on every device of a host.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      [hosts, n], replicated, in the order of the hosts.
    Collectives:
      With P devices per host, M hosts and m = ceil(n / P): a gather over `host_axis` of
      m elements, then one over `device_axis` of M * m elements from each device. With
      one host, nothing over `host_axis`.
    """
    if host_axis is None:
        return buffer[None]
    num_hosts, num_devices = axis_size(host_axis), axis_size(device_axis)
    is_single = num_hosts == 1 and not (device_axis and _varies(buffer, device_axis))
    if device_axis is None or num_devices == 1 or is_single:
        rows = _gather(vary(buffer, (host_axis,))[None], host_axis)
        return rows if device_axis is None else _settle(rows, device_axis)
    padded = vary(_pad_to_multiple(buffer, num_devices), (device_axis,))
    share = padded.size // num_devices
    start = jax.lax.axis_index(device_axis) * share
    own = jax.lax.dynamic_slice_in_dim(padded, start, share)
    rows = _gather(vary(own, (host_axis,))[None], host_axis)
    whole = _gather(rows[None], device_axis)  # [devices, hosts, share]
    return jnp.moveaxis(whole, 0, 1).reshape(num_hosts, -1)[:, : buffer.size]


def sum_over_mesh(
    buffer: jax.Array, host_axis: str | None, device_axis: str | None
) -> jax.Array:
    """Sums a buffer over all devices of all hosts, hierarchically.

    The bandwidth-optimal form: scatter the sum over the fast axis, sum each slice over
    the slow one, gather over the fast one.

    Args:
      buffer: [n], per_device.
      host_axis: Axis of the hosts, or None.
      device_axis: Axis of the devices, or None.
    Returns:
      [n], replicated.
    Collectives:
      With P devices per host and m = ceil(n / P): a scattered sum over `device_axis` of
      P * m elements, a sum over `host_axis` of m elements, a gather over `device_axis`
      of m elements from each device. With P = 1, only the sum over `host_axis`.
    """
    num_devices = axis_size(device_axis)
    if device_axis is None or num_devices == 1:
        summed = sum_over_devices(buffer, device_axis)
        return sum_over_hosts(summed, host_axis, None)
    own = scatter_sum(_pad_to_multiple(buffer, num_devices), device_axis)
    if host_axis is not None:
        own = jax.lax.psum(vary(own, (host_axis,)), host_axis)
    return _gather(own, device_axis)[: buffer.size]


def sum_at_once(buffer: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sums a buffer over all axes in one operation, whatever their links.

    Collectives:
      One sum over `axes` of the whole buffer.
    """
    return jax.lax.psum(vary(buffer, _as_tuple(axes)), axes)


def scatter_sum(buffer: jax.Array, device_axis: str | None) -> jax.Array:
    """Sums a buffer over the devices of a host; each keeps its share of the sum.

    Args:
      buffer: [P * m] with P devices per host, per_device.
      device_axis: Axis of the devices, or None.
    Returns:
      [m], the share of this device; `join_shares` puts shares together.
    Collectives:
      A scattered sum over `device_axis` of P * m elements; with one device, nothing
      that moves.
    """
    if device_axis is None or axis_size(device_axis) == 1:
        return sum_over_devices(buffer, device_axis)
    return jax.lax.psum_scatter(vary(buffer, (device_axis,)), device_axis, tiled=True)


def exchange(rows: jax.Array, axis: MeshAxes) -> jax.Array:
    """Sends every position its part of the rows, and takes the parts for this one.

    Args:
      rows: [size * n, ...] of any type: part i is for position i.
      axis: Axis, or several as one, of `size` positions.
    Returns:
      [size * n, ...]: part i is from position i.
    Collectives:
      One exchange over `axis` of all rows.
    """
    varying = vary(rows, _as_tuple(axis))
    return jax.lax.all_to_all(varying, axis, 0, 0, tiled=True)


def collect(rows: jax.Array, axis: MeshAxes) -> jax.Array:
    """Puts the rows of all positions one after the other.

    Args:
      rows: [n, ...] of any type.
      axis: Axis, or several as one, of `size` positions.
    Returns:
      [size * n, ...], the same along the axis.
    Collectives:
      One gather over `axis` of n rows from each position.
    """
    return _gather(vary(rows, _as_tuple(axis)), axis)


def shift(buffer: jax.Array, axis: str) -> jax.Array:
    """Sends a buffer to the next position along an axis, and takes the previous one's.

    Args:
      buffer: Any shape and type.
      axis: A mesh axis.
    Returns:
      What the position before sent; the first gets it from the last.
    Collectives:
      One shift over `axis` of the whole buffer.
    """
    size = axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.lax.ppermute(vary(buffer, (axis,)), axis, ring)


def share_of(buffer: jax.Array, device_axis: str | None) -> jax.Array:
    """Takes the slice of a host's buffer that this device carries; moves nothing.

    Args:
      buffer: [n], per_host.
      device_axis: Axis of the devices, or None.
    Returns:
      [ceil(n / P)] with P devices per host, padded with zeros.
    """
    num_devices = axis_size(device_axis)
    if device_axis is None or num_devices == 1:
        return buffer
    padded = _pad_to_multiple(buffer, num_devices)
    share = padded.size // num_devices
    start = jax.lax.axis_index(device_axis) * share
    return jax.lax.dynamic_slice_in_dim(vary(padded, (device_axis,)), start, share)


def join_shares(share: jax.Array, device_axis: str | None) -> jax.Array:
    """Puts the shares of all devices of a host together; inverse of `share_of`.

    Collectives:
      A gather over `device_axis`; with one device, nothing that moves.
    """
    if device_axis is None:
        return share
    if axis_size(device_axis) == 1:
        return _settle(share, device_axis)
    return _gather(share, device_axis)


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


def _gather(share: jax.Array, axis: MeshAxes) -> jax.Array:
    to = "invarying" if _is_tracked(_as_tuple(axis)[0]) else "varying"
    return jax.lax.all_gather(share, axis, tiled=True, to=to)


def _settle(value: jax.Array, device_axis: str) -> jax.Array:
    """Types a value as equal along an axis of size one, where it trivially is."""
    return jax.lax.psum(value, device_axis) if _varies(value, device_axis) else value


def _pad_to_multiple(buffer: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(buffer, (0, -buffer.size % multiple))
