"""Refuses sparsity settings that cannot work, before anything is compiled.

Only the settings themselves are judged here; exclude patterns need the names of the
channel groups, which exist after tracing.
"""

import difflib
from collections.abc import Iterable, Sequence

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import SparsityConfig

_MAX_NAMES_SHOWN = 5


def check_density(density: float) -> None:
    """Refuses a density that keeps nothing or more than everything.

    Args:
      density: Share of the channels that is kept.
    Raises:
      UserError: It is not in (0, 1].
    """
    if not 0.0 < density <= 1.0:  # Written so that NaN fails too.
        raise UserError(
            f"density {density:g} is outside (0, 1]; it is the share of the channels "
            "that is kept, 1 keeps all"
        )


def check_round_to(round_to: int) -> None:
    """Refuses a rounding of kept counts below one channel.

    Raises:
      UserError: It is below 1.
    """
    if round_to < 1:
        raise UserError(
            f"sparsity.round_to = {round_to} must be at least 1; 1 rounds to whole "
            "channels"
        )


def validate_sparsity(config: SparsityConfig) -> None:
    """Refuses sparsity settings that contradict themselves.

    Args:
      config: The settings of a run.
    Raises:
      UserError: sparsity outside [0, 1); a share outside [0, 1]; a start after the
        freeze, or a freeze after the shrinking; fewer than one stair; a rounding below
        1; an unknown budget; an empty exclude pattern.
    """
    if not 0.0 <= config.sparsity < 1.0:
        raise UserError(
            f"sparsity.sparsity = {config.sparsity:g} leaves a density of "
            f"{1.0 - config.sparsity:g}, outside (0, 1]; choose a sparsity in [0, 1)"
        )
    for name in ("start_share", "freeze_share", "shrink_share"):
        share = getattr(config, name)
        if not 0.0 <= share <= 1.0:
            raise UserError(
                f"sparsity.{name} = {share:g} is outside [0, 1]; it is a share of the "
                "run, not a number of steps"
            )
    if config.start_share > config.freeze_share:
        raise UserError(
            f"sparsity.start_share = {config.start_share:g} is after "
            f"sparsity.freeze_share = {config.freeze_share:g}; prune first, then freeze"
        )
    if config.freeze_share > config.shrink_share:
        raise UserError(
            f"sparsity.shrink_share = {config.shrink_share:g} is before "
            f"sparsity.freeze_share = {config.freeze_share:g}; channels can be cut out "
            "when it is settled which ones, so raise it"
        )
    if config.num_stairs < 1:
        raise UserError(
            f"sparsity.num_stairs = {config.num_stairs} must be at least 1; 1 goes "
            "from dense to the final density at once"
        )
    if config.budget not in ("uniform", "global"):
        raise UserError(
            f"sparsity.budget = {config.budget!r} is unknown; use uniform or global"
        )
    if "" in config.exclude:
        raise UserError(
            "sparsity.exclude has an empty pattern '', which every name contains; "
            "set sparsity.sparsity = 0 to prune nothing"
        )
    check_round_to(config.round_to)


def check_excludes(exclude: Sequence[str], names: Iterable[str]) -> None:
    """Refuses exclude patterns that match no channel group.

    A misspelt pattern would otherwise prune exactly what was to be protected.

    Args:
      exclude: Patterns; each has to be part of at least one name.
      names: Names of all channel groups.
    Raises:
      UserError: A pattern matches nothing; the closest name is suggested.
    """
    names = sorted(names)
    for pattern in exclude:
        if any(pattern in name for name in names):
            continue
        words = dict.fromkeys([*names, *(w for name in names for w in name.split("/"))])
        close = difflib.get_close_matches(pattern, list(words), n=1)
        if close:
            hint = f"did you mean {close[0]!r}?"
        else:
            more = ", ..." if len(names) > _MAX_NAMES_SHOWN else ""
            hint = "channel groups: " + ", ".join(names[:_MAX_NAMES_SHOWN]) + more
        raise UserError(
            f"sparsity.exclude = {pattern!r} matches no channel group; {hint}"
        )


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Tells whether a channel group is left dense.

    Example:
      >>> is_excluded('stage1/block0/conv1/kernel', ('block0',))
      True
    """
    return any(pattern in name for pattern in exclude)
