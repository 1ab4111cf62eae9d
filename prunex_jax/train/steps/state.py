"""What checkpoints hold: the training state, and the run's own teacher.

`mesh.placement` explains where the parts of the state live.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import enter, leave, position, specs_of

# The first bad step of a device that has seen none.
NEVER = jnp.iinfo(jnp.int32).max
FIRST_BAD_STEP = "first_bad_step"
# Tells the keys of rounding from those of a step, which follow from its number.
_ROUNDING = 2**32 - 1


# What a device has seen since the last report, per_device: float32[] sums of the
# task's, `loss` among them; and `first_bad_step`, int32[], whose loss was not finite.
Totals = dict[str, jax.Array]


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


class NetworkMean(NamedTuple):
    """The mean of some networks of a run; replicated, saved with its checkpoints."""

    params: PyTree
    statistics: PyTree  # Zero until the mean is complete.
    num_networks: jax.Array  # float32[]: in the mean so far.


class SavedRun(NamedTuple):
    """What a checkpoint holds: the training state, and the run's own teacher.

    The first fields are those of `TrainState`, so that its parts keep their paths.
    """

    step: jax.Array
    params: PyTree
    statistics: PyTree
    opt_state: PyTree
    totals: Totals
    own_teacher: NetworkMean | None = None

    @property
    def state(self) -> TrainState:
        """The training state."""
        parts: tuple[Any, ...] = self
        return TrainState(*parts[: len(TrainState._fields)])


def whole_tree(params: PyTree, statistics: PyTree) -> dict[str, PyTree]:
    """Parameters and statistics in one tree, whose paths are those of exports.

    Example:
      >>> whole_tree({'a': 1.0}, {})
      {'params': {'a': 1.0}, 'statistics': {}}
    """
    return {"params": params, "statistics": statistics}


def zero_totals(counted: Iterable[str]) -> Totals:
    """Totals of a device that has seen nothing."""
    nothing = {name: jnp.zeros((), jnp.float32) for name in ("loss", *counted)}
    return {**nothing, FIRST_BAD_STEP: jnp.asarray(NEVER, jnp.int32)}


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a training state lies in memory between programs.

    Programs work in float32, whatever parameters are stored in. Rounded to nearest,
    most updates of bfloat16 would be lost; stochastically, they are there on average.
    """

    placements: TrainState  # Where every part lives; a prefix of the state.
    param_dtype: str = "float32"  # What parameters are stored in.
    seed: int = 0  # Of the rounding.

    @property
    def is_narrow(self) -> bool:
        """Whether parameters are stored in another type than programs work in."""
        return self.param_dtype != "float32"

    def read(self, state: TrainState) -> TrainState:
        """The values of one device, from blocks as `shard_map` gives them."""
        found: TrainState = enter(self.placements, state)
        return found._replace(params=self._wide(found.params))

    def read_params(self, params: PyTree) -> PyTree:
        """The same of parameters alone."""
        return self._wide(enter(self.placements.params, params))

    def write(self, state: TrainState) -> TrainState:
        """Puts values back that have not changed, or that are equal everywhere."""
        if not self.is_narrow:
            return self._left(state)
        narrow = jax.tree.map(lambda x: x.astype(self.param_dtype), state.params)
        return self._left(state._replace(params=narrow))

    def write_changed(self, state: TrainState, is_round: bool = False) -> TrainState:
        """Puts values back with parameters that a step, or a round, has changed.

        They are rounded alike wherever they are the same, and otherwise in every copy,
        or slice, in a way of its own. The draw follows from the seed and the step.
        """
        if not self.is_narrow:
            return self._left(state)
        key = jax.random.key(self.seed)
        for number in (_ROUNDING, state.step, int(is_round)):
            key = jax.random.fold_in(key, number)
        for axis in specs_of(self.placements.params):
            key = jax.random.fold_in(key, position(axis))
        leaves, structure = jax.tree.flatten(state.params)
        keys = jax.random.split(key, len(leaves))
        rounded = [
            rounded_to_bfloat16(leaf, own)
            for leaf, own in zip(leaves, keys, strict=True)
        ]
        return self._left(state._replace(params=jax.tree.unflatten(structure, rounded)))

    def _left(self, state: TrainState) -> TrainState:
        found: TrainState = leave(self.placements, state)
        return found

    def _wide(self, params: PyTree) -> PyTree:
        if not self.is_narrow:
            return params
        return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def rounded_to_bfloat16(values: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 up or down, so that the mean is what was given.

    What bfloat16 has stays, as does what is not finite.

    Example:
      >>> values = jnp.full(1000, 1 + 2**-9)  # a quarter of the way to the next
      >>> found = rounded_to_bfloat16(values, jax.random.key(0))
      >>> sorted(set(found.tolist()))
      [1.0, 1.0078125]
      >>> bool(abs(found.mean(dtype=jnp.float32) - values[0]) < 2**-11)
      True
    """
    # The upper half of the bits is a bfloat16: noise carries into it as often as the
    # lower half is large.
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    found: Any = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(values), found, values).astype(jnp.bfloat16)
