"""Optimizers as optax transformations: H-SADMM, and the inner optimizer it wraps."""

from prunex_jax.optim.admm import (
    Hsadmm,
    HsadmmState,
    Residuals,
    RoundKind,
)
from prunex_jax.optim.hsadmm import hsadmm
from prunex_jax.optim.presets import (
    PRESETS,
    HsadmmParameters,
    preset,
)

__all__ = [
    "PRESETS",
    "Hsadmm",
    "HsadmmParameters",
    "HsadmmState",
    "Residuals",
    "RoundKind",
    "hsadmm",
    "preset",
]
