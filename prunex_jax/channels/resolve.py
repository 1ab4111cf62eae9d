"""Concludes which labels are one channel, and gathers channels into groups.

`resolve` reads a table of labels: first everything joined is put together, then axes
that consist of several are settled, one after the other, in the order of the program.
`collect_groups` puts channels that occur in the same places into one group, and what
stays beside them with its reasons. Where all factors of an axis may be cut, `factors`
knows the channels that are made of others.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.sparse import coo_array, csgraph

from prunex_jax.channels.factors import ALIVE, DEAD, Boxes, Factors, Unions
from prunex_jax.channels.groups import ChannelGroup, ChannelSlice
from prunex_jax.channels.labels import FROZEN, LabelTable, Product, Reason, has_channels

_SINGLE = Reason(
    "", "is one channel together with all it is tied to, and one must stay"
)
_ROWS = Reason("", "are rows of a table, or read a constant: no channels of their own")
_PAIRED = Reason("reshape", "makes an axis of it and of others of its own group")


@dataclasses.dataclass(frozen=True, eq=False)
class Resolution:
    """What a table of labels comes to."""

    component: np.ndarray  # int64[num_labels]; labels of one component are one channel.
    # int64[num_components] among `reasons`, -1 where it can be removed.
    first_reason: np.ndarray
    reasons: tuple[Reason, ...]
    status: np.ndarray  # int8[num_components], UNKNOWN, ALIVE, DEAD or both bits.
    # Components that are there if several others are -> those others.
    factors: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def conflict(self) -> Reason | None:
        """Why what is known beforehand cannot be; None if it can."""
        is_dead = (self.status & DEAD) > 0
        for index in np.flatnonzero(is_dead & (self.first_reason >= 0)):
            return self.reasons[self.first_reason[index]]
        if (is_dead & ((self.status & ALIVE) > 0)).any():
            return Reason("", "is tied to a channel that is kept")
        return None

    def is_alive(self) -> np.ndarray:
        """bool[num_labels + 2]; the last are those of GONE, -2, and UNIFORM, -1."""
        alive = (self.status & DEAD) == 0
        return np.append(alive[self.component], [False, True])


def resolve(
    table: LabelTable, status: np.ndarray | None = None, factors: Factors = "one"
) -> Resolution:
    """Finds what is joined and what is frozen.

    `status`, int8[some labels], is what is known of them beforehand.
    """
    num_components, component = _components(table, table.edges)
    first_reason = np.full(num_components, -1, np.int64)
    for index in reversed(range(len(table.frozen))):
        first_reason[component[table.frozen[index][0]]] = index
    known = np.zeros(num_components, np.int8)
    if status is not None:
        np.bitwise_or.at(known, component[: len(status)], status)
    reasons = [reason for _, reason in table.frozen]
    if not table.products:
        return Resolution(component, first_reason, tuple(reasons), known)
    unions = Unions(first_reason, known, reasons)
    boxes = Boxes(table.products if factors == "all" else (), component, unions)
    for product in table.products:
        if product in boxes:
            boxes.keep_apart(product)
        else:
            _settle(product, component, unions)
    made_of = boxes.concluded()
    roots = np.array([unions.root(i) for i in range(num_components)], np.int64)
    return Resolution(
        roots[component],
        np.array(unions.reason, np.int64)[roots],
        tuple(unions.reasons),
        np.array(unions.status, np.int8)[roots],
        made_of,
    )


def added_labels(table: LabelTable) -> np.ndarray:
    """Finds labels of what the function adds up that was made apart, as shortcuts are.

    What was made apart are channels of different parameters; scales, biases and the
    like are no parameters of their own here, but belong to what they are applied to.
    """
    _, owner = _components(table, table.applied)
    found = [np.zeros(0, np.int64)]
    for left, right in table.added:
        starts = (np.searchsorted(table.starts, x, "right") for x in (left, right))
        is_apart = np.not_equal(*starts) & (owner[left] != owner[right])
        found += [left[is_apart], right[is_apart]]
    return np.concatenate(found)


def factors_that_stay(
    table: LabelTable, resolution: Resolution
) -> dict[int, tuple[int, Reason]]:
    """Finds channels that are a part of a split axis whose other part must stay.

    Returns:
      Component -> length of the part that stays, and why. Parts that could be cut
      instead are left out.
    """
    found: dict[int, tuple[int, Reason]] = {}
    for product in table.products:
        flat = resolution.component[product.flat[product.flat > FROZEN]]
        for labels in product.factors if flat.size else ():
            own = resolution.component[labels[labels > FROZEN]]
            why = resolution.first_reason[own]
            if why.size and 0 <= why.min() and why.max() < len(table.frozen):
                stays = len(labels), resolution.reasons[why.min()]
                found.update(dict.fromkeys(flat.tolist(), stays))
    return found


def _components(
    table: LabelTable, edges: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[int, np.ndarray]:
    """Puts joined labels together: their number and int64[num_labels] which is whose.

    Most axes are joined as wholes, block with block, and few labels one by one.
    """
    blocks, singles = [], []
    for left, right in edges:
        pair = table.block_of(left), table.block_of(right)
        if None in pair:
            singles.append((left, right))
        else:
            blocks.append(pair)
    starts = np.array(table.starts)
    sizes = np.diff(starts, append=table.num_labels)
    _, which = _connected(np.array(blocks).reshape(-1, 2).T, len(starts))
    _, first = np.unique(which, return_index=True)
    shift = starts[first][which] - starts
    representative = np.arange(table.num_labels) + np.repeat(shift, sizes)
    is_one = np.repeat(shift == 0, sizes)
    component = (np.cumsum(is_one) - 1)[representative]
    count = int(is_one.sum())
    if not singles:
        return count, component
    pairs = np.stack([np.concatenate(side) for side in zip(*singles, strict=True)])
    count, further = _connected(component[pairs], count)
    return count, further[component]


def _connected(pairs: np.ndarray, size: int) -> tuple[int, np.ndarray]:
    """Connected components of a graph of edges int64[2, n]: how many, and whose."""
    graph = coo_array((np.ones(pairs.shape[1], np.int8), tuple(pairs)), (size, size))
    count, component = csgraph.connected_components(graph, directed=False)
    return count, component.astype(np.int64)


def _settle(product: Product, component: np.ndarray, unions: Unions) -> None:
    """Ties a flat axis to one of its factors and freezes the others."""
    roots = [unions.roots_of(labels, component) for labels in product.factors]
    best = _choose(product, roots, component, unions)
    sizes = " x ".join(str(len(labels)) for labels in product.factors)
    if best is None:
        text = f"consists of axes of {sizes}, none of which can be cut"
        reason = Reason(product.primitive, text, product.source)
        everything = [unions.roots_of(product.flat, component), *roots]
        for some in everything:
            unions.freeze(some, reason)
        return
    text = (
        f"belongs to an axis of {sizes}, of which the axis of "
        f"{len(product.factors[best])} is the one that is cut"
    )
    reason = Reason(product.primitive, text, product.source)
    for index, others in enumerate(roots):
        if index != best:
            unions.freeze(others, reason)
    _tie(product, best, component, unions)
    unions.chosen.update(unions.root(index) for index in roots[best])


def _tie(product: Product, best: int, component: np.ndarray, unions: Unions) -> None:
    labels = product.factors[best]
    rows = np.moveaxis(product.flat, best, 0).reshape(len(labels), -1)
    text = "ties it to an axis of fixed size"
    reason = Reason(product.primitive, text, product.source)
    for label, row in zip(labels.tolist(), rows, strict=True):
        members = unions.roots_of(row, component)
        if label > FROZEN:
            members.append(int(component[label]))
        for other in members[1:]:
            unions.join(members[0], other)
        if label == FROZEN or (row == FROZEN).any():
            unions.freeze(members, reason)


def _choose(
    product: Product, roots: list[list[int]], component: np.ndarray, unions: Unions
) -> int | None:
    """The factor to cut: one that was chosen before, or else the finest."""
    candidates = []
    for index, own in enumerate(roots):
        free = [i for i in own if unions.reason[i] < 0]
        others = [i for k, some in enumerate(roots) if k != index for i in some]
        is_dead = any(unions.status[i] & DEAD for i in others)
        if free and not is_dead and _agrees(product, index, component, unions):
            was_chosen = any(i in unions.chosen for i in free)
            candidates.append((not was_chosen, -len(free), index))
    return min(candidates)[2] if candidates else None


def _agrees(
    product: Product, index: int, component: np.ndarray, unions: Unions
) -> bool:
    """Whether no position of the factor is known to be both dead and alive."""
    if not any(unions.status):
        return True
    labels = product.factors[index]
    rows = np.moveaxis(product.flat, index, 0).reshape(len(labels), -1)
    for row in rows:
        if has_channels(row):
            known = [unions.status[i] for i in unions.roots_of(row, component)]
            if np.bitwise_or.reduce(known) == ALIVE | DEAD:
                return False
    return True


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
    """Channels that occur in the same places: int32[num_channels, len(places)]."""

    places: tuple[int, ...]
    positions: np.ndarray
    reason: int
    channels: np.ndarray  # int64[num_channels], components

    def overlaps(self) -> np.ndarray:
        """bool[num_channels, num_channels], whether two channels share a position."""
        count = len(self.positions)
        owner = np.repeat(np.arange(count), len(self.places))
        lies = (np.ones(owner.size, np.int32), (owner, self._places_taken()))
        return (coo_array(lies) @ coo_array(lies).T).toarray() > 0

    def has_overlaps(self) -> bool:
        """Whether any two channels share a position."""
        taken = self._places_taken()
        return len(np.unique(taken)) < len(taken)

    def _places_taken(self) -> np.ndarray:
        """int64[num_channels * len(places)], one number per place and position."""
        length = int(self.positions.max()) + 1
        return (np.array(self.places) * length + self.positions).ravel()

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
    resolution: Resolution,
    weights: Sequence[Place],
    running: Sequence[Place],
    added: np.ndarray,
    moving: np.ndarray,
) -> tuple[tuple[ChannelGroup, ...], tuple[FrozenChannels, ...]]:
    """Gathers channels into groups, in order of their first places, and what stays.

    Args:
      resolution: What labels come to.
      weights: Axes of the parameters.
      running: Axes of the running statistics.
      added: int64[num_added] components of what shortcuts add up.
      moving: int64[num_moving] components that something computed has; see
        `LabelTable.moving`.
    """
    reasons = resolution.reasons
    places = [*weights, *running]
    groups: list[ChannelGroup] = []
    frozen: list[FrozenChannels] = []
    taken: collections.Counter[str] = collections.Counter()
    made_of = [resolution.factors.get(one, ()) for one in np.unique(added).tolist()]
    added = np.concatenate([added, *(np.array(own, np.int64) for own in made_of)])
    bundles = [part for b in _bundles(places, resolution) for part in _divided(b)]
    for bundle in bundles:
        members = bundle.slices(places, 0, len(weights))
        if not members:  # running statistics that no parameter is tied to
            continue
        if bundle.reason >= 0:
            frozen.append(FrozenChannels(reasons[bundle.reason], members))
            continue
        if len(bundle.positions) == 1:
            frozen.append(FrozenChannels(_SINGLE, members))
            continue
        if bundle.has_overlaps():
            frozen.append(FrozenChannels(_PAIRED, members))
            continue
        if len(members) == 1 and not np.isin(bundle.channels, moving).any():
            frozen.append(FrozenChannels(_ROWS, members))
            continue
        base = members[0].path.removesuffix("/kernel")
        taken[base] += 1
        groups.append(
            ChannelGroup(
                name=base if taken[base] == 1 else f"{base}#{taken[base]}",
                size=len(bundle.positions),
                members=members,
                statistics=bundle.slices(places, len(weights), len(places)),
                is_inner=not np.isin(bundle.channels, added).any(),
            )
        )
    return tuple(groups), tuple(frozen)


def _divided(bundle: _Bundle) -> list[_Bundle]:
    """Tells factors of an axis apart that lie in the same places, as often each.

    Of as many heads as features, those of one kind share no position, and each shares
    some with all of the other kind.
    """
    if not bundle.has_overlaps():
        return [bundle]
    is_apart = ~bundle.overlaps()
    count, kind = _connected(np.argwhere(is_apart).T, len(is_apart))
    parts = [
        dataclasses.replace(
            bundle, positions=bundle.positions[own], channels=bundle.channels[own]
        )
        for own in (kind == number for number in range(count))
    ]
    is_told_apart = not any(part.has_overlaps() for part in parts)
    return parts if is_told_apart and count < len(kind) else [bundle]


def _owners(
    component: np.ndarray, resolution: Resolution
) -> tuple[np.ndarray, np.ndarray]:
    """Whose positions of some components are: their own, or what they are made of.

    Gives int64[num_owned] channels, and which of the positions they own. Of what a
    position is made of, what stays is left out.
    """
    own = {
        root: free
        for root, parts in resolution.factors.items()
        if (free := [p for p in parts if resolution.first_reason[p] < 0])
    }
    which = np.arange(len(component))
    if not own:
        return component, which
    owners = [own.get(root, [root]) for root in component.tolist()]
    counts = [len(each) for each in owners]
    return np.array([o for each in owners for o in each]), np.repeat(which, counts)


def _bundles(places: Sequence[Place], resolution: Resolution) -> list[_Bundle]:
    """Finds the channels that occur in the same places, in order of their places."""
    sizes = [len(place.labels) for place in places]
    if not sum(sizes):
        return []
    labels = np.concatenate([place.labels for place in places])
    place = np.repeat(np.arange(len(places)), sizes)
    position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    channel, which = _owners(resolution.component[labels], resolution)
    place, position = place[which], position[which]
    first_reason = resolution.first_reason
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
        owners = np.split(channel[rows[order_in, 0]], ends)
        for (*where, why), part, own in zip(
            unique.tolist(), parts, owners, strict=True
        ):
            bundles.append(_Bundle(tuple(where), part, why, own))
    return sorted(bundles, key=lambda bundle: (bundle.places, bundle.reason))
