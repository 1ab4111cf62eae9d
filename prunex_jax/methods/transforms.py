"""Optimizers as optax transformations: H-SADMM, and the inner optimizer it wraps."""

from prunex_jax.methods.averaging import AverageState, average_gradients
from prunex_jax.methods.dgc_transform import DgcState, dgc
from prunex_jax.methods.grasp import grasp_pattern, magnitude_pattern
from prunex_jax.methods.hsadmm.consensus import HsadmmState, RoundKind, state_placements
from prunex_jax.methods.hsadmm.core import Hsadmm
from prunex_jax.methods.hsadmm.presets import (
    PRESETS,
    HsadmmParameters,
    preset,
)
from prunex_jax.methods.hsadmm.residuals import Residuals
from prunex_jax.methods.hsadmm.transform import hsadmm
from prunex_jax.methods.importance_transform import ImportanceState, importance
from prunex_jax.methods.packing import ChannelPacking, WeightPacking
from prunex_jax.methods.pactrain_transform import PactrainState, pactrain
from prunex_jax.methods.powersgd_transform import PowersgdState, powersgd
from prunex_jax.methods.topk_transform import TopkState, topk

__all__ = [
    "PRESETS",
    "AverageState",
    "ChannelPacking",
    "DgcState",
    "Hsadmm",
    "HsadmmParameters",
    "HsadmmState",
    "ImportanceState",
    "PactrainState",
    "PowersgdState",
    "Residuals",
    "RoundKind",
    "TopkState",
    "WeightPacking",
    "average_gradients",
    "dgc",
    "grasp_pattern",
    "hsadmm",
    "importance",
    "magnitude_pattern",
    "pactrain",
    "powersgd",
    "preset",
    "state_placements",
    "topk",
]
