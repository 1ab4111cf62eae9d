"""What a run keeps at each stage, in the unit of its settings."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import SparsityConfig
from prunex_jax.channels import ChannelTrace, layouts_of
from prunex_jax.models import Model
from prunex_jax.shrink.targets.costs import Cost, Memoised, model_macs, size_costs
from prunex_jax.shrink.targets.solve import Target, solve_keep_counts
from prunex_jax.sparsity import normalise_scores
from prunex_jax.sparsity.budgets import keep_counts_at


@dataclasses.dataclass(frozen=True, eq=False)
class Budget:
    """What a run keeps, stage by stage, in the unit of its settings.

    Attributes:
      config: Settings; `unit` says what `sparsity` is a share of.
      sizes: Channels of every group.
      costs: By unit; that of `config.unit`, unless it is channels.
    """

    config: SparsityConfig
    sizes: Mapping[str, int]
    costs: Mapping[str, Cost]

    def keep_counts_at(
        self,
        density: float,
        scores: Mapping[str, np.ndarray] | None = None,
        previous: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """Kept channels of every group at one stage.

        In channels, counts are rounded to the nearest; in other units they are the
        largest within the share.

        Args:
          density: Share that is kept, of what `config.unit` counts.
          scores: Squared channel norms summed over hosts, needed for a global budget.
          previous: Counts of the stage before, which a global budget never exceeds.
        Raises:
          UserError: The share is out of reach.
        """
        config, ranked = self.config, None
        if config.budget == "global" and scores is not None:
            raw = {name: jnp.asarray(score) for name, score in scores.items()}
            ranked = {n: np.asarray(s) for n, s in normalise_scores(raw).items()}
        if config.unit == "channels" or density == 1.0:
            return keep_counts_at(config, self.sizes, density, ranked, previous)
        try:
            solution = solve_keep_counts(
                Target(config.unit, keep=density),
                self.costs,
                self.sizes,
                scores=ranked,
                previous=previous,
                round_to=config.round_to,
                exclude=config.exclude,
            )
        except UserError as error:
            raise UserError(
                f"config.sparsity.sparsity={config.sparsity:g} of "
                f"config.sparsity.unit={config.unit!r}: {error}"
            ) from error
        return dict(solution.keep_counts)


def model_budget(config: SparsityConfig, model: Model, trace: ChannelTrace) -> Budget:
    """The budget of a run with one of our models.

    Args:
      config: What is pruned, and in which unit.
      model: At full width.
      trace: Its channel groups.
    """
    groups, shapes = trace.groups, trace.shapes
    costs = size_costs(shapes, layouts_of(groups, shapes))
    if config.unit == "macs":
        # Remembered from stair to stair: each is a trace of the network.
        costs["macs"] = Memoised(model_macs(model, groups))
    return Budget(config, {group.name: group.size for group in groups}, costs)
