"""The training state; `mesh.placement` explains where its parts live."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree

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
