"""Which numbers of every chunk of a buffer are sent, and to whom."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from prunex_jax.base.errors import UserError
from prunex_jax.comm.wires import Wire

# Numbers of which a few are sent. Twelve bits are a position.
CHUNK = 4096

# gather: all hosts get the entries of all. owners: every chunk has a host that adds up
# what all send of it, and sends the largest of the sum to all. auto: see
# `formulas.route_of`.
Route = Literal["auto", "gather", "owners"]


@dataclasses.dataclass(frozen=True)
class TopK:
    """Which numbers of a chunk are sent, and how.

    Attributes:
      per_chunk: Numbers of each chunk that a host sends; even, since two positions
        make three bytes.
      route: gather sends M - 1 times the entries of a host of M; owners about twice,
        whatever M, but cuts the sum down to as many entries once more.
    """

    per_chunk: int
    route: Route = "gather"

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions of a chunk: twelve bits each."""
        return self.per_chunk * 3 // 2

    def __post_init__(self) -> None:
        """Raises UserError for what cannot be sent."""
        if not 2 <= self.per_chunk <= CHUNK or self.per_chunk % 2:
            raise UserError(
                f"top_k={self.per_chunk} must be an even number from 2 to {CHUNK}, the "
                "numbers of a chunk; 0 sends all of them"
            )
        if self.route not in ("auto", "gather", "owners"):
            raise UserError(
                f"top_k_route={self.route!r} must be auto, gather or owners"
            )


def largest_buffer(wire: Wire, mesh_shape: Mapping[str, int]) -> int:
    """Elements of the largest buffer that is cut into chunks; 0 is no limit.

    Choosing takes several times the memory of a buffer, and of what is chosen a message
    is but a small part: so the size of messages limits the float32 that they stand for.

    Args:
      wire: How numbers cross hosts, and in messages of which size.
      mesh_shape: Axes of the mesh and their sizes.
    Returns:
      Elements of as many whole chunks as fit, at least one; where that is enough, the
      same number for every device of every host.
    Example:
      >>> largest_buffer(Wire('int2', 2**28), {'host': 3, 'device': 2}) // CHUNK
      16380
      >>> largest_buffer(Wire('int2'), {'host': 3, 'device': 2})
      0
    """
    if not wire.bucket_bytes:
        return 0
    num_chunks = max(1, wire.bucket_bytes // (4 * CHUNK))
    num_owners = math.prod(mesh_shape.values())
    if num_chunks > num_owners:
        num_chunks -= num_chunks % num_owners
    return CHUNK * num_chunks
