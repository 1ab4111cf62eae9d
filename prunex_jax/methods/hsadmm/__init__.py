"""Hierarchical structured ADMM: its stages, state, presets and transform."""

from prunex_jax.methods.hsadmm.core import Hsadmm, hsadmm
from prunex_jax.methods.hsadmm.presets import (
    PRESETS,
    Choosing,
    HsadmmParameters,
    Moving,
    Sending,
    preset,
)
from prunex_jax.methods.hsadmm.state import HsadmmState, kept_channels, state_placements

__all__ = [
    "PRESETS",
    "Choosing",
    "Hsadmm",
    "HsadmmParameters",
    "HsadmmState",
    "Moving",
    "Sending",
    "hsadmm",
    "kept_channels",
    "preset",
    "state_placements",
]
