"""The only module that calls jax collectives: sums of flat buffers over the mesh.

Everything here runs inside `shard_map` (or with an axis None on one device, or inside
`vmap` with axis names, which simulates hosts without a mesh) and works on one flat
buffer, so that every exchange is one message per stage. Trees are fused and split by
`comm.averaging`. Bytes are stated per device; `comm.accounting` counts them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import Axis, MeshAxes, axis_size, vary
from prunex_jax.mesh.axes import is_tracked, varies

# Untyped, for what jax has renamed.
_lax: Any = jax.lax


def check_local(grads: PyTree, axes: MeshAxes) -> None:
    """Refuses gradients that `jax.grad` has already summed over a mesh axis.

    That happens when the parameters it differentiates do not vary over the axis. A
    mean on top would leave the sum as it is, so every gradient would be as many times
    too large as the axis is long, and would cross the axis twice. Where `shard_map`
    does not track types (`check_vma=False`), gradients are local and nothing is
    checked.

    Args:
      grads: Gradients inside `shard_map`.
      axes: Mesh axes over which they must be local.
    Raises:
      UserError: No leaf varies over one of the axes.
    """
    leaves = jax.tree.leaves(grads)
    for axis in axes.names:
        if not leaves or not is_tracked(axis):
            continue
        if not any(varies(leaf, axis) for leaf in leaves):
            raise UserError(
                f"gradients do not vary over mesh axis {axis!r}: jax.grad has summed "
                "them over it already; differentiate mesh.vary(params, "
                f"[{axis!r}]) instead of params"
            )


def sum_over_devices(buffer: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sums a buffer over the devices of each host.

    Collectives:
      One sum over the device axis of the whole buffer.
    """
    return buffer if axes.device is None else sum_at_once(buffer, axes.device)


