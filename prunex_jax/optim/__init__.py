"""Optimizers as optax transformations: H-SADMM, and the inner optimizer it wraps."""

from prunex_jax.optim.admm import Hsadmm
from prunex_jax.optim.consensus import HsadmmState, RoundKind, state_placements
from prunex_jax.optim.hsadmm import hsadmm
from prunex_jax.optim.presets import (
    PRESETS,
    HsadmmParameters,
    preset,
)
from prunex_jax.optim.residuals import Residuals

__all__ = [
    "PRESETS",
    "Hsadmm",
    "HsadmmParameters",
    "HsadmmState",
    "Residuals",
    "RoundKind",
    "hsadmm",
    "preset",
    "state_placements",
]
