"""Channels that are made of others: heads and their features, on one flat axis.

A `Product` says that positions of a flat axis are pairs, or more, of positions of other
axes. Either one of these factors is cut and the flat axis is tied to it, which
`resolve` settles, or all of them may be: then a position of the flat axis is there if
all that it is made of are, so that what is left is again a full box. `Boxes` finds
where that is possible and keeps the books.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from prunex_jax.channels.labels import FROZEN, Product, Reason

# Which factors of a flat axis can be cut.
Factors = Literal["one", "all"]
# What is known beforehand of a channel.
UNKNOWN, ALIVE, DEAD = 0, 1, 2
# A factor of a position that is no channel, and stays.
_STAYS = -1


class Unions:
    """Components that are put together further, one pair at a time."""

    def __init__(
        self, first_reason: np.ndarray, status: np.ndarray, reasons: list[Reason]
    ) -> None:
        self.parent = list(range(len(first_reason)))
        self.reason: list[int] = first_reason.tolist()
        self.status: list[int] = status.tolist()
        self.reasons = reasons
        self.chosen: set[int] = set()

    def root(self, index: int) -> int:
        """The component that one belongs to now."""
        parent = self.parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def join(self, one: int, other: int) -> None:
        """Puts two components together."""
        a, b = self.root(one), self.root(other)
        if a == b:
            return
        self.parent[b] = a
        self.status[a] |= self.status[b]
        if self.reason[a] < 0:
            self.reason[a] = self.reason[b]
        if b in self.chosen:
            self.chosen.add(a)

    def freeze(self, indices: Iterable[int], reason: Reason) -> None:
        """Keeps components for a reason, those that have none yet."""
        number = -1
        for index in indices:
            root = self.root(index)
            if self.reason[root] < 0:
                if number < 0:
                    number = len(self.reasons)
                    self.reasons.append(reason)
                self.reason[root] = number

    def roots_of(self, labels: np.ndarray, component: np.ndarray) -> list[int]:
        """Distinct channels among labels."""
        own = np.unique(component[labels[labels > FROZEN]])
        return list(dict.fromkeys(self.root(i) for i in own.tolist()))


class Boxes:
    """The products of which all factors may be cut.

    Those of reshapes whose positions are channels of their own, of which two or more
    factors can be cut, where all products with these positions divide them alike.

    Args:
      products: All products.
      component: int64[num_labels], which component a label belongs to.
      unions: The components.
    """

    def __init__(
        self, products: Sequence[Product], component: np.ndarray, unions: Unions
    ) -> None:
        self.component = component
        self.unions = unions
        self.products = {
            id(product)
            for together in self._same_positions(products)
            if self._are_boxes(together)
            for product in together
        }
        # Component of a position -> components of its factors, in every product.
        self.ways: dict[int, list[tuple[int, ...]]] = collections.defaultdict(list)
        self.reasons: dict[int, Reason] = {}  # Why a position may have to stay.

    def __contains__(self, product: Product) -> bool:
        return id(product) in self.products

    def _same_positions(self, products: Sequence[Product]) -> list[list[Product]]:
        """Puts products together that have positions in common."""
        together: dict[int, list[Product]] = {}
        for product in products:
            flat = np.unique(self.component[product.flat[product.flat > FROZEN]])
            lists = [together[p] for p in flat.tolist() if p in together]
            joined = [product]
            for known in {id(each): each for each in lists}.values():
                joined += known
            for one in joined:
                own = self.component[one.flat[one.flat > FROZEN]].ravel()
                together.update(dict.fromkeys(own.tolist(), joined))
        return list({id(each): each for each in together.values()}.values())

    def _are_boxes(self, together: Sequence[Product]) -> bool:
        flat = self.component[together[0].flat]
        return all(
            product.primitive == "reshape"
            and bool((product.flat > FROZEN).all())
            and np.array_equal(self.component[product.flat], flat)
            and len(np.unique(flat)) == flat.size
            and sum(map(self._is_free, product.factors)) > 1
            for product in together
        )

    def _is_free(self, labels: np.ndarray) -> bool:
        roots = self.unions.roots_of(labels, self.component)
        return any(self.unions.reason[root] < 0 for root in roots)

    def keep_apart(self, product: Product) -> None:
        """Records what every position of a flat axis is made of."""
        text = "ties it to an axis of fixed size"
        reason = Reason(product.primitive, text, product.source)
        axes = [
            np.where(labels > FROZEN, self.component[labels], _STAYS)
            for labels in product.factors
        ]
        grid = np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], 1)
        flat = self.component[product.flat].ravel()
        for position, made_of in zip(flat.tolist(), grid.tolist(), strict=True):
            self.ways[position].append(tuple(made_of))
            self.reasons.setdefault(position, reason)
        for labels in product.factors:
            roots = self.unions.roots_of(labels, self.component)
            self.unions.chosen.update(roots)

    def concluded(self) -> dict[int, tuple[int, ...]]:
        """What is made of what, in the end; settles what is frozen, dead and alive.

        Returns:
          Component -> the components that it is made of, none of which is made of
          others.
        """
        while not self._join_factors():
            pass
        direct = {
            self.unions.root(position): self._roots(ways[0])
            for position, ways in self.ways.items()
        }
        found = {root: self._parts(root, direct) for root in direct}
        self._freeze(found)
        self._tell(found)
        return found

    def _roots(self, made_of: Sequence[int]) -> list[int]:
        known = [self.unions.root(index) for index in made_of if index != _STAYS]
        return list(dict.fromkeys(known))

    def _join_factors(self) -> bool:
        """Joins the factors of what is one channel; whether there was nothing to do."""
        first: dict[int, tuple[int, ...]] = {}
        is_done = True
        for position, ways in self.ways.items():
            for made_of in ways:
                before = first.setdefault(self.unions.root(position), made_of)
                is_done &= self._join(before, made_of, self.reasons[position])
        return is_done

    def _join(self, one: Sequence[int], other: Sequence[int], reason: Reason) -> bool:
        """Joins factors in order, and freezes one that stays in the other way."""
        if len(one) != len(other):  # not known to happen; nothing is claimed then
            self.unions.freeze([*self._roots(one), *self._roots(other)], reason)
            return True
        is_done = True
        for a, b in zip(one, other, strict=True):
            if _STAYS in (a, b):
                self.unions.freeze(self._roots([a, b]), reason)
            elif self.unions.root(a) != self.unions.root(b):
                self.unions.join(a, b)
                is_done = False
        return is_done

    def _parts(
        self, root: int, direct: dict[int, list[int]], above: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """What a component is made of, down to what is made of nothing."""
        if root in above:  # not known to happen; nothing is claimed then
            self.unions.freeze(above, Reason("reshape", "is made of itself"))
            return (root,)
        parts = [
            part
            for each in direct.get(root, [])
            for part in self._parts(each, direct, (*above, root))
        ]
        return tuple(dict.fromkeys(parts)) if root in direct else (root,)

    def _freeze(self, found: dict[int, tuple[int, ...]]) -> None:
        """What stays keeps what it is made of, and is kept by it."""
        reason = self.unions.reason
        for root, parts in found.items():
            for part in parts if reason[root] >= 0 else ():
                if reason[part] < 0:
                    reason[part] = reason[root]
        for root, parts in found.items():
            why = [reason[part] for part in parts]
            if reason[root] < 0 and why and min(why) >= 0:
                reason[root] = why[0]

    def _tell(self, found: dict[int, tuple[int, ...]]) -> None:
        """Says what is dead of factors by their positions, and the other way round."""
        status = self.unions.status
        told: dict[int, int] = collections.defaultdict(int)
        for root, parts in found.items():
            for part in parts:
                told[part] |= status[root]
        for part, known in told.items():
            # A factor is dead if all its positions are.
            status[part] |= ALIVE if known & ALIVE else known
        for root, parts in found.items():
            is_dead = any(status[part] & DEAD for part in parts)
            # With what was told, both bits where that is no box.
            known = DEAD if is_dead else ALIVE
            if status[root] or is_dead:
                status[root] |= known
