"""Finds the channel groups of any JAX function by walking its traced program.

It owns the walk and what is said about it; `channels.rules` says what each primitive
does, `channels.labels` keeps the books and `channels.components` gathers groups. It
knows no framework: the function is `apply(params, *inputs)`, whoever wrote it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree
from prunex_jax.channels.components import (
    FrozenChannels,
    Place,
    collect_groups,
)
from prunex_jax.channels.groups import ChannelGroup, ChannelSlice
from prunex_jax.channels.labelling import Labelled, TraceOptions, label_function
from prunex_jax.channels.labels import Reason, Traced
from prunex_jax.channels.resolve import resolve

_MAX_NAMED = 4


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelTrace:
    """What `trace_channels` found.

    Attributes:
      groups: Channels that can be removed, in the order in which they are made.
      frozen: Positions that must stay, with the reason.
      shapes: Shape of every parameter by path.
      options: How the function was traced.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: tuple[FrozenChannels, ...]
    shapes: Mapping[str, tuple[int, ...]]
    options: TraceOptions

    def explain(self, path: str | None = None) -> str:
        """Says for every axis of a parameter which group it is in, or why it stays.

        An axis of several owners has a line for each, with their positions. What stays
        names the operation that ties it, the line it comes from, and the parameters
        that are tied by it.

        Args:
          path: Path of the parameter; None for all.
        Returns:
          Lines in the order of axes and positions.
        Raises:
          UserError: There is no such parameter.
        """
        if path is None:
            return "\n".join(self.explain(each) for each in self.shapes)
        if path not in self.shapes:
            raise UserError(
                f"no parameter {path!r}; there are {', '.join(self.shapes)}"
            )
        shape = self.shapes[path]
        lines = [
            f"{path} axis {axis} ({size}){where}: {what}"
            for axis, size in enumerate(shape)
            for _, where, what in sorted(self._owners(path, axis, size))
        ]
        return "\n".join(lines) or f"{path}: stays; is a single number"

    def _owners(self, path: str, axis: int, size: int) -> list[tuple[int, str, str]]:
        """(first position, which positions, who has them or why they stay)."""
        found = [] if size else [(0, "", "is empty")]

        def add(member: ChannelSlice, what: str) -> None:
            if (member.path, member.axis) == (path, axis):
                positions = np.sort(member.positions, axis=None)
                where = "" if len(positions) == size else f", {_ranges(positions)}"
                found.append((int(positions[0]), where, what))

        for group in self.groups:
            for member in group.members:
                width = member.positions.shape[1]
                of = f" of {width} positions" if width > 1 else ""
                add(member, f"group {group.name}, {group.size} channels{of}")
        for staying in self.frozen:
            for member in staying.members:
                also = _together_with(staying, path, axis)
                add(member, f"stays; {staying.reason}{also}")
        return found

    def prunable_share(self) -> float:
        """Share of the parameters that lie in some prunable group."""
        free = {path: list(shape) for path, shape in self.shapes.items()}
        for group in self.groups:
            for member in group.members:
                free[member.path][member.axis] -= member.positions.size
        total = sum(math.prod(shape) for shape in self.shapes.values())
        return 1 - sum(math.prod(sizes) for sizes in free.values()) / max(total, 1)


def _ranges(positions: np.ndarray) -> str:
    """Names sorted positions: `positions 0-7 and 16-23`."""
    ends = np.flatnonzero(np.diff(positions) > 1)
    starts = positions[np.concatenate([[0], ends + 1])]
    stops = positions[np.concatenate([ends, [len(positions) - 1]])]
    if len(starts) > _MAX_NAMED:
        return f"{len(positions)} positions from {starts[0]} to {stops[-1]}"
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return "positions " + " and ".join(
        f"{a}-{b}" if a < b else f"{a}" for a, b in pairs
    )


def _together_with(owner: FrozenChannels, path: str, axis: int) -> str:
    others = [
        f"{member.path} axis {member.axis}"
        for member in owner.members
        if (member.path, member.axis) != (path, axis)
    ]
    if not others:
        return ""
    more = len(others) - _MAX_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"; together with {', '.join(others[:_MAX_NAMED])}{rest}"


def trace_channels(
    apply: Callable[..., Any],
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
    **options: Any,
) -> ChannelTrace:
    """Finds which channels of which parameters can only be removed together.

    Walks the program of `apply` and follows what every position of every axis is tied
    to. Channels that occur together form one `ChannelGroup`; masking them and cutting
    them out give the same outputs. What a primitive without a rule touches stays, as do
    the axes of inputs and outputs.

    Where an axis is split, such as into heads and their features, one of the parts is
    cut: one that is tied to what was cut elsewhere, or else the finest.

    Args:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)` where
        `statistics` is given.
      params: Parameters, or their shapes (`jax.ShapeDtypeStruct`).
      *inputs: Example inputs, or their shapes.
      statistics: Running statistics shaped like channels but not trained or masked,
        such as those of batch norm.
      **options: Fields of `TraceOptions`. With `renormalise=True`, sums over channels
        that are divided by their number become means over the kept ones, so that the
        channels of a layer norm can be removed; the smaller function is then another
        one, and `shrink.certify` says by how much.
    Returns:
      The groups and the reasons for what stays.
    Raises:
      UserError: Two leaves have one path, a rule returned other shapes than its
        primitive, or `freeze` or `merge` name what is not there.
    Example:
      >>> import jax.numpy as jnp
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> params = {'in': jnp.ones((3, 8)), 'out': jnp.ones((8, 2))}
      >>> trace = trace_channels(apply, params, jnp.ones((1, 3)))
      >>> [(g.name, g.size, [(m.path, m.axis) for m in g.members])
      ...  for g in trace.groups]
      [('in', 8, [('in', 1), ('out', 0)])]
      >>> print(trace.explain('out').split(' at ')[0])
      out axis 0 (8): group in, 8 channels
      out axis 1 (2): stays; is an output of the function
    """
    chosen = TraceOptions(**options)
    found = label_function(apply, params, inputs, statistics, chosen)
    unread = () if chosen.returns_statistics else found.running.values()
    for value in [*found.weights.values(), *unread]:
        if value not in found.first_use:
            for labels in value.labels:
                found.table.freeze(labels, Reason("", "is not used"))
    resolution = resolve(found.table)
    groups, frozen = collect_groups(
        resolution,
        _places(found, found.weights),
        _places(found, found.running),
    )
    shapes = {path: value.shape for path, value in found.weights.items()}
    return ChannelTrace(groups, frozen, shapes, chosen)


def _places(found: Labelled, values: Mapping[str, Traced]) -> list[Place]:
    """Every axis of every parameter, earliest use first: made before read."""
    never = len(found.first_use)
    order = sorted(values.items(), key=lambda item: found.first_use.get(item[1], never))
    return [
        Place(path, axis, labels)
        for path, value in order
        for axis, labels in enumerate(value.labels)
    ]
