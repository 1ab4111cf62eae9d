"""Kept channels for a target in the user's unit: work, size, bytes or time.

It sits right of what is counted and left of the run, which asks once per stair.
"""

from prunex_jax.shrink.targets.budget import Budget, model_budget
from prunex_jax.shrink.targets.costs import (
    Cost,
    Unit,
    function_call,
    function_macs,
    latency_cost,
    model_call,
    model_macs,
    shrunk_model,
    shrunk_shapes,
    size_costs,
)
from prunex_jax.shrink.targets.solve import Solution, Target, solve_keep_counts

__all__ = [
    "Budget",
    "Cost",
    "Solution",
    "Target",
    "Unit",
    "function_call",
    "function_macs",
    "latency_cost",
    "model_budget",
    "model_call",
    "model_macs",
    "shrunk_model",
    "shrunk_shapes",
    "size_costs",
    "solve_keep_counts",
]
