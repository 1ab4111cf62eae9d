"""Names of the mesh axes, and what a value inside `shard_map` says about them."""

import dataclasses
from collections.abc import Iterable

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import varying

HOST_AXIS = "host"
DEVICE_AXIS = "device"
# A mesh axis, or several that are taken as one, slow axis first.
Axis = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The axes over which hosts and the devices of a host lie.

    The default instance names the axes of the trainer's mesh. In your own `shard_map`,
    or `vmap` with axis names, give your own names.

    Attributes:
      host: Axis of the hosts, which the slow links join; None is a single host.
      device: Axis of the devices of a host; None is a single device.
      slices: Axis of devices that have a slice of every array each, and take it for the
        array; `device` is None then. Sums over a whole array are sums over this axis.
    Example:
      >>> MeshAxes('pod', 'chip').names, MeshAxes('pod', None).names
      (('pod', 'chip'), ('pod',))
    """

    host: str | None = HOST_AXIS
    device: str | None = DEVICE_AXIS
    slices: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The axes over which values are averaged, slow axis first."""
        return tuple(name for name in (self.host, self.device) if name is not None)

    @property
    def whole(self) -> "MeshAxes":
        """The axes of the same mesh for what every device of a host has whole."""
        return MeshAxes(self.host, self.slices) if self.slices else self


# No mesh: one device does everything.
ALONE = MeshAxes(None, None)


def axis_size(axis: Axis | None) -> int:
    """Number of positions along a mesh axis; 1 for None."""
    return 1 if axis is None else jax.lax.axis_size(axis)


def position(axis: Axis | None) -> jax.Array | int:
    """Position of this device along a mesh axis; 0 for None."""
    return 0 if axis is None else jax.lax.axis_index(axis)


def vary(tree: PyTree, names: Iterable[str | None]) -> PyTree:
    """Marks values as differing along mesh axes, without moving anything.

    `jax.grad` with respect to a value that does not vary over an axis contains a sum
    over that axis. Parameters pass through here first, so that gradients stay local
    and every sum is one that the package asked for.

    Args:
      tree: Any values; leaves that vary already pass through, as does everything where
        `shard_map` does not track types (`check_vma=False`) or there is none.
      names: Names of mesh axes, such as `MeshAxes.names`; None is skipped.
    Returns:
      The same values, typed as varying over the axes.
    """
    tracked = [name for name in names if name and is_tracked(name)]
    return jax.tree.map(lambda leaf: varying.cast(leaf, tracked), tree)


def vary_as(tree: PyTree, like: PyTree) -> PyTree:
    """Marks values as differing along the mesh axes along which others do.

    Branches of a `cond` have to agree in that, too.

    Args:
      tree: Any values.
      like: Values in the same tree.
    Returns:
      The same values, typed as varying over the axes of their counterparts as well.
    """

    def cast(leaf: jax.Array, other: jax.Array) -> jax.Array:
        return vary(leaf, varying.axes_of(jax.typeof(other)))

    return jax.tree.map(cast, tree, like)


def varies(leaf: jax.Array, name: str) -> bool:
    """Whether `shard_map` knows a value as differing along an axis."""
    return name in varying.axes_of(jax.typeof(leaf))


def is_tracked(name: str) -> bool:
    """Whether this runs inside a `shard_map` that tracks what varies over an axis."""
    try:
        return varies(jax.lax.axis_index(name), name)
    except NameError:  # no such axis here
        return False
