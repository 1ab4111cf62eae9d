"""The training state; `mesh.placement` explains where its parts live."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree

# The first bad step of a device that has seen none.
NEVER = jnp.iinfo(jnp.int32).max
FIRST_BAD_STEP = "first_bad_step"


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


def zero_totals(counted: Iterable[str]) -> Totals:
    """Totals of a device that has seen nothing.

    Args:
      counted: Names of the sums beside `loss`.
    """
    nothing = {name: jnp.zeros((), jnp.float32) for name in ("loss", *counted)}
    return {**nothing, FIRST_BAD_STEP: jnp.asarray(NEVER, jnp.int32)}
