"""Concludes which labels are one channel, and gathers channels into groups.

`resolve` reads a table of labels: first everything joined is put together, then axes
that consist of several are settled, one after the other, in the order of the program,
and once more where a choice left too little.
`collect_groups` puts channels that occur in the same places into one group, and what
stays beside them with its reasons. Where all factors of an axis may be cut, `factors`
knows the channels that are made of others.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from scipy.sparse import coo_array, csgraph

from prunex_jax.channels.factors import ALIVE, DEAD, Boxes, Factors, Unions
from prunex_jax.channels.groups import ChannelGroup, ChannelSlice
from prunex_jax.channels.labels import FROZEN, LabelTable, Reason
from prunex_jax.channels.settle import Choice, balance, settle

# A product, by its number in the table, and one of its factors.
FactorName = tuple[int, int]
# How often all is settled at most to find which factors leave the most.
_MOST_TRIALS = 16

_SINGLE = Reason(
    "", "is one channel together with all it is tied to, and one must stay"
)
_ROWS = Reason(
    "",
    "are rows of a table, or read a constant: no channels of their own",
    is_inherent=True,
)
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

    Of an axis that consists of several, a factor may be chosen of which less is left
    in the end than of another one. Then that one is tried, and what leaves the most
    channels is the answer.

    Args:
      table: What the walk found.
      status: int8[some labels], what is known of them beforehand.
      factors: Whether one factor of an axis can be cut, or all.
    """
    num_components, component = _components(table, table.edges)
    first_reason = np.full(num_components, -1, np.int64)
    for index in reversed(range(len(table.frozen))):
        first_reason[component[table.frozen[index][0]]] = index
    known = np.zeros(num_components, np.int8)
    reasons = tuple(reason for _, reason in table.frozen)
    before = Resolution(component, first_reason, reasons, known)
    if status is not None:
        np.bitwise_or.at(known, component[: len(status)], status)
    if not table.products:
        return before
    if status is None:
        return _best(table, before, factors)[1]
    found, _ = _settled(table, before, factors)
    if found.conflict() is None:
        return found
    # As is chosen where nothing is known.
    unknown = dataclasses.replace(before, status=np.zeros_like(known))
    barred, _ = _best(table, unknown, factors)
    return _settled(table, before, factors, barred)[0]


def _settled(
    table: LabelTable,
    before: Resolution,
    factors: Factors,
    barred: frozenset[FactorName] = frozenset(),
) -> tuple[Resolution, list[tuple[int, Choice]]]:
    """Settles axes that consist of several, and says what was chosen."""
    component = before.component
    unions = Unions(before.first_reason, before.status, list(before.reasons))
    boxes = Boxes(table.products if factors == "all" else (), component, unions)
    choices = []
    for number, product in enumerate(table.products):
        if product in boxes:
            boxes.keep_apart(product)
        else:
            own = {factor for which, factor in barred if which == number}
            chosen = settle(product, component, unions, own)
            choices += [] if chosen is None else [(number, chosen)]
    for number, chosen in choices:
        if chosen.factor == table.products[number].loose:
            balance(table.products[number], component, unions)
    made_of = boxes.concluded()
    roots = np.array([unions.root(i) for i in range(len(before.status))], np.int64)
    resolution = Resolution(
        roots[component],
        np.array(unions.reason, np.int64)[roots],
        tuple(unions.reasons),
        np.array(unions.status, np.int8)[roots],
        made_of,
    )
    return resolution, choices


def _best(
    table: LabelTable, before: Resolution, factors: Factors
) -> tuple[frozenset[FactorName], Resolution]:
    """Which factors not to choose so that the least must stay, and what then stays."""
    barred: frozenset[FactorName] = frozenset()
    tried: list[tuple[frozenset[FactorName], Resolution]] = []
    while len(tried) < _MOST_TRIALS:
        found, choices = _settled(table, before, factors, barred)
        tried.append((barred, found))
        futile = _futile(table, found, choices)
        if not futile:
            break
        barred |= futile
    return max(tried, key=lambda each: _what_goes(table, each[1]))


def _futile(
    table: LabelTable, found: Resolution, choices: Sequence[tuple[int, Choice]]
) -> frozenset[FactorName]:
    """The first choice that left less than another one promised, and those like it."""

    def form(number: int, choice: Choice) -> tuple[int, ...]:
        return (*table.products[number].flat.shape, choice.factor)

    for number, choice in choices:
        labels = table.products[number].factors[choice.factor]
        own = np.unique(found.component[labels[labels > FROZEN]])
        if (found.first_reason[own] < 0).sum() < choice.most_of_others:
            same = form(number, choice)
            return frozenset(
                (other, each.factor)
                for other, each in choices
                if form(other, each) == same
            )
    return frozenset()


def _what_goes(table: LabelTable, found: Resolution) -> tuple[float, int]:
    """Share of the axes of parameters that can be cut, in hundredths; channels."""
    labels = np.concatenate([np.zeros(0, np.int64), *(own for own, _ in table.entries)])
    counts = np.repeat(
        [count for _, count in table.entries], [len(own) for own, _ in table.entries]
    )
    owner = found.component[labels]
    is_free = found.first_reason[owner] < 0
    share = counts[is_free].sum() / max(counts.sum(), 1)
    return round(float(share), 2), len(np.unique(owner[is_free]))


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
    for bundle, is_paired in _told_apart(_bundles(places, resolution)):
        members = bundle.slices(places, 0, len(weights))
        if not members:  # running statistics that no parameter is tied to
            continue
        if bundle.reason >= 0:
            frozen.append(FrozenChannels(reasons[bundle.reason], members))
            continue
        if len(bundle.positions) == 1:
            frozen.append(FrozenChannels(_SINGLE, members))
            continue
        if is_paired:
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


def _told_apart(bundles: Iterable[_Bundle]) -> Iterator[tuple[_Bundle, bool]]:
    """Bundles that can be cut, factor by factor of an axis, and all others as they are.

    Of as many heads as features, which lie in the same places as often, those of one
    kind share no position, and each shares some with all of the other kind.

    Yields:
      A bundle, and whether channels of it share positions all the same.
    """
    for bundle in bundles:
        if bundle.reason >= 0 or not bundle.has_overlaps():
            yield bundle, False
            continue
        is_apart = ~bundle.overlaps()
        count, kind = _connected(np.argwhere(is_apart).T, len(is_apart))
        parts = [
            dataclasses.replace(
                bundle, positions=bundle.positions[own], channels=bundle.channels[own]
            )
            for own in (kind == number for number in range(count))
        ]
        if count == len(kind) or any(part.has_overlaps() for part in parts):
            yield bundle, True
        else:
            yield from ((part, False) for part in parts)


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
