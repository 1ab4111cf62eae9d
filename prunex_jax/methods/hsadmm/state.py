"""The state of H-SADMM, stage by stage, and where its parts live."""

from typing import Any, NamedTuple

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import IN_SLICES, Placement
from prunex_jax.methods.hsadmm.choose import ChannelState
from prunex_jax.methods.hsadmm.move import Consensus, Residuals, RoundHealth
from prunex_jax.methods.hsadmm.round import DeviceLevel
from prunex_jax.methods.hsadmm.send import SendState


class HsadmmState(NamedTuple):
    """State of H-SADMM; parts that a form does not use are None.

    "As params" means per_host for device_level "gradient", per_device for "consensus".
    """

    num_steps: jax.Array  # int32[], replicated: local steps done
    num_rounds: jax.Array  # int32[], replicated
    inner_state: PyTree  # of the inner optimizer, as params
    channels: ChannelState  # of the choice
    sending: SendState
    consensus: Consensus  # z, and what moves it
    residuals: Residuals  # of the last round, as params
    health: RoundHealth  # of the last round, as params

    @property
    def global_consensus(self) -> PyTree:
        """z, the network that copies agree on; replicated."""
        return self.consensus.values

    @property
    def masks(self) -> dict[str, jax.Array]:
        """Channels that are left: bool[size] per group, replicated."""
        return self.channels.masks


def kept_channels(state: PyTree) -> dict[str, np.ndarray]:
    """The channels that a state has left, as `make_cut` takes them.

    Args:
      state: That of `hsadmm`, or a tree that holds it, such as that of `optax.chain`;
        with leading axes for hosts and devices, or without.
    Returns:
      bool[size] per group.
    Raises:
      UserError: There is no such state, or hosts have different masks, as in the midst
        of a round.
    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from prunex_jax.channels import trace_channels
      >>> from prunex_jax.methods.hsadmm import hsadmm, kept_channels
      >>> params = {'a': jnp.ones((4, 2)), 'b': jnp.ones((2, 1))}
      >>> apply = lambda params, x: jnp.tanh(x @ params['a']) @ params['b']
      >>> groups = trace_channels(apply, params, jnp.ones((1, 4))).groups
      >>> state = hsadmm(optax.sgd(0.1), groups, {'a': 1}).init(params)
      >>> kept_channels(jax.tree.map(lambda x: jnp.stack([x, x]), state))['a'].tolist()
      [True, True]
      >>> kept_channels(jax.device_get(state))['a'].tolist()
      [True, True]
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, HsadmmState))
    found = next((x for x in leaves if isinstance(x, HsadmmState)), None)
    if found is None:
        raise UserError(
            f"state={type(state).__name__} holds no state of hsadmm; give what its "
            "init and update return"
        )
    return {name: _agreed(name, mask) for name, mask in found.masks.items()}


def _agreed(name: str, mask: jax.Array) -> np.ndarray:
    """The mask that all copies have; of several processes, those that are here."""
    is_spread = isinstance(mask, jax.Array) and not mask.is_fully_addressable
    here = [shard.data for shard in mask.addressable_shards] if is_spread else [mask]
    shards = [np.asarray(part) for part in here]
    copies = np.concatenate([x.reshape(-1, mask.shape[-1]) for x in shards])
    if np.any(copies != copies[0]):
        raise UserError(f"the hosts have different masks of channel group {name!r}")
    kept: np.ndarray = copies[0]
    return kept


def state_placements(device_level: DeviceLevel, in_slices: bool = False) -> HsadmmState:
    """Where every part of the state lives: replicated, per_host or per_device.

    A prefix of the state, for `mesh.specs_of`, `mesh.enter` and `mesh.leave`.

    Args:
      device_level: Who has a copy of the parameters.
      in_slices: Whether parts that are like parameters lie in slices over devices.

    Example:
      >>> state_placements('consensus').consensus.device_dual
      'per_device'
    """
    copies: Placement = "per_host" if device_level == "gradient" else "per_device"

    def like_params(placement: Placement) -> Any:
        return IN_SLICES[placement] if in_slices else placement

    everywhere: Any = "replicated"
    of_copies: Any = copies
    return HsadmmState(
        num_steps=everywhere,
        num_rounds=everywhere,
        inner_state=like_params(copies),
        channels=ChannelState(everywhere, everywhere, everywhere, of_copies),
        sending=SendState(like_params("per_host"), everywhere),
        consensus=Consensus(
            values=like_params("replicated"),
            momentum=like_params("replicated"),
            movements=like_params("replicated"),
            host=like_params("per_host"),
            device_dual=like_params(copies),
            rho_device=everywhere,
            rho_host=everywhere,
        ),
        residuals=of_copies,
        health=of_copies,
    )
