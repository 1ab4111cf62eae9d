"""Channel groups: which positions of which parameter axes live or die together.

Groups are found by `trace`, used by `slicing`, and know neither models nor meshes.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from prunex_jax.base.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelSlice:
    """The positions that the channels of one group occupy on one parameter axis.

    Attributes:
      path: Path of the leaf, as `trees.flatten_by_path` names it.
      axis: The axis of that leaf.
      positions: int32[size, width]; row c lists what channel c owns. Width is 1 for a
        plain kernel axis, and 16 for the rows of a dense layer behind a flattened 4x4
        map.
    """

    path: str
    axis: int
    positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Channels that can only be removed together, wherever they occur.

    Attributes:
      name: Unique and readable; the path of the member that first makes the channels.
      size: Number of channels.
      members: Every place the channels occupy among the parameters, at most one entry
        per (path, axis).
      statistics: The same among running statistics, which are cut with the channels
        but neither trained nor counted in scores.
      is_inner: Whether no sum ties channels that different operations make, as the
        shortcut of a residual block does: the group is inside of a block.
    """

    name: str
    size: int
    members: tuple[ChannelSlice, ...]
    statistics: tuple[ChannelSlice, ...] = ()
    is_inner: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class AxisBlock:
    """Positions of an axis that belong to a channel of each of some groups.

    Of one group, mostly. An axis that is made of several, such as heads and their
    features, has a block of several groups: a position stays if its head does and its
    feature does.
    """

    names: tuple[str, ...]  # Names of the groups.
    positions: np.ndarray  # int32[*sizes of the groups, width].

    def kept_size(self, keep_counts: Mapping[str, int]) -> int:
        """Number of positions when each group keeps `keep_counts[name]` channels."""
        width = self.positions.shape[-1]
        return math.prod(keep_counts[name] for name in self.names) * width


