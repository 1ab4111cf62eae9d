"""Decides which channels live: scores, budgets, choice, projections, schedule.

It sits between `channels`, whose layouts say where a channel's entries are, and `comm`,
which sends what is kept. It knows no mesh: where scores are summed over hosts, the
caller does so, on raw scores, before anything is chosen here.
"""

from prunex_jax.sparsity.budgets import global_keep_counts, uniform_keep_counts
from prunex_jax.sparsity.checks import (
    check_density,
    check_excludes,
    validate_sparsity,
)
from prunex_jax.sparsity.families import (
    CountFamily,
    ranked_family,
    uniform_family,
)
from prunex_jax.sparsity.masks import (
    all_alive,
    choose_keep_indices,
    masks_of,
    narrow_alive,
)
from prunex_jax.sparsity.projections import project_channels
from prunex_jax.sparsity.proximal import prox_group_l0, prox_group_l2
from prunex_jax.sparsity.schedule import (
    Stage,
    density_stairs,
    stage_at,
    step_of_share,
)
from prunex_jax.sparsity.scores import (
    channel_scores,
    entries_per_channel,
    group_sizes,
    normalise_scores,
    shared_paths,
)
from prunex_jax.sparsity.selection import entry_count, largest_entries

__all__ = [
    "CountFamily",
    "Stage",
    "all_alive",
    "channel_scores",
    "check_density",
    "check_excludes",
    "choose_keep_indices",
    "density_stairs",
    "entries_per_channel",
    "entry_count",
    "global_keep_counts",
    "group_sizes",
    "largest_entries",
    "masks_of",
    "narrow_alive",
    "normalise_scores",
    "project_channels",
    "prox_group_l0",
    "prox_group_l2",
    "ranked_family",
    "shared_paths",
    "stage_at",
    "step_of_share",
    "uniform_family",
    "uniform_keep_counts",
    "validate_sparsity",
]
