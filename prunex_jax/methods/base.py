"""The one interface through which the trainer meets every method."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import FLOAT32, Collective, Wire
from prunex_jax.methods.transforms import RoundKind

# (params, opt_state, keep_counts, kind) -> (params, opt_state)
Exchange = Callable[
    [PyTree, PyTree, Mapping[str, int], RoundKind], tuple[PyTree, PyTree]
]

# (loss_fn, params, opt_state, parts of batches) -> (params, opt_state), where
# loss_fn(params, part, temperature) is the mean loss of the images of one device, with
# logits divided by the temperature.
Prepare = Callable[
    [Callable[[PyTree, Any, float], jax.Array], PyTree, PyTree, Sequence[Any]],
    tuple[PyTree, PyTree],
]


def no_options(step: int) -> dict[str, Any]:
    """The `step_options` of a method whose steps are all the same program."""
    del step
    return {}


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
      health: opt_state -> named scalars for the log, or dicts of them by channel group;
        placed as params.
      step_formula: (mesh shape, and what `step_options` gave) -> what one step must
        send; without options, in the steady state.
      exchange_formula: (mesh shape, keep_counts, kind) -> what one exchange must send.
      payload_elements: keep_counts -> elements of the array that an exchange (or step)
        averages over hosts.
      inner_state: opt_state -> the state of the inner optimizer, placed as params.
      with_inner: (opt_state, such a state) -> opt_state with it.
      wire: How those elements cross the host axis.
      position_bytes: Bytes that say where those elements belong, if they are few of
        many.
      prunes: Whether the densities of the sparsity schedule are for its exchanges.
      step_options: Number of a step, from 0 -> static, hashable keyword arguments of
        the transform's update in that step. Every new combination compiles the step
        anew, so there should be few. Without them, update is in its steady state.
      prepare: Run once before the first step of the method, or None.
      prepare_batches: Batches of the mesh that it looks at.
      is_ready: opt_state of the whole mesh -> bool[]: whether steps may be as
        `step_options` says; None if always. Once ready, it stays so.
      unready_options: What takes the place of `step_options` before.
    """

    name: str
    params_placement: str
    opt_placement: Any
    transform: optax.GradientTransformationExtraArgs
    sync_period: int
    exchange: Exchange | None
    network: Callable[[PyTree, PyTree], PyTree]
    masks: Callable[[PyTree], dict[str, jax.Array]]
    health: Callable[[PyTree], dict[str, Any]]
    step_formula: Callable[..., list[Collective]]
    exchange_formula: Callable[
        [Mapping[str, int], Mapping[str, int], RoundKind], list[Collective]
    ]
    payload_elements: Callable[[Mapping[str, int]], int]
    inner_state: Callable[[PyTree], PyTree]
    with_inner: Callable[[PyTree, PyTree], PyTree]
    wire: Wire = FLOAT32
    position_bytes: int = 0
    prunes: bool = False
    step_options: Callable[[int], dict[str, Any]] = no_options
    prepare: Prepare | None = None
    prepare_batches: int = 1
    is_ready: Callable[[PyTree], jax.Array] | None = None
    unready_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def payload_bytes(self, keep_counts: Mapping[str, int]) -> int:
        """Bytes of what an exchange (or step) averages over hosts, with positions."""
        values = self.wire.payload_bytes(self.payload_elements(keep_counts))
        return values + self.position_bytes
