"""What Top-K and DGC share: the largest entries of a buffer are sent, the rest is kept.

Everything is one flat float32 buffer for the whole tree. Sits on `sparsity.selection`,
which chooses, and on `comm`, which sends; `optim.topk` and `optim.dgc` say what the
buffer is.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from prunex_jax.comm import (
    axis_size,
    check_local,
    check_wire_dtype,
    dense_size,
    mean_of_entries,
    mean_over_devices,
    mean_over_hosts,
)
from prunex_jax.errors import UserError
from prunex_jax.sparsity import entry_count, largest_entries
from prunex_jax.trees import PyTree, shapes_by_path


class Sent(NamedTuple):
    """What became of a buffer."""

    mean: jax.Array  # float32[n], replicated: of what all hosts have sent
    held_back: jax.Array  # float32[n], per_host: the buffer less what this host sent
    positions: jax.Array | None  # int32[k], per_host; None if all of it was sent


@dataclasses.dataclass(frozen=True)
class Sparsifier:
    """Sends the largest entries of a buffer.

    Attributes:
      density: Share of the entries that every host sends.
      is_exact: Whether they are the largest, or 95 % of them: see
        `sparsity.largest_entries`.
      wire_dtype: Format of their values on the host axis.
      host_axis: Mesh axis of the hosts; None is a single host.
      device_axis: Mesh axis of the devices of a host; None is a single device.
    """

    density: float
    is_exact: bool = True
    wire_dtype: str = "float32"
    host_axis: str | None = None
    device_axis: str | None = None

    def __post_init__(self) -> None:
        """Rejects what cannot be sent."""
        check_entry_density(self.density)
        check_wire_dtype(self.wire_dtype)

    def zeros(self, params: PyTree) -> jax.Array:
        """A buffer for the tree, float32[n]: nothing is held back yet."""
        return jnp.zeros(dense_size(shapes_by_path(params)), jnp.float32)

    def local_mean(
        self, grads: PyTree
    ) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
        """Mean gradient of the host as a buffer, and the way back.

        Raises:
          UserError: They are summed already; see `comm.check_local`.
        Collectives:
          As `comm.mean_over_devices`.
        """
        check_local(grads, (self.host_axis, self.device_axis))
        buffer, split = ravel_pytree(grads)
        dtype = buffer.dtype
        local = mean_over_devices(buffer.astype(jnp.float32), self.device_axis)
        return local, lambda mean: split(mean.astype(dtype))

    def send(self, buffer: jax.Array, density: float | None = None) -> Sent:
        """Averages the largest entries over hosts.

        Args:
          buffer: float32[n], per_host.
          density: In the stead of the usual one.
        Collectives:
          As `comm.mean_of_entries`. With one host nothing is sent, and nothing held
          back: the mean is the buffer.
        """
        if density is not None:
            check_entry_density(density)
        if axis_size(self.host_axis) == 1:
            mean = mean_over_hosts(buffer, self.host_axis, self.device_axis)
            return Sent(mean, jnp.zeros_like(buffer), None)
        count = entry_count(self.density if density is None else density, buffer.size)
        positions = largest_entries(buffer, count, is_exact=self.is_exact)
        values = buffer[positions]
        mean, sent = mean_of_entries(
            positions,
            values,
            buffer.size,
            self.host_axis,
            self.device_axis,
            self.wire_dtype,
        )
        held_back = buffer.at[positions].set(values - sent, unique_indices=True)
        return Sent(mean, held_back, positions if count < buffer.size else None)


def check_entry_density(density: float) -> None:
    """Raises UserError unless a density lies in (0, 1]."""
    if not 0 < density <= 1:
        raise UserError(
            f"density={density} must lie in (0, 1]: it is the share of the entries "
            "that every host sends"
        )
