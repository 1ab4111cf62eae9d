"""Means of whole trees over the mesh, each as one fused buffer or a few.

Sits on `comm.collectives`; knows nothing of channels: a compact tree is a tree.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree, flatten_by_path, in_order
from prunex_jax.comm import collectives, wires
from prunex_jax.comm.buffers import in_buffers, in_one_buffer
from prunex_jax.comm.wires import FLOAT32, Wire, refuse_biased
from prunex_jax.mesh import Axis, MeshAxes, axis_size, position, vary

# Elements that devices of a host sum in one message, or more: enough for full speed.
_SUMMED_AT_ONCE = 2**22


def mean_over_devices(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Averages a tree over the devices of each host.

    Args:
      tree: Floating leaves, per_device.
      axes: Mesh axes.
    Returns:
      The mean, per_host.
    Collectives:
      Sums over the device axis of all leaves, in one buffer or in several of at least
      16 MiB, of which the first may travel while gradients of other leaves are
      computed; none that moves anything if there is one device.
    """
    num_devices = axis_size(axes.device)
    if num_devices == 1:  # fusing would only copy
        return jax.tree.map(lambda x: collectives.sum_over_devices(x, axes), tree)
    leaves, structure = jax.tree.flatten(tree)
    means = list(leaves)
    for group in _neighbours(tree, _SUMMED_AT_ONCE):
        found = in_one_buffer(
            [leaves[i] for i in group],
            lambda x: collectives.sum_over_devices(x / num_devices, axes),
        )
        for i, mean in zip(group, found, strict=True):
            means[i] = mean
    return jax.tree.unflatten(structure, means)


def _neighbours(tree: PyTree, at_least: int) -> Iterator[list[int]]:
    """Splits the leaves of a tree into groups of so many elements, by their places.

    Numbered layers follow each other: gradients of a group are known at about one time.
    """
    paths = list(flatten_by_path(tree))
    sizes = [jnp.size(leaf) for leaf in jax.tree.leaves(tree)]
    group: list[int] = []
    size = 0
    for i in sorted(range(len(paths)), key=lambda i: in_order(paths[i])):
        group.append(i)
        size += sizes[i]
        if size >= at_least:
            yield group
            group, size = [], 0
    if group:
        yield group


def mean_over_hosts(
    tree: PyTree,
    axes: MeshAxes,
    wire: Wire = FLOAT32,
    key: jax.Array | None = None,
) -> PyTree:
    """Averages a tree over hosts; each device carries an equal slice of it.

    Args:
      tree: Floating leaves, per_host.
      axes: Mesh axes; without a host axis, the tree stays as it is.
      wire: How values cross the host axis. Sums are always taken in float32. With one
        host, nothing crosses and nothing is rounded. The bucket size changes no result.
      key: Random key, the same everywhere and another one in every call: narrow formats
        round stochastically and the mean is unbiased, so nothing has to be remembered
        between calls. None rounds to nearest, which is biased; `mean_with_error` says
        what that loses.
    Returns:
      The mean, replicated, in the types of the tree. The same bits on every host,
      whatever the number of devices and of buckets.
    Raises:
      UserError: int2, which always rounds to nearest.
    Collectives:
      float32: as `collectives.sum_over_hosts` for the number of elements of every
      buffer. Otherwise, with M hosts, P devices per host and
      b = ceil(n / (128 P M)) blocks: an exchange over the host axis of M * b messages
      of a block, a gather over it of b messages from each host, a gather over the
      device axis of M * b messages from each device. 2 (M - 1) / M of the bytes of the
      narrow tree per host.
    """
    refuse_biased(wire, "this mean")

    def mean(buffer: jax.Array, offset: int) -> jax.Array:
        return _host_mean(buffer, offset, axes, wire, key)[0]

    return in_buffers(tree, mean, wire.bucket_elements, wire.in_turn)


def mean_with_error(
    tree: PyTree, axes: MeshAxes, wire: Wire = FLOAT32
) -> tuple[PyTree, PyTree]:
    """Averages a tree over hosts, and says what this host must send later.

    Narrow formats round to nearest, twice: what every host sends, and the mean. What is
    lost of the mean, the host that took it adds to what it has lost itself. So nothing
    is lost for ever if every host adds its error to the next tree that it sends: up to
    float32, the mean over hosts of the tree is the mean plus that of the errors.

    Args:
      tree: Floating leaves, per_host.
      axes: Mesh axes; without a host axis, the tree stays as it is.
      wire: As in `mean_over_hosts`, and int2.
    Returns:
      The mean, replicated, and the error, per_host, in the types of the tree. Where
      nothing is rounded, the error is zero.
    Collectives:
      As `mean_over_hosts`; with a narrow wire, for every buffer also a gather over the
      device axis of 128 (int2: 512) M b float32 from each device: the errors.
    """

    def mean_and_error(buffer: jax.Array, offset: int) -> tuple[jax.Array, jax.Array]:
        mean, lost = _host_mean(buffer, offset, axes, wire, None)
        if lost is None:
            return mean, jnp.zeros_like(buffer)
        lost = collectives.join_shares(lost, axes.device)[: buffer.size]
        return mean, lost.astype(buffer.dtype)

    if not jax.tree.leaves(tree):
        return tree, tree
    found, error = in_buffers(tree, mean_and_error, wire.bucket_elements, wire.in_turn)
    return found, vary(error, (axes.host,))


