"""Hierarchical structured ADMM: its state, equations, presets and transform."""

from prunex_jax.methods.hsadmm.consensus import HsadmmState, state_placements
from prunex_jax.methods.hsadmm.core import Hsadmm, hsadmm
from prunex_jax.methods.hsadmm.presets import PRESETS, HsadmmParameters, preset

__all__ = [
    "PRESETS",
    "Hsadmm",
    "HsadmmParameters",
    "HsadmmState",
    "hsadmm",
    "preset",
    "state_placements",
]
