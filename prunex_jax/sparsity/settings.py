"""Settings of pruning: how much, when, and which channels."""

import dataclasses
from typing import Literal

from prunex_jax.base.settings import setting

# What channels are ranked by; see `sparsity.criteria`.
Criterion = Literal["norm", "taylor", "scale"]


@dataclasses.dataclass(frozen=True)
class SparsityConfig:
    """How many channels are kept, of which groups, and when."""

    # Share removed at the end, in [0, 1): of the channels, or of what `unit` counts.
    sparsity: float = setting(0.5, at_least=0, below=1)
    # channels | params | macs | bytes (of one exchange). In the last three, as few
    # channels are removed as reach the share, at every density on the way.
    unit: Literal["channels", "params", "macs", "bytes"] = "channels"
    # uniform (the same share of every group) | global (ranked over all groups: taylor
    # scores per what a channel costs in `unit`, others per their mean in the group).
    budget: Literal["uniform", "global"] = "uniform"
    # No group loses more than this share of its channels, whatever the budget.
    max_group_sparsity: float = setting(1.0, above=0, at_most=1)
    # all (for bytes: every group) | inner (for accuracy: groups inside of a block only;
    # channels that a shortcut adds up over blocks stay).
    scope: Literal["all", "inner"] = "all"
    # What hsadmm ranks the channels of a group by: norm (of all entries that carry the
    # channel) | taylor (what its removal would change the loss by, to first order) |
    # scale (of the norms behind it).
    criterion: Criterion = "norm"
    # Share of the run at which pruning starts, and at which the mask freezes.
    start_share: float = setting(0.1, at_least=0, at_most=1)
    freeze_share: float = setting(0.5, at_least=0, at_most=1)
    # Share of the run at which dead channels are cut out and the small network trains
    # on; not before the mask freezes. 1 cuts them out at the end only.
    shrink_share: float = setting(1.0, at_least=0, at_most=1)
    # Batches on which, whenever channels are removed, what reads them is refitted to
    # those that stay, in closed form; 0 leaves it to training. See `shrink.refit`.
    repair_batches: int = setting(0, at_least=0, at_most=10_000)
    # Number of densities between dense and final; each recompiles the exchange.
    num_stairs: int = setting(8, at_least=1, at_most=10_000)
    # Kept counts are multiples of this where a group is wide enough.
    round_to: int = setting(8, at_least=1)
    # Other multiples for some groups, each `groups:multiple`: 'blocks/*:64', or
    # '*>=512:128' for groups of at least 512 channels. The first that is for a group
    # counts; a group smaller than its multiple is rounded by `round_to`.
    multiples: tuple[str, ...] = ()
    # Groups whose name contains one of these are left dense.
    exclude: tuple[str, ...] = ()