def mean_over_mesh(
    tree: PyTree,
    axes: MeshAxes,
    wire: Wire = FLOAT32,
    key: jax.Array | None = None,
) -> PyTree:
    """Averages a tree over all devices of all hosts, hierarchically.

    Args:
      tree: Floating leaves, per_device.
      axes: Mesh axes.
      wire: How values cross the host axis, as in `mean_over_hosts`; between the devices
        of a host they are summed as they are.
      key: As in `mean_over_hosts`.
    Returns:
      The mean, replicated.
    Raises:
      UserError: As `mean_over_hosts`.
    Collectives:
      float32: as `collectives.sum_over_mesh` for the number of elements of every
      buffer. Otherwise a scattered sum over the device axis of 128 P M b elements, then
      as `mean_over_hosts`.
    """
    refuse_biased(wire, "this mean")
    num_hosts, num_devices = axis_size(axes.host), axis_size(axes.device)
    count = num_hosts * num_devices
    if count == 1:  # fusing would only copy
        return jax.tree.map(lambda x: collectives.sum_over_mesh(x, axes), tree)

    def mean(buffer: jax.Array, offset: int) -> jax.Array:
        if axes.host is None or num_hosts == 1 or not wire.is_narrow:
            return collectives.sum_over_mesh(buffer / count, axes)
        whole = _in_blocks(buffer / num_devices, count, wire)
        share = collectives.scatter_sum(whole, axes.device)
        over = (axes.host, axes.device)
        return _narrow_mean(share, over, wire, key, offset, buffer)[0]

    return in_buffers(tree, mean, wire.bucket_elements, wire.in_turn)


def flat_mean_over_mesh(
    tree: PyTree,
    axes: MeshAxes,
    wire: Wire = FLOAT32,
    key: jax.Array | None = None,
) -> PyTree:
    """Averages a tree over all devices at once, as if all links were the same.

    What data parallelism does that knows no hosts. The bytes that are counted are those
    of one ring through all devices; a backend that finds out which links are slow may
    do better. Narrow formats save less than between hosts: every device sends its own
    numbers, so P (M - 1) / M + 1 times the bytes of the narrow tree leave a host.

    Args:
      tree: Floating leaves, per_device.
      axes: Mesh axes.
      wire: As in `mean_over_hosts`, here also between the devices of a host; with one
        host, nothing is rounded.
      key: As in `mean_over_hosts`.
    Returns:
      The mean, replicated.
    Raises:
      UserError: int2.
    Collectives:
      float32, or one host: one sum over both axes of every buffer. Otherwise an
      exchange and a gather over both, as `mean_over_hosts` with P M hosts.
    """
    refuse_biased(wire, "this mean")
    if not axes.names:
        return tree
    count = axis_size(axes.names)
    is_exact = axis_size(axes.host) == 1 or not wire.is_narrow

    def mean(buffer: jax.Array, offset: int) -> jax.Array:
        if is_exact:
            return collectives.sum_at_once(buffer / count, axes.names)
        share = _in_blocks(buffer, count, wire)
        return _narrow_mean(share, (axes.names, None), wire, key, offset, buffer)[0]

    return in_buffers(tree, mean, wire.bucket_elements, wire.in_turn)


