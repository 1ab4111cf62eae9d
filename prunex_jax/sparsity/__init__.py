"""Decides which channels live, and when.

In come trees with the layouts of their channel groups, and settings; out come kept
counts, keep indices, masks and the stages of a run:

    counts     how many channels every group may keep, and keeps at a density
    targets    the most that cost no more than a share or an amount; a run's budget
    quanta     in which steps that number moves: multiples by size, or by a table
    criteria   what is best: other scores than the norm
    choice     which ones: the best, the same on every host
    schedule   which density rules at which step
    selection  the largest entries of a flat buffer, for methods that send entries

It knows no mesh: where scores are summed over hosts, the caller does so, on raw scores,
before anything is chosen here.
"""

from prunex_jax.sparsity.choice import (
    Projection,
    choose_keep_indices,
    masks_of,
    narrow_alive,
    normalise_scores,
    project_channels,
)
from prunex_jax.sparsity.counts import (
    CountLimits,
    check_excludes,
    global_keep_counts,
    uniform_keep_counts,
)
from prunex_jax.sparsity.criteria import (
    channel_scores,
    gradient_scores,
    running_mean,
    uses_gradients,
)
from prunex_jax.sparsity.schedule import (
    Stage,
    density_stairs,
    stage_at,
    step_of_share,
    validate_sparsity,
)
from prunex_jax.sparsity.selection import entry_count, largest_entries
from prunex_jax.sparsity.targets import (
    Budget,
    Solution,
    Target,
    channel_costs,
    comparable_scores,
    limits_of,
    solve_keep_counts,
)

__all__ = [
    "Budget",
    "CountLimits",
    "Projection",
    "Solution",
    "Stage",
    "Target",
    "channel_costs",
    "channel_scores",
    "check_excludes",
    "choose_keep_indices",
    "comparable_scores",
    "density_stairs",
    "entry_count",
    "global_keep_counts",
    "gradient_scores",
    "largest_entries",
    "limits_of",
    "masks_of",
    "narrow_alive",
    "normalise_scores",
    "project_channels",
    "running_mean",
    "solve_keep_counts",
    "stage_at",
    "step_of_share",
    "uniform_keep_counts",
    "uses_gradients",
    "validate_sparsity",
]
