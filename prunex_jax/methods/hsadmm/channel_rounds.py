"""Channel rounds: rounds that send some of the channels, and nothing is pruned.

What a copy has moved of a channel that is not sent stays in theta - z, and is sent when
its turn comes: nothing else is kept for that. An entry of a kernel carries an input and
an output channel. If it were sent only with both, half of the channels would be a
quarter of the entries, and pairs would rarely meet. So each entry belongs to one
channel here, along one axis of its parameter: a share of the channels is that share of
the bytes, and what is scored is what is sent. Entries of no group are always sent.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.channels import (
    AxisLayout,
    ChannelGroup,
    ChannelSlice,
    KeepIndices,
    Layouts,
    Masks,
    layouts_of,
    mask_of,
    merge_channels,
    put_channels,
    sum_squares_by_channel,
    take_channels,
)
from prunex_jax.comm import Slicing, sum_over_hosts, sum_over_slices
from prunex_jax.mesh import MeshAxes
from prunex_jax.sparsity import choose_keep_indices

# moved: those that moved most since they were last sent, over all hosts.
# rotation: one after the other.
ChannelChoice = Literal["moved", "rotation"]
# Shares like 0.1 are not exact: 30 channels have 3, not 4, of them.
_ROUNDING = 1e-9


class SentChannels(NamedTuple):
    """The channels that a round sends."""

    layouts: Layouts  # Where they are.
    keep_indices: KeepIndices  # int32[count] per group, sorted, replicated.
    # bool[size] per group, True where sent; None where nothing stays behind.
    masks: Masks | None = None
    slicing: Slicing | None = None  # How trees lie in slices; None if they are whole.

    def take(self, tree: PyTree) -> PyTree:
        """What is sent of a tree, in smaller leaves.

        Collectives:
          Of slices, as `Slicing.take_kept`.
        """
        if self.slicing is not None:
            return self.slicing.take_kept(tree, self.layouts, self.keep_indices)
        return take_channels(tree, self.layouts, self.keep_indices)

    def put(self, tree: PyTree) -> PyTree:
        """Puts it back where it came from, zeros elsewhere.

        Collectives:
          Of slices, as `Slicing.put_kept`.
        """
        if self.slicing is not None:
            return self.slicing.put_kept(tree, self.layouts, self.keep_indices)
        return put_channels(tree, self.layouts, self.keep_indices)

    def over(self, tree: PyTree, others: PyTree) -> PyTree:
        """A tree where channels are sent, and another one where they stay behind."""
        if self.masks is None:
            return tree
        return merge_channels(tree, others, self.layouts, self.masks)


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelRounds:
    """Which channels each round sends; `make_channel_rounds` makes it.

    Attributes:
      groups: Channel groups of which every entry has one at most.
      counts: Static number of channels that a round sends, per group.
      choice: Which.
    """

    groups: Sequence[ChannelGroup]
    counts: Mapping[str, int]
    choice: ChannelChoice = "moved"

    @property
    def num_scores(self) -> int:
        """Numbers that hosts add up to agree on channels."""
        if self.choice == "rotation":
            return 0
        return sum(group.size for group in self.groups)

    def layouts(self, shapes: Mapping[str, tuple[int, ...]]) -> Layouts:
        """Where the channels are in a tree of these shapes."""
        return layouts_of(self.groups, shapes)

    def choose(
        self,
        difference: PyTree,
        num_rounds: jax.Array,
        axes: MeshAxes,
        slicing: Slicing | None = None,
    ) -> SentChannels:
        """Chooses the channels of a round, the same on every host.

        Args:
          difference: What hosts would send, per_host.
          num_rounds: int32[], replicated; rounds before this one.
          axes: Mesh axes.
          slicing: How the difference lies in slices; None if it is whole.
        Returns:
          The channels.
        Collectives:
          "moved": one float32 per channel as `comm.sum_over_hosts`, and of slices
          before that as `comm.sum_over_slices`.
        """
        if slicing is None:
            layouts = self.layouts(shapes_by_path(difference))
        else:
            layouts = slicing.layouts(self.layouts(slicing.shapes))
        if self.choice == "rotation":
            chosen = self._in_turn(num_rounds)
        else:
            scores = sum_squares_by_channel(difference, layouts)
            scores = sum_over_slices(scores, axes)
            chosen = choose_keep_indices(sum_over_hosts(scores, axes), self.counts)
        masks = {
            group.name: mask_of(chosen[group.name], group.size) for group in self.groups
        }
        return SentChannels(layouts, chosen, masks, slicing)

    def _in_turn(self, num_rounds: jax.Array) -> dict[str, jax.Array]:
        """The next channels of every group, from the first again after the last."""
        chosen = {}
        for group in self.groups:
            count, size = self.counts[group.name], group.size
            start = num_rounds % size * count  # the product of both may not fit
            turn = (start + jnp.arange(count, dtype=jnp.int32)) % size
            chosen[group.name] = jnp.sort(turn)
        return chosen


def make_channel_rounds(
    groups: Sequence[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    share: float,
    choice: ChannelChoice,
) -> ChannelRounds:
    """Lays out rounds that send a share of the channels of every group.

    Args:
      groups: Channel groups of the parameters.
      shapes: Shape of every parameter by path.
      share: In (0, 1]; rounded up to whole channels, so that in rotation every channel
        is sent once in ceil(1 / share) rounds, or before.
      choice: Which channels.
    Raises:
      UserError: The network has no channel groups, or there is no such choice.
    Example:
      >>> kernel = ChannelSlice('kernel', 1, np.arange(16)[:, None])
      >>> groups = [ChannelGroup('a', 16, (kernel,))]
      >>> make_channel_rounds(groups, {'kernel': (3, 16)}, 0.3, 'moved').counts
      {'a': 5}
    """
    if choice not in ("moved", "rotation"):
        raise UserError(f"channel_choice={choice!r} must be moved or rotation")
    if not 0 < share <= 1:
        raise UserError(f"channel_share={share} must lie in (0, 1]")
    own = groups_of_entries(groups, shapes)
    if not own:
        raise UserError(
            f"channel_share={share} needs channels, and the network has no channel "
            "groups; set it to 1, and send less with rounds.top_k or a narrow wire"
        )
    counts = {group.name: math.ceil(share * group.size - _ROUNDING) for group in own}
    return ChannelRounds(own, counts, choice)


def groups_of_entries(
    groups: Sequence[ChannelGroup], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ChannelGroup, ...]:
    """Leaves every entry in one channel at most.

    Of a parameter, the last axis that carries channels decides, which in kernels of
    Flax is that of what they make. Of an axis that is made of several groups, such as
    heads and their features, it is that with most channels.

    Args:
      groups: Channel groups of the parameters.
      shapes: Shape of every parameter by path.
    Returns:
      The groups that are left with entries, with members on these axes only.
    """
    sizes = {group.name: group.size for group in groups}
    members: dict[str, list[ChannelSlice]] = {name: [] for name in sizes}
    for path, axes in layouts_of(groups, shapes).items():
        axis = max(axes)
        for name, positions in _owners(axes[axis], sizes).items():
            members[name].append(ChannelSlice(path, axis, positions))
    return tuple(
        dataclasses.replace(group, members=tuple(members[group.name]), statistics=())
        for group in groups
        if members[group.name]
    )


def _owners(layout: AxisLayout, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Positions of an axis by the one group that they are left to."""
    found: dict[str, list[np.ndarray]] = {}
    for block in layout.blocks:
        name = max(block.names, key=sizes.__getitem__)
        rows = np.moveaxis(block.positions, block.names.index(name), 0)
        found.setdefault(name, []).append(rows.reshape(len(rows), -1))
    return {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