def _host_mean(
    buffer: jax.Array,
    offset: int,
    axes: MeshAxes,
    wire: Wire,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Mean over hosts, and what this device has lost of its share; None if nothing."""
    num_hosts = axis_size(axes.host)
    if axes.host is None or num_hosts == 1:
        return collectives.sum_over_hosts(buffer, axes), None
    if not wire.is_narrow:
        wide = buffer.astype(jnp.promote_types(buffer.dtype, wire.dtype))
        sent = (wide / num_hosts).astype(wire.dtype)
        return collectives.sum_over_hosts(sent, axes).astype(buffer.dtype), None
    whole = _in_blocks(buffer, num_hosts * axis_size(axes.device), wire)
    share = collectives.share_of(whole, axes.device)
    over = (axes.host, axes.device)
    return _narrow_mean(share, over, wire, key, offset, buffer)


def _in_blocks(buffer: jax.Array, num_parts: int, wire: Wire) -> jax.Array:
    """The buffer in float32, in whole blocks for every part of it."""
    multiple = num_parts * wire.format.block
    return jnp.pad(buffer.astype(jnp.float32), (0, -buffer.size % multiple))


def _narrow_mean(
    share: jax.Array,
    over: tuple[Axis, str | None],
    wire: Wire,
    key: jax.Array | None,
    offset: int,
    buffer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Mean over an axis of what every device of another one has a share of.

    It is like `buffer`; what this device has lost of its share comes with it.
    """
    axis, device_axis = over
    first_block = (offset + position(device_axis) * share.size) // wire.format.block
    own, lost = wires.mean_of_shares(share, axis, first_block, wire, key)
    whole = wire.format.decode(collectives.join_shares(own, device_axis))
    return whole.ravel()[: buffer.size].astype(buffer.dtype), lost


def mean_of_entries(
    positions: jax.Array,
    values: jax.Array,
    size: int,
    axes: MeshAxes,
    wire: Wire = FLOAT32,
) -> tuple[jax.Array, jax.Array]:
    """Averages buffers over hosts that are zero but for few entries.

    Where hosts choose entries of their own, their messages cannot be summed on the way:
    they are gathered, and every device adds up all of them. So what a host sends grows
    with the number of hosts M: with entries of float32 it is less than a dense sum of
    the whole below a density of 1 / M only.

    Args:
      positions: int32[k], per_host, without repetition.
      values: float32[k], per_host.
      size: Elements of the buffers, n.
      axes: Mesh axes.
      wire: How the values cross the host axis, always in one message; narrow formats
        round to nearest. Positions are int32 always.
    Returns:
      The mean, float32[n], replicated; and what this host has put into it, float32[k],
      per_host: the values after rounding, so that values less that is still to be sent.
    Collectives:
      As `collectives.gather_over_hosts` for k values, or the blocks they become, and
      for k positions.
    """
    count = values.size
    message = wires.write(values, wire)
    sent = wires.read(message, count, wire)
    messages = collectives.gather_over_hosts(message, axes)
    places = collectives.gather_over_hosts(positions, axes)
    num_hosts = len(places)
    rows = jax.vmap(lambda row: wires.read(row, count, wire))(messages)
    # Host after host: no position comes twice in one, so the order of every sum is the
    # same on all devices, whose copies would drift apart else.
    total = jnp.zeros(size, jnp.float32)
    for at, row in zip(places, rows, strict=True):
        total = total.at[at].add(row / num_hosts, unique_indices=True)
    return total, sent


def min_over_mesh(value: jax.Array, axes: MeshAxes) -> jax.Array:
    """Smallest value over all devices of all hosts; for single numbers.

    Args:
      value: A scalar, per_device.
      axes: Mesh axes.
    Returns:
      The minimum, replicated.
    Collectives:
      As `collectives.sum_over_mesh` for one number per device of a host.
    """
    # Each device writes its own entry of a vector of zeros, so that the sum gathers.
    num_hosts, num_devices = axis_size(axes.host), axis_size(axes.device)
    own = position(axes.host) * num_devices
    own = own + position(axes.device)
    entries = jnp.zeros(num_hosts * num_devices, value.dtype).at[own].set(value)
    return jnp.min(collectives.sum_over_mesh(entries, axes))


def sum_over_hosts(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Adds up a tree over hosts, in the widest of its types.

    Args:
      tree: per_host.
      axes: Mesh axes; without a host axis, the tree stays as it is.
    Returns:
      The sum, replicated, in the types of the tree.
    Collectives:
      As `collectives.sum_over_hosts` for the number of elements of the tree.
    """
    return in_one_buffer(tree, lambda x: collectives.sum_over_hosts(x, axes))


def take_from_host(index: int, tree: PyTree, axes: MeshAxes) -> PyTree:
    """Gives all hosts what one of them has.

    Args:
      index: Position of that host.
      tree: per_host.
      axes: Mesh axes.
    Returns:
      The tree of that host, replicated.
    Collectives:
      As `sum_over_hosts`, to which the others add zeros.
    """
    is_there = position(axes.host) == index
    own = jax.tree.map(lambda x: jnp.where(is_there, x, jnp.zeros_like(x)), tree)
    return sum_over_hosts(own, axes)


def sum_over_mesh(tree: PyTree, axes: MeshAxes) -> PyTree:
    """Adds up a tree over all devices of all hosts, in the widest of its types.

    Args:
      tree: per_device.
      axes: Mesh axes.
    Returns:
      The sum, replicated, in the types of the tree.
    Collectives:
      As `collectives.sum_over_mesh` for the number of elements of the tree.
    """
    return in_one_buffer(tree, lambda x: collectives.sum_over_mesh(x, axes))
