"""How many channels every group keeps for what was asked."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.sparsity import (
    CountLimits,
    Target,
    global_keep_counts,
    solve_keep_counts,
    uniform_keep_counts,
)
from prunex_jax.sparsity.targets import Cost, Unit

# Wildcards of groups -> channels that are kept, or their share.
Table = Mapping[str, int | float]
KeepCounts = Mapping[str, int]
Goal = Target | Table


def goal_of(
    sparsity: float | None,
    shares: Mapping[str, float | None],
    target: Target | None,
    keep: Table | None,
) -> Goal:
    """The one thing that was asked for.

    Args:
      sparsity: Share of the channels that goes.
      shares: By unit, the share that remains.
      target: A target in any unit.
      keep: A table by group.
    Raises:
      UserError: Nothing is asked for, more than one thing, or a share out of range.
    """
    given = {"sparsity": sparsity, **shares, "target": target, "keep": keep}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        says = " and ".join(named) + " both say" if named else "nothing says"
        raise UserError(
            f"{says} how small the network shall be; give exactly one of "
            f"{', '.join(given)}"
        )
    (name,) = named
    if target is not None:
        return target
    if keep is not None:
        return keep
    share: Any = given[name]
    if not isinstance(share, float | int):
        raise UserError(
            f"{name}={type(share).__name__}(...) is no share; parameters are given by "
            "position, behind the network"
        )
    if sparsity is not None:
        if not 0.0 <= sparsity < 1.0:
            raise UserError(
                f"sparsity={sparsity:g} is outside [0, 1); give the share of the "
                "channels that goes"
            )
        return Target("channels", keep=1.0 - sparsity)
    if not 0.0 < share <= 1.0:
        raise UserError(
            f"{name}={share:g} is outside (0, 1]; give the share that remains, or "
            f"target=Target({name!r}, at_most=...) for an amount"
        )
    return Target(cast(Unit, name), keep=share)


def counts_for(
    goal: Goal,
    progress: float,
    limits: CountLimits,
    costs: Mapping[str, Cost],
    ranked: Mapping[str, np.ndarray] | None,
    previous: KeepCounts | None,
) -> dict[str, int]:
    """Kept channels of every group.

    Args:
      goal: What is asked for at the end.
      progress: How much of it is asked for now, in (0, 1]; shares are taken to this
        power, so that equal steps remove equal shares of what is left.
      limits: What counts may be.
      costs: By unit.
      ranked: Comparable scores, float[size] per group, of a global budget; None gives
        all groups the same share.
      previous: Counts that are not exceeded.
    Raises:
      UserError: The goal is out of reach, or a table names no group.
    """
    if not isinstance(goal, Target):
        return _of_table(goal, progress, limits)
    if goal.unit == "channels" and goal.keep is not None:
        density = goal.keep**progress
        if ranked is None:
            return uniform_keep_counts(limits, density)
        return global_keep_counts(limits, density, ranked, previous)
    if progress < 1.0:
        dense = costs[goal.unit](limits.sizes)
        share = min(1.0, goal.limit(dense) / dense) ** progress
        goal = Target(goal.unit, keep=share)
    solution = solve_keep_counts(goal, costs, limits, scores=ranked, previous=previous)
    return dict(solution.keep_counts)


def _of_table(table: Table, progress: float, limits: CountLimits) -> dict[str, int]:
    """Counts of a table: of every group by the first row that is for it."""
    unused = set(table)
    counts = dict(limits.sizes)
    for name in limits.sizes:
        row = next((row for row in table if fnmatch.fnmatchcase(name, row)), None)
        if row is None:
            continue
        unused.discard(row)
        counts[name] = _count(row, table[row], name, progress, limits)
    if unused:
        row = min(unused)
        raise UserError(
            f"keep={{{row!r}: ...}} is for no channel group that an earlier row is not "
            f"for{suggest(row, limits.sizes)}"
        )
    return counts


def _count(row: str, kept: Any, name: str, progress: float, limits: CountLimits) -> int:
    size = limits.sizes[name]
    if isinstance(kept, int) and not isinstance(kept, bool) and 1 <= kept <= size:
        return kept if progress == 1 else math.ceil(size * (kept / size) ** progress)
    if isinstance(kept, float) and 0.0 < kept <= 1.0:
        one = dataclasses.replace(limits, sizes={name: size})
        return uniform_keep_counts(one, kept**progress)[name]
    raise UserError(
        f"keep={{{row!r}: {kept!r}}} says nothing of group {name} of {size} channels; "
        "give a whole number of channels that stay, or a share in (0, 1] as a float"
    )
