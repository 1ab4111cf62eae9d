"""What the stages of a round are given beside values: the round, and where copies live.

The two readings of the device level meet here: H-SADMM itself asks for "the mean in the
host" and does not care whether a host holds one copy or one per device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.channels import ChannelGroup, Layouts, layouts_of
from prunex_jax.comm import Slicing, mean_over_devices
from prunex_jax.mesh import ALONE, MeshAxes, axis_size, vary
from prunex_jax.methods.hsadmm.presets import HsadmmParameters
from prunex_jax.methods.method import RoundKind

# gradient: gradients are averaged over the devices of a host, which share one copy.
# consensus: every device has a copy of its own.
DeviceLevel = Literal["gradient", "consensus"]


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies theta_ij of the parameters."""

    device_level: DeviceLevel = "gradient"  # One copy per host or one per device.
    axes: MeshAxes = ALONE  # Mesh axes; none is a single device.
    slicing: Slicing | None = None  # How trees lie in slices; None if they are whole.

    def layouts(self, groups: Sequence[ChannelGroup], tree: PyTree) -> Layouts:
        """Where channels are in a tree of parameters, or in part of one."""
        shapes = shapes_by_path(tree)
        if self.slicing is None:
            return layouts_of(groups, shapes)
        whole = {path: self.slicing.shapes[path] for path in shapes}
        return self.slicing.layouts(layouts_of(groups, whole))

    def num_per_host(self) -> int:
        """P of the equations: copies that one host holds."""
        is_consensus = self.device_level == "consensus"
        return axis_size(self.axes.device) if is_consensus else 1

    def spread(self, tree: PyTree) -> PyTree:
        """Types replicated or per_host values as every copy's own; moves nothing."""
        is_consensus = self.device_level == "consensus"
        return vary(tree, (self.axes.host, self.axes.device if is_consensus else None))

    def mean_in_host(self, tree: PyTree) -> PyTree:
        """Mean over the copies of a host, per_host.

        Collectives:
          device_level "consensus": as `comm.mean_over_devices`.
        """
        if self.device_level == "gradient":
            return tree
        return mean_over_devices(tree, self.axes)


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """One round, of all parameters or of a fragment; static."""

    form: HsadmmParameters
    copies: Copies  # Where copies of the parameters live.
    layouts: Layouts  # Where channels are in them.
    keep_counts: Mapping[str, int]  # K_g per group.
    kind: RoundKind = "moving"
