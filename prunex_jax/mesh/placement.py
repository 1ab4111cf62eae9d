"""Where the parts of a tree live on a mesh: a word for each, and a leading axis.

`replicated` arrays have no leading axis, `per_host` arrays lead with [hosts],
`per_device` arrays with [hosts, devices]. Of arrays in slices every device of a host
has one: `slices` lead with [devices] and are the same on all hosts, `slices_per_host`
with [hosts, devices]. Inside `shard_map` those axes have length one and are taken off
by `enter`, put back by `leave`.
"""

import itertools
from collections.abc import Callable
from typing import Literal

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh.axes import MeshAxes, vary

Placement = Literal["replicated", "per_host", "per_device", "slices", "slices_per_host"]

_TRAINER = MeshAxes()
# Leading axes of each placement: of hosts, and of devices.
_LEADING: dict[Placement, tuple[bool, bool]] = {
    "replicated": (False, False),
    "per_host": (True, False),
    "per_device": (True, True),
    "slices": (False, True),
    "slices_per_host": (True, True),
}
# Where an array is that lies in slices, by where it would be as a whole.
IN_SLICES: dict[Placement, Placement] = {
    "replicated": "slices",
    "per_host": "slices_per_host",
}


def specs_of(placements: PyTree, axes: MeshAxes = _TRAINER) -> PyTree:
    """Turns a tree of placements into partition specs, for `shard_map`.

    Args:
      placements: A tree of `Placement`, or a single one.
      axes: Names of the caller's mesh axes. A name that is None leaves its leading
        axis, of length one, whole.
    Example:
      >>> axes = MeshAxes('pod', 'chip')
      >>> specs = specs_of({'z': 'replicated', 'u': 'per_device'}, axes)
      >>> specs == {'u': jax.P('pod', 'chip'), 'z': jax.P()}
      True
    """
    names = (axes.host, axes.device)

    def spec(placement: Placement) -> jax.P:
        return jax.P(*itertools.compress(names, _LEADING[placement]))

    return jax.tree.map(spec, placements)


def enter(placements: PyTree, tree: PyTree) -> PyTree:
    """Takes the placement axes off the blocks of one device.

    Args:
      placements: Placement of `tree`, or of whole parts of it (a prefix).
      tree: Blocks as `shard_map` gives them.
    Returns:
      The values of this device.
    """
    return _map_parts(lambda n, leaf: leaf.reshape(leaf.shape[n:]), placements, tree)


def leave(placements: PyTree, tree: PyTree) -> PyTree:
    """Puts the placement axes back; inverse of `enter`."""
    return _map_parts(
        lambda n, leaf: leaf.reshape((1,) * n + leaf.shape), placements, tree
    )


def settle(placements: PyTree, tree: PyTree, axes: MeshAxes = _TRAINER) -> PyTree:
    """Marks freshly made values as varying where their placement says so.

    Args:
      placements: Placement of `tree`, or of whole parts of it.
      tree: Values with placement axes, inside `shard_map`.
      axes: Names of the caller's mesh axes.
    Returns:
      The same values, typed as their placement asks.
    """
    return jax.tree.map(lambda p, part: vary(part, specs_of(p, axes)), placements, tree)


def _map_parts(
    fn: Callable[[int, jax.Array], jax.Array], placements: PyTree, tree: PyTree
) -> PyTree:
    return jax.tree.map(
        lambda placement, part: jax.tree.map(
            lambda leaf: fn(sum(_LEADING[placement]), leaf), part
        ),
        placements,
        tree,
    )