@dataclasses.dataclass(frozen=True, eq=False)
class AxisLayout:
    """How one parameter axis is divided between channel groups and the rest.

    Attributes:
      size: Length of the axis.
      slices: (group name, int32[size_of_group, width] positions), one per group. A
        position that several own stays if it does in all of them.
      free: int32[num_free]; positions that belong to no group and always stay.
      window: Mesh axis over which the axis lies in slices, one per device, of which the
        last may be filled up; None if it is whole.
    """

    size: int
    slices: tuple[tuple[str, np.ndarray], ...]
    free: np.ndarray
    window: str | None = None

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for axes that are divided alike, so that work on them is shared."""
        parts = tuple((name, pos.tobytes(), pos.shape) for name, pos in self.slices)
        return (self.size, parts, self.window)

    @functools.cached_property
    def blocks(self) -> tuple[AxisBlock, ...]:
        """Positions by the groups that own them, in order of these groups.

        Raises:
          ValueError: Groups share positions, and not one number of them for every
            choice of one channel of each.
        """
        claimed = np.zeros(self.size, np.int64)
        for _, positions in self.slices:
            claimed[positions] += 1
        if claimed.max(initial=0) <= 1:  # as mostly
            return tuple(AxisBlock((name,), pos) for name, pos in self.slices)
        owners = np.full((len(self.slices), self.size), -1, np.int64)
        for index, (_, positions) in enumerate(self.slices):
            owners[index, positions] = np.arange(len(positions))[:, None]
        is_owner, which = np.unique(owners >= 0, axis=1, return_inverse=True)
        blocks = []
        for number, column in enumerate(is_owner.T):
            if column.any():
                members = np.flatnonzero(which.ravel() == number).astype(np.int32)
                chosen = [self.slices[i] for i in np.flatnonzero(column)]
                blocks.append(_block_of(chosen, owners[column][:, members], members))
        return tuple(blocks[::-1])

    @functools.cached_property
    def is_in_order(self) -> bool:
        """Whether one block is the whole axis, channel after channel."""
        if len(self.blocks) != 1 or len(self.free):
            return False
        return bool(np.all(np.diff(self.blocks[0].positions.ravel()) > 0))

    def kept_size(self, keep_counts: Mapping[str, int]) -> int:
        """Length of the axis when each group keeps `keep_counts[name]` channels."""
        kept = sum(block.kept_size(keep_counts) for block in self.blocks)
        return kept + len(self.free)


def _block_of(
    slices: Sequence[tuple[str, np.ndarray]], owners: np.ndarray, members: np.ndarray
) -> AxisBlock:
    """The block of some positions, int32[n], that channels int64[groups, n] own."""
    names = tuple(name for name, _ in slices)
    sizes = tuple(len(positions) for _, positions in slices)
    which = np.ravel_multi_index(tuple(owners), sizes)
    counts = np.bincount(which, minlength=math.prod(sizes))
    if (counts != counts[0]).any():
        raise ValueError("no box")
    in_order = members[np.argsort(which, kind="stable")]
    return AxisBlock(names, in_order.reshape(*sizes, -1))


Layouts = Mapping[str, Mapping[int, AxisLayout]]


def windowed(layouts: Layouts, axes: Mapping[str, int], window: str) -> Layouts:
    """Layouts of arrays that lie in slices over the devices of a mesh axis.

    Args:
      layouts: Of the whole arrays.
      axes: Of every array, the axis along which it is cut in slices.
      window: The mesh axis.
    """
    return {
        path: {
            axis: dataclasses.replace(layout, window=window)
            if axis == axes[path]
            else layout
            for axis, layout in by_axis.items()
        }
        for path, by_axis in layouts.items()
    }


def kept_shape(
    shape: Sequence[int],
    axes: Mapping[int, AxisLayout] | None,
    keep_counts: Mapping[str, int],
) -> tuple[int, ...]:
    """Shape that is left of a leaf.

    Args:
      shape: Shape of the leaf.
      axes: Layouts of its touched axes, if it has any.
      keep_counts: Kept channels of every group.
    """
    known = axes or {}
    return tuple(
        known[axis].kept_size(keep_counts) if axis in known else size
        for axis, size in enumerate(shape)
    )


def layouts_of(
    groups: Iterable[ChannelGroup],
    shapes: Mapping[str, tuple[int, ...]],
    of: Literal["members", "statistics"] = "members",
) -> dict[str, dict[int, AxisLayout]]:
    """Turns groups inside out: who owns which position of every touched axis.

    Args:
      groups: Channel groups.
      shapes: Shape of every leaf by path. Members whose path is absent are skipped, so
        that one list of groups serves a whole tree and parts of it.
      of: Which of the two trees of a group the shapes belong to.
    Returns:
      path -> axis -> AxisLayout, for touched axes only.
    Raises:
      UserError: Two channels of a group claim one position, two groups claim one and
        are not the factors of an axis, a position lies outside its axis, or a member
        does not list positions for every channel.
    """
    claims: dict[tuple[str, int], list[tuple[str, np.ndarray]]] = {}
    for group in groups:
        for member in getattr(group, of):
            if member.path in shapes:
                _check_member(group, member, shapes[member.path])
                claims.setdefault((member.path, member.axis), []).append(
                    (group.name, np.asarray(member.positions, np.int32))
                )
    layouts: dict[str, dict[int, AxisLayout]] = {}
    for (path, axis), slices in claims.items():
        size = shapes[path][axis]
        taken = np.concatenate([positions.ravel() for _, positions in slices])
        if taken.min() < 0 or taken.max() >= size:
            raise UserError(
                f"channel groups claim positions outside axis {axis} of {path} "
                f"(length {size}); trace the groups again for this tree"
            )
        free = np.setdiff1d(np.arange(size, dtype=np.int32), taken)
        layout = AxisLayout(size, tuple(slices), free)
        _check_reservations(layout, path, axis)
        layouts.setdefault(path, {})[axis] = layout
    # In the order of the axes, so that leaves that are cut alike compile alike.
    return {path: dict(sorted(axes.items())) for path, axes in layouts.items()}


def _check_reservations(layout: AxisLayout, path: str, axis: int) -> None:
    """Refuses positions that are claimed twice, but by the groups of one block."""
    try:
        num_claimed = sum(block.positions.size for block in layout.blocks)
    except ValueError:
        num_claimed = -1
    if num_claimed + len(layout.free) != layout.size:
        names = ", ".join(name for name, _ in layout.slices)
        raise UserError(
            f"axis {axis} of {path} has a position claimed twice (groups {names}); "
            "merge those groups"
        )


def _check_member(
    group: ChannelGroup, member: ChannelSlice, shape: tuple[int, ...]
) -> None:
    where = f"channel group {group.name} in {member.path}"
    if not 0 <= member.axis < len(shape):
        raise UserError(
            f"{where}: axis {member.axis} does not exist in shape {shape}; axes count "
            "from 0"
        )
    positions = np.shape(member.positions)
    if len(positions) != 2 or positions[0] != group.size:
        raise UserError(
            f"{where}: positions of shape {positions} should be "
            f"({group.size}, positions per channel)"
        )
