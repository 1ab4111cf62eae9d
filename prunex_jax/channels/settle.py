"""Chooses which factor of an axis is cut, such as heads or their features.

`settle` does so for one axis, by what is known of its factors so far, and ties the axis
to the factor. Whether it was a good choice is seen in the end; see `resolve`.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

from prunex_jax.channels.factors import ALIVE, DEAD, Unions
from prunex_jax.channels.labels import FROZEN, Product, Reason, has_channels


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
      factor: Which factor of the axis is cut.
      most_of_others: The most channels that another factor had, at that time.
    """

    factor: int
    most_of_others: int


def settle(
    product: Product, component: np.ndarray, unions: Unions, barred: Collection[int]
) -> Choice | None:
    """Ties a flat axis to one of its factors and freezes the others.

    To a loose factor it is tied in the end, if it must be; see `balance`.

    Args:
      product: The axis and its factors.
      component: int64[num_labels], which component a label belongs to.
      unions: The components; they are changed.
      barred: Factors that are chosen only if there is no other.
    Returns:
      What was chosen; None if no factor can be cut.
    """
    roots = [unions.roots_of(labels, component) for labels in product.factors]
    choice = _choose(product, roots, component, unions, barred)
    sizes = " x ".join(str(len(labels)) for labels in product.factors)
    if choice is None:
        text = f"consists of axes of {sizes}, none of which can be cut"
        reason = Reason(product.primitive, text, product.source)
        everything = [unions.roots_of(product.flat, component), *roots]
        for some in everything:
            unions.freeze(some, reason)
        return None
    text = (
        f"belongs to an axis of {sizes}, of which the axis of "
        f"{len(product.factors[choice.factor])} is the one that is cut"
    )
    reason = Reason(product.primitive, text, product.source, is_inherent=True)
    for index, others in enumerate(roots):
        if index != choice.factor:
            unions.freeze(others, reason)
    if choice.factor != product.loose:
        _tie(product, choice.factor, component, unions)
    unions.chosen.update(unions.root(index) for index in roots[choice.factor])
    return choice


def balance(product: Product, component: np.ndarray, unions: Unions) -> None:
    """Ties a flat axis to its loose factor, unless as many are left of it anyway."""
    assert product.loose is not None
    rows = np.moveaxis(product.flat, product.loose, -1)
    found = rows.reshape(-1, rows.shape[-1])
    roots = np.array([unions.root(i) for i in component[found.ravel()].tolist()])
    is_free = (found.ravel() > FROZEN) & (np.array(unions.reason)[roots] < 0)
    _, which = np.unique(roots[is_free], return_inverse=True)
    row = np.repeat(np.arange(len(found)), found.shape[1])[is_free]
    counts = np.zeros((which.max(initial=-1) + 1, len(found)), np.int64)
    np.add.at(counts, (which, row), 1)
    if (counts != counts[:, :1]).any():
        _tie(product, product.loose, component, unions)


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
    product: Product,
    roots: list[list[int]],
    component: np.ndarray,
    unions: Unions,
    barred: Collection[int],
) -> Choice | None:
    """The factor to cut: one that was chosen before, or else the finest."""
    candidates = []
    for index, own in enumerate(roots):
        free = [i for i in own if unions.reason[i] < 0]
        others = [i for k, some in enumerate(roots) if k != index for i in some]
        is_dead = any(unions.status[i] & DEAD for i in others)
        if free and not is_dead and _agrees(product, index, component, unions):
            was_chosen = any(i in unions.chosen for i in free)
            candidates.append((index in barred, not was_chosen, -len(free), index))
    if not candidates:
        return None
    best = min(candidates)[-1]
    counts = [-count for *_, count, i in candidates if i != best and i not in barred]
    return Choice(best, max(counts, default=0))


def _agrees(
    product: Product, index: int, component: np.ndarray, unions: Unions
) -> bool:
    """Whether no position of the factor is known to be both dead and alive."""
    if not any(unions.status) or index == product.loose:
        return True
    labels = product.factors[index]
    rows = np.moveaxis(product.flat, index, 0).reshape(len(labels), -1)
    for row in rows:
        if has_channels(row):
            known = [unions.status[i] for i in unions.roots_of(row, component)]
            if np.bitwise_or.reduce(known) == ALIVE | DEAD:
                return False
    return True
