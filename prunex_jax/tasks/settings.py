"""Settings of the inner optimizer, and of the loss that it minimises."""

import dataclasses
from typing import Literal

from prunex_jax.base.settings import setting


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer and its learning rate."""

    # sgd | adamw | lion | muon (matrices, and adamw for the rest), or
    # package.module:function for another one, as in optax:lamb.
    name: str = "sgd"
    # Muon: parts of paths of the matrices that take adamw.
    adamw_paths: tuple[str, ...] = ("embedding", "position", "classifier", "head")
    learning_rate: float = setting(0.1, above=0)
    momentum: float = setting(0.9, at_least=0, below=1)
    nesterov: bool = True
    # Part of the gradient for sgd, decoupled for the others; kernels only.
    weight_decay: float = setting(5e-4, at_least=0)
    # Share of the run for the linear warm-up.
    warmup_share: float = setting(0.05, at_least=0, at_most=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # Share of the run until which the rate stays at its peak before it decays. Networks
    # that lose channels recover better at a high rate than at one that has decayed.
    flat_share: float = setting(0.0, at_least=0, at_most=1)
    # Share of the run at which warm-up and decay start over, as after pruning; 0 never.
    rewind_share: float = setting(0.0, at_least=0, at_most=1)
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    # Largest gradient norm, measured after averaging; 0 means no clipping.
    clip_norm: float = setting(0.0, at_least=0)
    # Parts in which a device's share of the batch goes through the network, one after
    # the other, to save memory: gradients are averaged, and exchanged once.
    micro_batches: int = setting(1, at_least=1)
