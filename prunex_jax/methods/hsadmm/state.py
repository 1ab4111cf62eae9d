"""The state of H-SADMM, stage by stage, and where its parts live."""

from typing import Any, NamedTuple

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.mesh import IN_SLICES, Placement
from prunex_jax.methods.hsadmm.choose import ChannelState
from prunex_jax.methods.hsadmm.copies import DeviceLevel
from prunex_jax.methods.hsadmm.move import Consensus, Residuals, RoundHealth
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
