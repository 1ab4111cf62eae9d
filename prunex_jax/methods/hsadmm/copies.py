"""Where copies of the parameters live on the mesh, and the means over them.

The two readings of the device level meet here: H-SADMM itself asks for "the mean in the
host" and does not care whether a host holds one copy or one per device.
"""

import dataclasses
from typing import Literal

import jax

from prunex_jax.base.trees import PyTree
from prunex_jax.comm import (
    axis_size,
    check_local,
    mean_over_devices,
    mean_over_hosts,
    sum_over_hosts,
    vary,
)

# gradient: gradients are averaged over the devices of a host, which share one copy.
# consensus: every device has a copy of its own.
DeviceLevel = Literal["gradient", "consensus"]


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies theta_ij of the parameters.

    Attributes:
      device_level: One copy per host or one per device.
      host_axis: Mesh axis of the hosts; None is a single host.
      device_axis: Mesh axis of the devices of a host; None is a single device.
    """

    device_level: DeviceLevel = "gradient"
    host_axis: str | None = None
    device_axis: str | None = None

    def num_per_host(self) -> int:
        """P of the equations: copies that one host holds."""
        is_consensus = self.device_level == "consensus"
        return axis_size(self.device_axis) if is_consensus else 1

    def spread(self, tree: PyTree) -> PyTree:
        """Types replicated or per_host values as every copy's own; moves nothing."""
        is_consensus = self.device_level == "consensus"
        return vary(tree, (self.host_axis, self.device_axis if is_consensus else None))

    def spread_over_hosts(self, tree: PyTree) -> PyTree:
        """Types replicated values as every host's own; moves nothing."""
        return vary(tree, (self.host_axis,))

    def mean_gradient(self, grads: PyTree) -> PyTree:
        """Gradient of every copy from the gradients of every device.

        Raises:
          UserError: They are summed already; see `comm.check_local`.
        Collectives:
          device_level "gradient": as `comm.mean_over_devices`.
        """
        check_local(grads, (self.host_axis, self.device_axis))
        if self.device_level == "consensus":
            return grads
        return mean_over_devices(grads, self.device_axis)

    def mean_in_host(self, tree: PyTree) -> PyTree:
        """Mean over the copies of a host, per_host.

        Collectives:
          device_level "consensus": as `comm.mean_over_devices`.
        """
        if self.device_level == "gradient":
            return tree
        return mean_over_devices(tree, self.device_axis)

    def mean_over_hosts(
        self,
        tree: PyTree,
        wire_dtype: str = "float32",
        key: jax.Array | None = None,
        bucket_bytes: int = 0,
    ) -> PyTree:
        """Mean over hosts of what is per_host; see `comm.mean_over_hosts`."""
        return mean_over_hosts(
            tree, self.host_axis, self.device_axis, wire_dtype, key, bucket_bytes
        )

    def sum_over_hosts(self, tree: PyTree) -> PyTree:
        """Sum over hosts of what is per_host; see `comm.sum_over_hosts`."""
        return sum_over_hosts(tree, self.host_axis, self.device_axis)
