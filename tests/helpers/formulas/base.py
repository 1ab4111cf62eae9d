"""What a method must send, from sizes alone: an independent law beside its trace."""

from collections.abc import Mapping
from typing import Any

from prunex_jax.comm import Collective


class Formulas:
    """Of one method: the collectives of a step, and of an exchange."""

    def step(self, mesh_shape: Mapping[str, int], **options: Any) -> list[Collective]:
        """Of a step with these options."""
        raise NotImplementedError

    def exchange(
        self, mesh_shape: Mapping[str, int], keep_counts: Mapping[str, int], kind: str
    ) -> list[Collective]:
        """Of one exchange; nothing for methods that send in steps only."""
        return []
