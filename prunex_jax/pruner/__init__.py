"""The one call: a network goes in, a smaller one with a certificate comes out.

    prune     traces, chooses, cuts, repairs and certifies, once or in several rounds
    networks  what people call a network, as a function of trees
    ranking   scores of channels, from parameters or from gradients of a loss
    goals     how many channels every group keeps for what was asked
    result    `Pruned`: the small network, and what it was made of

All of it is made of what `channels`, `sparsity`, `shrink` and `export` have.
"""

from prunex_jax.pruner.prune import prune, prune_iteratively
from prunex_jax.pruner.result import Pruned

__all__ = ["Pruned", "prune", "prune_iteratively"]
