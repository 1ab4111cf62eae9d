"""Optimizers as optax transformations: H-SADMM, and the inner optimizer it wraps."""

from prunex_jax.optim.admm import Hsadmm
from prunex_jax.optim.averaging import AverageState, average_gradients
from prunex_jax.optim.consensus import HsadmmState, RoundKind, state_placements
from prunex_jax.optim.dgc import DgcState, dgc
from prunex_jax.optim.grasp import grasp_pattern, magnitude_pattern
from prunex_jax.optim.hsadmm import hsadmm
from prunex_jax.optim.importance import ImportanceState, importance
from prunex_jax.optim.packing import ChannelPacking, WeightPacking
from prunex_jax.optim.pactrain import PactrainState, pactrain
from prunex_jax.optim.powersgd import PowersgdState, powersgd
from prunex_jax.optim.presets import (
    PRESETS,
    HsadmmParameters,
    preset,
)
from prunex_jax.optim.residuals import Residuals
from prunex_jax.optim.topk import TopkState, topk

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
