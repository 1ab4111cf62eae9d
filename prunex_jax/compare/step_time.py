"""What a step of a method sends, and how long that takes on a link.

Bytes and hops are those of the trace. Nothing runs here: `probe` measures links.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from prunex_jax.comm import count_hops, wire_bytes
from prunex_jax.methods import Method
from prunex_jax.methods.traffic import exchange_collectives, step_collectives

# Steps among which a repeating pattern is looked for, and the first of them, which is
# after all warm-ups.
_WINDOW = 4096
_LATE = 10**9


class Traffic(NamedTuple):
    """What one step sends between hosts, as a mean over the steps of a period.

    `host_bytes` are sent by one host over the host axis; `hops` are the times that a
    message has to reach a neighbour before the next can leave, see `comm.count_hops`.
    """

    host_bytes: float
    hops: float


def steady_traffic(
    method: Method,
    shapes: Mapping[str, tuple[int, ...]],
    mesh_shape: Mapping[str, int],
    keep_counts: Mapping[str, int],
) -> Traffic:
    """Adds up what a step of a method sends once its warm-ups are over.

    Args:
      method: From `make_method`.
      shapes: Shape of every parameter by path.
      mesh_shape: Axes of a mesh, which need not be here, and their sizes.
      keep_counts: Kept channels of every group.
    Returns:
      The mean over the steps of a period. An exchange counts with its share of a step.
    """
    kinds = late_options(method)
    if method.is_streaming and keep_counts:
        fixed = tuple(sorted(keep_counts.items()))
        kinds = [(share, {**kind, "keep_counts": fixed}) for share, kind in kinds]
    parts = [
        (share, step_collectives(method, shapes, mesh_shape, **kind))
        for share, kind in kinds
    ]
    if method.rounds is not None and not method.is_streaming:
        sent = exchange_collectives(method, shapes, mesh_shape, keep_counts)
        parts.append((method.rounds.sync.rounds_per_step, sent))
    slow = next(iter(mesh_shape))
    return Traffic(
        sum(share * wire_bytes(sent, mesh_shape)[slow] for share, sent in parts),
        sum(share * count_hops(sent, slow) for share, sent in parts),
    )


def late_options(method: Method) -> list[tuple[float, dict[str, Any]]]:
    """Lists the static options of late steps, each once with its share of the steps.

    Those of one period of their pattern; where rounds follow the learning rate, those
    of the whole run.
    """
    ends = () if method.sync is None else method.sync.ends
    at = method.step_options.at
    kinds = [at(step) for step in range(ends[-1])] if ends else _one_period(method)
    distinct = [kind for place, kind in enumerate(kinds) if kinds.index(kind) == place]
    return [(kinds.count(kind) / len(kinds), kind) for kind in distinct]


def _one_period(method: Method) -> list[dict[str, Any]]:
    kinds = [method.step_options.at(_LATE + step) for step in range(_WINDOW)]
    for period in range(1, _WINDOW // 2 + 1):
        if kinds[period:] == kinds[:-period]:
            return kinds[:period]
    return kinds


@dataclasses.dataclass(frozen=True)
class Link:
    """One axis of the mesh, as an exchange finds it."""

    # Mbit/s that a host sends over the host axis, all its devices together, or a device
    # over the device axis, in bytes that formulas count.
    megabits: float
    hop_seconds: float = 0.0  # Until a message of no length has reached a neighbour.

    def __str__(self) -> str:
        return f"{self.megabits:,.4g} Mbit/s, {1e3 * self.hop_seconds:.3g} ms per hop"

    def seconds(self, num_bytes: float, hops: float) -> float:
        """Time of sending so many bytes in so many hops."""
        return hops * self.hop_seconds + 8e-6 * num_bytes / self.megabits
