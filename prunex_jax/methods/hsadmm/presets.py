"""The parameters of H-SADMM and the named forms it comes in.

One core runs them all; a form is nothing but these numbers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import setting
from prunex_jax.comm import FLOAT32, TopK, Wire, refuse_biased


@dataclasses.dataclass(frozen=True)
class HsadmmParameters:
    """What distinguishes one form of H-SADMM from another.

    Attributes:
      prox_strength: kappa in [0, 1], the pull of every round towards the consensus; 1
        without a dual sets every copy to it.
      dual_decay: gamma in [0, 1], what remains of the device dual after a round; 0
        means that there is no device dual.
      rho_device: Penalty of every local step; the pull is rho_device * learning rate,
        at most 1, applied outside the inner optimizer's momentum. 0 means no pull.
      rho_host: Penalty between host and global consensus; 0 collapses the two levels,
        z_i = z, and there is no host dual.
      outer_step: alpha > 0, the step of z along the mean difference.
      outer_momentum: beta in [0, 1), Nesterov momentum of that step.
      adapt: "residual" balances the penalties by their residuals.
      wire: How the compact array crosses hosts.
      error_decay: delta in [0, 1], what remains until the next round of what a host has
        not sent in one, and sends then; 0 means that formats round stochastically, and
        nothing is kept.
      top: Which numbers of the compact array are sent; None sends all.
      fade: What a round leaves of the size of losing channels while masks move, in
        [0, 1); they keep living until the freeze. 0 sets them to zero at once.
    """

    prox_strength: float = setting(1.0, at_least=0, at_most=1)
    dual_decay: float = setting(0.0, at_least=0, at_most=1)
    rho_device: float = setting(0.0, at_least=0)
    rho_host: float = setting(0.0, at_least=0)
    outer_step: float = setting(1.0, above=0)
    outer_momentum: float = setting(0.0, at_least=0, below=1)
    adapt: Literal["none", "residual"] = "none"
    wire: Wire = FLOAT32
    error_decay: float = setting(0.0, at_least=0, at_most=1)
    top: TopK | None = None
    fade: float = setting(0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        """Rejects numbers outside their range, and what means nothing together."""
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                limits = field.metadata["range"]
                limits.check(field.name, getattr(self, field.name))
        if self.adapt not in ("none", "residual"):
            raise UserError(f"adapt={self.adapt!r} must be none or residual")
        if not self.error_decay:
            refuse_biased(self.wire, "this form of H-SADMM (error_decay=0)")
        if self.top is not None and not self.error_decay:
            raise UserError(
                f"top_k={self.top.per_chunk} needs error_decay > 0: what is not sent "
                "would be lost"
            )
        if self.rho_host and not self.rho_device:
            raise UserError(
                f"rho_host={self.rho_host} needs rho_device > 0: two-level consensus "
                "weighs host against device penalty"
            )
        if self.adapt == "residual" and not self.rho_device:
            raise UserError(
                "adapt='residual' balances rho_device, which is 0 in this form; take "
                "the paper preset or set rho_device"
            )

    @property
    def resets_copies(self) -> bool:
        """Whether every round sets every copy to the consensus exactly."""
        return self.prox_strength == 1 and not self.dual_decay


def _recommended(sync_period: int) -> HsadmmParameters:
    # Outer momentum that pays over many local steps ruins few, and hurts nothing but
    # helps nothing at one: it is tied to the period. More of it, as in DiLoCo, lost
    # where a run had but fifty rounds: see configs/sweeps/tuning.py.
    if sync_period == 1:
        return HsadmmParameters()
    if sync_period < 16:
        return HsadmmParameters(outer_step=1.0, outer_momentum=0.5)
    return HsadmmParameters(outer_step=0.7, outer_momentum=0.7)


# Name -> parameters for a sync period.
#   recommended: copies start every round from the consensus, which takes a Nesterov
#     step along their mean movement (structured local SGD with an outer optimizer).
#   reset: the same without the outer momentum.
#   leaky: half-way proximal pull and a leaky dual, which remembers how data that
#     differs per host pulls each copy away.
#   paper: the two-level form of PruneX with both duals; its pull is in every step.
PRESETS: Mapping[str, Callable[[int], HsadmmParameters]] = {
    "recommended": _recommended,
    "reset": lambda sync_period: HsadmmParameters(),
    "leaky": lambda sync_period: HsadmmParameters(prox_strength=0.5, dual_decay=0.5),
    "paper": lambda sync_period: HsadmmParameters(
        prox_strength=0.0, dual_decay=1.0, rho_device=1.0, rho_host=1.0
    ),
}


def preset(name: str, sync_period: int, **overrides: Any) -> HsadmmParameters:
    """Looks up a named form and changes what is given.

    Args:
      name: A key of `PRESETS`.
      sync_period: Local steps per round.
      **overrides: Fields of `HsadmmParameters`; None keeps the preset's value.
    Returns:
      The parameters.
    Raises:
      UserError: No such preset, or a combination that means nothing.
    Example:
      >>> preset('recommended', 4).outer_momentum
      0.5
    """
    if name not in PRESETS:
        raise UserError(
            f"no H-SADMM preset {name!r}{suggest(name, PRESETS)} "
            f"(known: {', '.join(PRESETS)})"
        )
    given = {key: value for key, value in overrides.items() if value is not None}
    return dataclasses.replace(PRESETS[name](sync_period), **given)
