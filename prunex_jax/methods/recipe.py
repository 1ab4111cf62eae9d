"""What a method is made from: the parts that the trainer has built before it."""

import dataclasses
from collections.abc import Mapping, Sequence

import optax

from prunex_jax.base.settings import (
    MethodConfig,
    OptimizerConfig,
)
from prunex_jax.channels import ChannelGroup
from prunex_jax.comm import Wire
from prunex_jax.mesh import MeshAxes


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """Ingredients of a method.

    Attributes:
      config: Settings of all methods.
      inner: The inner optimizer, for averaged gradients.
      learning_rate: Its schedule.
      groups: Channel groups that may be pruned.
      keep_counts: Final kept channels of each group.
      shapes: Shape of every parameter by path.
      axes: Mesh axes.
      total_steps: Length of the run.
      optimizer: Settings of the inner optimizer, for methods that do part of its work.
    """

    config: MethodConfig
    inner: optax.GradientTransformation
    learning_rate: optax.Schedule
    groups: Sequence[ChannelGroup]
    keep_counts: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    axes: MeshAxes = MeshAxes()  # noqa: RUF009
    total_steps: int = 0
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    @property
    def wire(self) -> Wire:
        """How what the method exchanges crosses hosts."""
        return Wire(self.config.wire_dtype, self.config.bucket_bytes)
