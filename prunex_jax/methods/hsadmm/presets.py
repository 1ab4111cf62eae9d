"""The parameters of H-SADMM and the named forms it comes in.

One core runs them all; a form is nothing but these numbers, three records of them: one
for each stage of a round.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import check_settings, setting
from prunex_jax.comm import (
    FLOAT32,
    TopK,
    Wire,
    refuse_biased,
)
from prunex_jax.methods.hsadmm.outer import law_momentum
from prunex_jax.methods.method import OuterRule
from prunex_jax.sparsity.settings import Criterion

# What messages call them.
_WHERE = "parameters"


@dataclasses.dataclass(frozen=True)
class Choosing:
    """Which channels a round keeps.

    Attributes:
      criterion: What channels are ranked by; see `sparsity.criteria`.
    """

    criterion: Criterion = "norm"

    def __post_init__(self) -> None:
        """Rejects numbers outside their range, and words that are no choice."""
        check_settings(self, _WHERE)


@dataclasses.dataclass(frozen=True)
class Sending:
    """How differences to the consensus cross hosts.

    Attributes:
      wire: How the compact array crosses hosts.
      error_decay: delta in [0, 1], what remains until the next round of what a host has
        not sent in one, and sends then; 0 means that formats round stochastically, and
        nothing is kept.
      top: Which numbers of the compact array are sent; None sends all.
    """

    wire: Wire = FLOAT32
    error_decay: float = setting(0.0, at_least=0, at_most=1)
    top: TopK | None = None

    def __post_init__(self) -> None:
        """Rejects what would lose numbers."""
        check_settings(self, _WHERE)
        if not self.error_decay:
            refuse_biased(self.wire, "this form of H-SADMM (error_decay=0)")
        if self.top is not None and not self.error_decay:
            raise UserError(
                f"top_k={self.top.per_chunk} needs error_decay > 0: what is not sent "
                "would be lost"
            )


@dataclasses.dataclass(frozen=True)
class Moving:
    """How the consensus moves, and what pulls the copies to it.

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
      outer: "law" chooses the outer step of every round from the cosines of movements,
        see `outer`.
    """

    prox_strength: float = setting(1.0, at_least=0, at_most=1)
    dual_decay: float = setting(0.0, at_least=0, at_most=1)
    rho_device: float = setting(0.0, at_least=0)
    rho_host: float = setting(0.0, at_least=0)
    outer_step: float = setting(1.0, above=0)
    outer_momentum: float = setting(0.0, at_least=0, below=1)
    outer: OuterRule = "fixed"

    def __post_init__(self) -> None:
        """Rejects numbers outside their range, and what means nothing together."""
        check_settings(self, _WHERE)
        if self.rho_host and not self.rho_device:
            raise UserError(
                f"rho_host={self.rho_host} needs rho_device > 0: two-level consensus "
                "weighs host against device penalty"
            )
        _check_outer(self)

    @property
    def resets_copies(self) -> bool:
        """Whether every round sets every copy to the consensus exactly."""
        return self.prox_strength == 1 and not self.dual_decay


def _check_outer(form: Moving) -> None:
    """The law is for movements of copies that start from z, and sets the step."""
    if form.outer != "law":
        return
    if not form.resets_copies or form.rho_host:
        raise UserError(
            "outer='law' needs copies that start every round from the consensus, and "
            f"this form has prox_strength={form.prox_strength}, dual_decay="
            f"{form.dual_decay} and rho_host={form.rho_host}; take preset recommended, "
            "or outer='fixed'"
        )
    if form.outer_step != 1:
        raise _chosen_by_law("outer_step", form.outer_step)


def _chosen_by_law(name: str, value: float) -> UserError:
    return UserError(
        f"{name}={value} has no effect with rounds.outer='law', which chooses it: "
        "leave it out, or set rounds.outer='fixed'"
    )


@dataclasses.dataclass(frozen=True)
class HsadmmParameters:
    """What distinguishes one form of H-SADMM from another, stage by stage.

    Example:
      >>> HsadmmParameters(moving=Moving(outer_momentum=0.5)).moving.outer_step
      1.0
    """

    choosing: Choosing = Choosing()
    sending: Sending = Sending()
    moving: Moving = Moving()

    def replace(self, **changes: Any) -> "HsadmmParameters":
        """The same form with other numbers, by the names that they have in the stages.

        Raises:
          UserError: No stage has such a number, or it means nothing with the others.
        Example:
          >>> HsadmmParameters().replace(criterion='taylor', outer_step=0.7).choosing
          Choosing(criterion='taylor')
        """
        stages = {}
        for stage in dataclasses.fields(self):
            part = getattr(self, stage.name)
            own = {field.name for field in dataclasses.fields(part)} & changes.keys()
            stages[stage.name] = dataclasses.replace(
                part, **{name: changes.pop(name) for name in own}
            )
        if changes:
            raise UserError(f"H-SADMM has no parameter {', '.join(changes)}")
        return HsadmmParameters(**stages)


def _recommended(sync_period: int) -> HsadmmParameters:
    # Outer momentum that pays over many local steps ruins few, and hurts nothing but
    # helps nothing at one: it is tied to the period. More of it, as in DiLoCo, lost
    # where a run had but fifty rounds: see configs/sweeps/tuning.py.
    if sync_period == 1:
        return HsadmmParameters()
    if sync_period < 16:
        return HsadmmParameters(moving=Moving(outer_step=1.0, outer_momentum=0.5))
    return HsadmmParameters(moving=Moving(outer_step=0.7, outer_momentum=0.7))


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
    "leaky": lambda sync_period: HsadmmParameters(
        moving=Moving(prox_strength=0.5, dual_decay=0.5)
    ),
    "paper": lambda sync_period: HsadmmParameters(
        moving=Moving(prox_strength=0.0, dual_decay=1.0, rho_device=1.0, rho_host=1.0)
    ),
}


def preset(name: str, sync_period: int, **overrides: Any) -> HsadmmParameters:
    """Looks up a named form and changes what is given.

    Args:
      name: A key of `PRESETS`.
      sync_period: Local steps per round.
      **overrides: Numbers of its stages; None keeps the preset's value. With
        outer="law", those of the outer step have no place here.
    Returns:
      The parameters.
    Raises:
      UserError: No such preset, or a combination that means nothing.
    Example:
      >>> preset('recommended', 4).moving.outer_momentum
      0.5
    """
    if name not in PRESETS:
        raise UserError(
            f"no H-SADMM preset {name!r}{suggest(name, PRESETS)} "
            f"(known: {', '.join(PRESETS)})"
        )
    given = {key: value for key, value in overrides.items() if value is not None}
    if given.get("outer") == "law":
        given |= _by_law(sync_period, given)
    return PRESETS[name](sync_period).replace(**given)


def _by_law(sync_period: int, given: Mapping[str, Any]) -> dict[str, float]:
    """Outer step and momentum of a form whose step is chosen in every round."""
    for name in ("outer_step", "outer_momentum"):
        if name in given:
            raise _chosen_by_law(name, given[name])
    # What was not sent is momentum already: more of it hurts (SparseLoCo).
    momentum = 0.0 if given.get("top") else law_momentum(sync_period)
    return {"outer_step": 1.0, "outer_momentum": momentum}
