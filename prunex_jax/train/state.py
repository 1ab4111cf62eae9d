"""The training state, and where each part of it lives on the mesh.

Placement is a word and a leading axis: `replicated` arrays have none, `per_host` arrays
lead with [hosts], `per_device` arrays with [hosts, devices]. Inside `shard_map` those
axes have length one and are taken off by `enter`, put back by `leave`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import vary
from prunex_jax.mesh import DEVICE_AXIS, HOST_AXIS

Placement = Literal["replicated", "per_host", "per_device"]

_SPECS: dict[Placement, jax.P] = {
    "replicated": jax.P(),
    "per_host": jax.P(HOST_AXIS),
    "per_device": jax.P(HOST_AXIS, DEVICE_AXIS),
}
_LEADING: dict[Placement, int] = {"replicated": 0, "per_host": 1, "per_device": 2}
# The first bad step of a device that has seen none.
NEVER = jnp.iinfo(jnp.int32).max


class Totals(NamedTuple):
    """What a device has seen since the last report, per_device."""

    loss: jax.Array  # float32[]: sum of losses over examples
    correct: jax.Array  # float32[]
    examples: jax.Array  # float32[]
    first_bad_step: jax.Array  # int32[]: first step whose loss was not finite


class TrainState(NamedTuple):
    """Everything a run needs to go on as if it had never stopped.

    Data order, augmentation and initialisation are functions of the seed and the step,
    so there is no other position and no random key to keep.
    """

    step: jax.Array  # int32[], replicated: steps done
    params: PyTree  # placed by the method
    statistics: PyTree  # running statistics of norms, per_device
    opt_state: PyTree  # placed by the method
    totals: Totals  # per_device


def zero_totals() -> Totals:
    """Totals of a device that has seen nothing."""
    nothing = jnp.zeros((), jnp.float32)
    return Totals(nothing, nothing, nothing, jnp.asarray(NEVER, jnp.int32))


def specs_of(placements: PyTree) -> PyTree:
    """Turns a tree of placements into partition specs, for `shard_map`."""
    return jax.tree.map(_SPECS.__getitem__, placements)


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


def settle(placements: PyTree, tree: PyTree) -> PyTree:
    """Marks freshly made values as varying where their placement says so.

    Args:
      placements: Placement of `tree`, or of whole parts of it.
      tree: Values with placement axes, inside `shard_map`.
    Returns:
      The same values, typed as their placement asks.
    """
    return jax.tree.map(
        lambda p, part: vary(part, tuple(specs_of(p))), placements, tree
    )


def _map_parts(fn: Any, placements: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda placement, part: jax.tree.map(
            lambda leaf: fn(_LEADING[placement], leaf), part
        ),
        placements,
        tree,
    )
