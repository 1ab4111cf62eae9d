"""PacTrain: what is kept (`packing`, `grasp`), and gradients that travel packed."""

from prunex_jax.methods.pactrain.grasp import grasp_pattern, magnitude_pattern
from prunex_jax.methods.pactrain.method import (
    ROW,
    PactrainConfig,
    PactrainState,
    pactrain,
)
from prunex_jax.methods.pactrain.packing import ChannelPacking, WeightPacking

__all__ = [
    "ROW",
    "ChannelPacking",
    "PactrainConfig",
    "PactrainState",
    "WeightPacking",
    "grasp_pattern",
    "magnitude_pattern",
    "pactrain",
]
