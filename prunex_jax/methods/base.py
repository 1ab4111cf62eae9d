"""The one interface through which the trainer meets every method."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prunex_jax.comm import Collective
from prunex_jax.optim import RoundKind
from prunex_jax.trees import PyTree

# (params, opt_state, keep_counts, kind) -> (params, opt_state)
Exchange = Callable[
    [PyTree, PyTree, Mapping[str, int], RoundKind], tuple[PyTree, PyTree]
]


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A recipe for training over a mesh: what is sent, when, and what it stands for.

    All functions run inside `shard_map`, on the values of one device.

    Attributes:
      name: Key in `methods.METHODS`.
      params_placement: Where the trained parameters live (`state.Placement`).
      opt_placement: The same for the optimizer state, part by part.
      transform: init and the update of every step; may communicate.
      sync_period: Steps between exchanges; 0 if there are none.
      exchange: What happens every `sync_period` steps, or None.
      network: (params, opt_state) -> the parameters that the method stands for,
        replicated: what is evaluated, shrunk and kept.
      masks: opt_state -> channel masks, replicated; {} if the method prunes nothing.
      health: opt_state -> named scalars for the log, placed as params.
      step_formula: mesh shape -> what one step must send.
      exchange_formula: (mesh shape, keep_counts, kind) -> what one exchange must send.
      payload_elements: keep_counts -> elements of the array that an exchange (or step)
        averages over hosts.
      wire_dtype: Type of those elements on the host axis.
    """

    name: str
    params_placement: str
    opt_placement: Any
    transform: optax.GradientTransformationExtraArgs
    sync_period: int
    exchange: Exchange | None
    network: Callable[[PyTree, PyTree], PyTree]
    masks: Callable[[PyTree], dict[str, jax.Array]]
    health: Callable[[PyTree], dict[str, jax.Array]]
    step_formula: Callable[[Mapping[str, int]], list[Collective]]
    exchange_formula: Callable[
        [Mapping[str, int], Mapping[str, int], RoundKind], list[Collective]
    ]
    payload_elements: Callable[[Mapping[str, int]], int]
    wire_dtype: str = "float32"

    def payload_bytes(self, keep_counts: Mapping[str, int]) -> int:
        """Bytes of the array that an exchange (or step) averages over hosts."""
        return self.payload_elements(keep_counts) * jnp.dtype(self.wire_dtype).itemsize
