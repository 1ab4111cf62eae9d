"""What Top-K and DGC share: the largest entries of a buffer are sent, the rest is kept.

Everything is one flat float32 buffer for the whole tree. Sits on `sparsity.selection`,
which chooses, and on `comm`, which sends; `optim.topk` and `optim.dgc` say what the
buffer is.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.comm import (
    FLOAT32,
    Wire,
    check_local,
    dense_size,
    mean_of_entries,
    mean_over_devices,
    mean_over_hosts,
    refuse_ternary,
)
from prunex_jax.mesh import ALONE, MeshAxes, axis_size
from prunex_jax.methods.positions import Layout, is_named
from prunex_jax.sparsity import entry_count, largest_entries


class Sent(NamedTuple):
    """What became of a buffer."""

    mean: jax.Array  # float32[n], replicated: of what all hosts have sent
    held_back: jax.Array  # float32[n], per_host: the buffer less what this host sent
    positions: jax.Array | None  # int32[k], per_host: among those that compete; None
    # if all of the buffer was sent


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """Sends the largest entries of a buffer.

    Attributes:
      density: Share of the entries that every host sends.
      is_exact: Whether they are the largest, or 95 % of them: see
        `sparsity.largest_entries`.
      wire: Format of their values on the host axis.
      send_whole: Leaves whose path contains one of these do not compete: they are
        averaged whole, in float32.
      axes: Mesh axes.
    """

    density: float
    is_exact: bool = True
    wire: Wire = FLOAT32
    send_whole: tuple[str, ...] = ()
    axes: MeshAxes = ALONE

    def __post_init__(self) -> None:
        """Rejects what cannot be sent."""
        check_entry_density(self.density)
        refuse_ternary(self.wire)

    def zeros(self, params: PyTree) -> jax.Array:
        """A buffer for the tree, float32[n]: nothing is held back yet."""
        return jnp.zeros(dense_size(shapes_by_path(params)), jnp.float32)

    def layout_of(self, tree: PyTree) -> Layout:
        """How a tree lies in the buffer: what competes, then what is sent whole."""
        shapes = shapes_by_path(tree)
        is_whole = is_named(shapes, self.send_whole)
        return Layout(tuple(shapes.values()), tuple(int(not each) for each in is_whole))

    def local_mean(self, grads: PyTree) -> tuple[Layout, jax.Array]:
        """Mean gradient of the host as a buffer, and how the tree lies in it.

        Raises:
          UserError: They are summed already; see `comm.check_local`.
        Collectives:
          As `comm.mean_over_devices`.
        """
        check_local(grads, self.axes)
        layout = self.layout_of(grads)
        return layout, mean_over_devices(layout.join(grads), self.axes)

    def send(
        self, buffer: jax.Array, num_open: int, density: float | None = None
    ) -> Sent:
        """Averages the largest entries over hosts.

        Args:
          buffer: float32[n], per_host.
          num_open: How many of them compete; those that follow are sent whole.
          density: In the stead of the usual one.
        Collectives:
          As `comm.mean_of_entries`, and as `comm.mean_over_hosts` for what is sent
          whole. With one host nothing is sent, and nothing held back: the mean is the
          buffer.
        """
        if density is not None:
            check_entry_density(density)
        if axis_size(self.axes.host) == 1 or not num_open:
            mean = mean_over_hosts(buffer, self.axes)
            return Sent(mean, jnp.zeros_like(buffer), None)
        competing, whole = buffer[:num_open], buffer[num_open:]
        count = entry_count(self.density if density is None else density, num_open)
        positions = largest_entries(competing, count, is_exact=self.is_exact)
        values = competing[positions]
        mean, sent = mean_of_entries(positions, values, num_open, self.axes, self.wire)
        held_back = competing.at[positions].set(values - sent, unique_indices=True)
        if whole.size:
            mean = jnp.concatenate([mean, mean_over_hosts(whole, self.axes)])
            held_back = jnp.concatenate([held_back, jnp.zeros_like(whole)])
        return Sent(mean, held_back, positions if count < num_open else None)


def check_entry_density(density: float) -> None:
    """Raises UserError unless a density lies in (0, 1]."""
    if not 0 < density <= 1:
        raise UserError(
            f"density={density} must lie in (0, 1]: it is the share of the entries "
            "that every host sends"
        )