def sum_over_hosts(buffer: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sums a buffer [n], per_host, over hosts; each device carries an equal slice.

    A plain sum over the host axis would send the whole buffer once per device. Here
    every byte crosses the host link once, and every network port of a host works.

    Collectives:
      With P devices per host and m = ceil(n / P): a sum over the host axis of m
      elements, then a gather over the device axis of m elements from each device. With
      one host, nothing that moves.
    """
    if axes.host is None:
        return buffer
    if _is_whole(buffer, axes):
        return _settle(sum_at_once(buffer, axes.host), axes.device)
    total = sum_at_once(share_of(buffer, axes.device), axes.host)
    return join_shares(total, axes.device)[: buffer.size]


def gather_over_hosts(buffer: jax.Array, axes: MeshAxes) -> jax.Array:
    """Collects the buffers [n], per_host, of all hosts: [hosts, n], replicated.

    Each device carries an equal slice of them.

    Collectives:
      With P devices per host, M hosts and m = ceil(n / P): a gather over the host axis
      of m elements, then one over the device axis of M * m elements from each device.
      With one host, nothing over the host axis.
    """
    if axes.host is None:
        return buffer[None]
    if _is_whole(buffer, axes):
        return _settle(collect(buffer[None], axes.host), axes.device)
    rows = collect(share_of(buffer, axes.device)[None], axes.host)
    whole = join_shares(rows[None], axes.device)  # [devices, hosts, share]
    return jnp.moveaxis(whole, 0, 1).reshape(len(rows), -1)[:, : buffer.size]


def sum_over_mesh(buffer: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sums a buffer, per_device, over all devices of all hosts, hierarchically.

    Collectives:
      With P devices per host and m = ceil(n / P): a scattered sum over the device axis
      of P * m elements, a sum over the host axis of m elements, a gather over the
      device axis of m elements from each device. With P = 1, only the sum over the
      host axis.
    """
    num_devices = axis_size(axes.device)
    if num_devices == 1:
        summed = sum_over_devices(buffer, axes)
        return sum_over_hosts(summed, MeshAxes(axes.host, None))
    own = scatter_sum(_pad_to_multiple(buffer, num_devices), axes.device)
    if axes.host is not None:
        own = sum_at_once(own, axes.host)
    return join_shares(own, axes.device)[: buffer.size]


def sum_at_once(buffer: jax.Array, axis: Axis) -> jax.Array:
    """Sums a buffer over an axis, or several as one, in one operation.

    Collectives:
      One sum over `axis` of the whole buffer.
    """
    return jax.lax.psum(vary(buffer, _as_tuple(axis)), axis)


def scatter_sum(buffer: jax.Array, device_axis: str | None, dim: int = 0) -> jax.Array:
    """Sums an array over the devices of a host; each keeps its share along one axis.

    The length of that axis is a multiple of the devices; `join_shares` puts shares
    together.

    Collectives:
      A scattered sum over `device_axis` of all elements; with one device, nothing
      that moves. On CPU with several processes an exchange of as many, which sends
      the same bytes.
    """
    if device_axis is None:
        return buffer
    num_devices = axis_size(device_axis)
    if num_devices == 1:
        return sum_at_once(buffer, device_axis)
    if _is_summed_by_gloo():
        parts = exchange(jnp.moveaxis(buffer, dim, 0), device_axis)
        rows = parts.reshape(num_devices, -1, *parts.shape[1:])
        return jnp.moveaxis(jnp.sum(rows, axis=0, dtype=buffer.dtype), 0, dim)
    varying = vary(buffer, (device_axis,))
    return jax.lax.psum_scatter(varying, device_axis, scatter_dimension=dim, tiled=True)


def exchange(rows: jax.Array, axis: Axis) -> jax.Array:
    """Sends part i of [size * n, ...] to position i, and returns what each sent here.

    Collectives:
      One exchange over `axis`, or several as one, of all rows.
    """
    varying = vary(rows, _as_tuple(axis))
    return jax.lax.all_to_all(varying, axis, 0, 0, tiled=True)


def collect(rows: jax.Array, axis: Axis) -> jax.Array:
    """Puts the rows of all positions one after the other, by a gather over `axis`."""
    return _gather(vary(rows, _as_tuple(axis)), axis)


def shift(buffer: jax.Array, axis: str) -> jax.Array:
    """Sends a buffer to the next position of a ring; takes that of the one before.

    Collectives:
      One shift over `axis` of the whole buffer.
    """
    size = axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.lax.ppermute(vary(buffer, (axis,)), axis, ring)


def share_of(buffer: jax.Array, device_axis: str | None) -> jax.Array:
    """Takes the slice of a host's buffer that this device carries; moves nothing.

    With P devices per host, that is ceil(n / P) elements, padded with zeros.
    """
    num_devices = axis_size(device_axis)
    if device_axis is None or num_devices == 1:
        return buffer
    padded = _pad_to_multiple(buffer, num_devices)
    share = padded.size // num_devices
    start = jax.lax.axis_index(device_axis) * share
    return jax.lax.dynamic_slice_in_dim(vary(padded, (device_axis,)), start, share)


def join_shares(share: jax.Array, device_axis: str | None, dim: int = 0) -> jax.Array:
    """Puts the shares of all devices of a host together; inverse of `share_of`.

    Collectives:
      A gather over `device_axis`; with one device, nothing that moves.
    """
    if axis_size(device_axis) == 1:
        return _settle(share, device_axis)
    return _gather(share, device_axis, dim)  # type: ignore[arg-type]  # not None


def _is_whole(buffer: jax.Array, axes: MeshAxes) -> bool:
    """Whether one device carries all of a host's buffer, or nothing has to move."""
    if axis_size(axes.device) == 1:
        return True
    assert axes.device is not None, "it has several positions"
    return axis_size(axes.host) == 1 and not varies(buffer, axes.device)


# Gloo's scattered sum may overwrite what it has not sent yet, so that the first device
# of a host gets wrong numbers: github.com/jax-ml/jax/issues/40830 (seen in jax 0.10).
def _is_summed_by_gloo() -> bool:
    """Whether devices of a process add up by Gloo, as on CPU with several processes."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def _as_tuple(axis: Axis) -> tuple[str, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def _gather(share: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    if not is_tracked(_as_tuple(axis)[0]):
        return jax.lax.all_gather(share, axis, axis=dim, tiled=True)
    return _lax.all_gather(share, axis, axis=dim, tiled=True, to="invarying")


def _settle(value: jax.Array, device_axis: str | None) -> jax.Array:
    """Types a value as equal along an axis of size one, where it trivially is."""
    if device_axis is None or not varies(value, device_axis):
        return value
    return jax.lax.psum(value, device_axis)


def _pad_to_multiple(buffer: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(buffer, (0, -buffer.size % multiple))
