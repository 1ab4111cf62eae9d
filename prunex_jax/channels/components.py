"""Gathers joined labels into channel groups, and into what stays, with reasons.

Channels that occur in the same places form one group. It reads what `channels.trace`
left in the table of labels and `channels.resolve` concluded; the types of groups are in
`channels.groups`.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from prunex_jax.channels.groups import ChannelGroup, ChannelSlice
from prunex_jax.channels.labels import Reason
from prunex_jax.channels.resolve import Resolution

_SINGLE = Reason(
    "", "is one channel together with all it is tied to, and one must stay"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """One axis of one parameter, with the labels of its positions, int64[size]."""

    path: str
    axis: int
    labels: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenChannels:
    """Channels that occur together and must stay, for one reason.

    Attributes:
      reason: Why they stay.
      members: Where they occur among the parameters.
    """

    reason: Reason
    members: tuple[ChannelSlice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Bundle:
    """Channels that occur in the same places.

    Attributes:
      places: Index of a place per occurrence of a channel, ascending.
      positions: int32[num_channels, len(places)] position in each of them.
      reason: Index of the reason why they stay, or -1.
    """

    places: tuple[int, ...]
    positions: np.ndarray
    reason: int

    def slices(
        self, places: Sequence[Place], first: int, last: int
    ) -> tuple[ChannelSlice, ...]:
        """What lies in places `first` to `last`, the latter excluded."""
        owner = np.array(self.places)
        return tuple(
            ChannelSlice(
                places[index].path,
                places[index].axis,
                self.positions[:, owner == index],
            )
            for index in np.unique(owner).tolist()
            if first <= index < last
        )


def collect_groups(
    resolution: Resolution, weights: Sequence[Place], running: Sequence[Place]
) -> tuple[tuple[ChannelGroup, ...], tuple[FrozenChannels, ...]]:
    """Gathers channels into groups.

    Args:
      resolution: What is one channel, and what is frozen.
      weights: Every axis of every parameter, in the order in which members are listed.
      running: Every axis of every running statistic.
    Returns:
      Groups in order of their first places, and what stays.
    """
    component, first_reason = resolution.component, resolution.first_reason
    reasons = resolution.reasons
    places = [*weights, *running]
    groups: list[ChannelGroup] = []
    frozen: list[FrozenChannels] = []
    taken: collections.Counter[str] = collections.Counter()
    for bundle in _bundles(places, component, first_reason):
        members = bundle.slices(places, 0, len(weights))
        if not members:  # running statistics that no parameter is tied to
            continue
        if bundle.reason >= 0:
            frozen.append(FrozenChannels(reasons[bundle.reason], members))
            continue
        if len(bundle.positions) == 1:
            frozen.append(FrozenChannels(_SINGLE, members))
            continue
        base = members[0].path.removesuffix("/kernel")
        taken[base] += 1
        groups.append(
            ChannelGroup(
                name=base if taken[base] == 1 else f"{base}#{taken[base]}",
                size=len(bundle.positions),
                members=members,
                statistics=bundle.slices(places, len(weights), len(places)),
            )
        )
    return tuple(groups), tuple(frozen)


def _bundles(
    places: Sequence[Place], component: np.ndarray, first_reason: np.ndarray
) -> list[_Bundle]:
    """Finds the channels that occur in the same places, in order of their places."""
    sizes = [len(place.labels) for place in places]
    if not sum(sizes):
        return []
    channel = component[np.concatenate([place.labels for place in places])]
    place = np.repeat(np.arange(len(places)), sizes)
    position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    order = np.argsort(channel, kind="stable")  # channel by channel, place by place
    counts = np.bincount(channel)
    starts = np.cumsum(counts) - counts
    bundles = []
    for count in np.unique(counts[counts > 0]).tolist():
        # Channels with this many occurrences: one row each.
        rows = order[starts[counts == count][:, None] + np.arange(count)]
        reason = first_reason[channel[rows[:, :1]]]
        keys = np.concatenate([place[rows], reason], axis=1)
        # Neighbours mostly occur in the same places: rows are compared run by run.
        is_first = np.append(True, np.any(keys[1:] != keys[:-1], axis=1))
        unique, of_run = np.unique(keys[is_first], axis=0, return_inverse=True)
        which = of_run.ravel()[np.cumsum(is_first) - 1]
        positions = position[rows]
        order_in = np.lexsort((positions[:, 0], which))
        ends = np.cumsum(np.bincount(which))[:-1]
        parts = np.split(positions[order_in], ends)
        for (*where, why), part in zip(unique.tolist(), parts, strict=True):
            bundles.append(_Bundle(tuple(where), part, why))
    return sorted(bundles, key=lambda bundle: (bundle.places, bundle.reason))
