"""One of the two trees of a network, parameters or running statistics, and its cut."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import (
    PyTree,
    flatten_by_path,
    map_with_path,
    named_by,
    shapes_by_path,
)
from prunex_jax.channels import Layouts
from prunex_jax.channels.factors import ALIVE, DEAD
from prunex_jax.channels.groups import kept_shape
from prunex_jax.channels.labels import Traced

Shapes = Mapping[str, tuple[int, ...]]


def owners_of(
    tree: PyTree,
    shapes: Shapes,
    what: str,
    verb: str,
    changed: Collection[str] | None = None,
) -> dict[str, str]:
    """Says which leaf belongs to which one of a network: the only rule for it.

    `what` such a leaf is called, what is done with it (`verb`), and with which ones
    (`changed`; None for all), are for messages.

    Returns:
      Path in the tree -> path in the network.
    Raises:
      UserError: One that belongs to a changed leaf has another shape, or none belongs.
    """
    changed = shapes if changed is None else changed
    owners = {}
    for path, shape in shapes_by_path(tree).items():
        name = named_by(path, shapes)
        if name is not None and shape == shapes[name]:
            owners[path] = name
        # Counters and placeholders have nothing to change.
        elif name is not None and np.prod(shape) > 1 and name in changed:
            raise UserError(
                f"{path} has shape {shape} and belongs to the {what} {name}, "
                f"whose shape is {shapes[name]}; {verb} it apart from the rest"
            )
    if not owners:
        refuse_numbers(tree, shapes, what)
    return owners


def refuse_numbers(tree: PyTree, shapes: Shapes, what: str) -> None:
    """Refuses a tree of which nothing belongs to a network, as counters and keys may.

    Raises:
      UserError: The tree holds arrays of numbers.
    """
    for path, leaf in flatten_by_path(tree).items():
        if np.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise UserError(
                f"nothing in this tree belongs to a {what} of the network: it "
                f"holds {path}, and the network {next(iter(shapes), 'has none')}; "
                "give a tree of the traced network"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One of the two trees, before and after its channels are cut."""

    what: str  # What to call a leaf of it.
    shapes: Shapes  # Shape of every leaf by path, before.
    layouts: Layouts  # Who owns which position of which axis.
    masks: Mapping[str, np.ndarray]  # bool[size] per group, True where kept.

    @functools.cached_property
    def small_shapes(self) -> Shapes:
        """Shape of every leaf by path, after."""
        counts = {name: int(mask.sum()) for name, mask in self.masks.items()}
        return {
            path: kept_shape(shape, self.layouts.get(path), counts)
            for path, shape in self.shapes.items()
        }

    def changed(
        self,
        tree: PyTree,
        change: Callable[..., PyTree],
        by: Mapping[str, jax.Array],
        is_small: bool = False,
    ) -> PyTree:
        """Changes the leaves of a tree that belong to this part, in one program.

        Raises:
          UserError: As `Cut.take`.
        """
        shapes = self.small_shapes if is_small else self.shapes
        owners = owners_of(tree, shapes, self.what, "cut")
        own = {p: self.layouts[o] for p, o in owners.items() if o in self.layouts}
        leaves = map_with_path(lambda path, x: x if path in own else None, tree)
        changed = jax.jit(lambda leaves: change(leaves, own, by))(leaves)
        return jax.tree.map(
            lambda new, old: old if new is None else new,
            changed,
            tree,
            is_leaf=lambda x: x is None,
        )

    def full(self, tree: PyTree) -> PyTree:
        """Types of the leaves at full size, from a tree of what is left of them."""
        odd = sorted(set(flatten_by_path(tree)) ^ set(self.shapes))
        if odd:
            raise UserError(
                f"the tree of {self.what}s is not that of the network; {odd[0]} is in "
                "one of them only"
            )
        return map_with_path(self._full_leaf, tree)

    def _full_leaf(self, path: str, leaf: Any) -> Any:
        full, left = self.shapes[path], self.small_shapes[path]
        if np.shape(leaf) != left:
            raise UserError(
                f"{self.what} {path} has shape {np.shape(leaf)}, and {left} is what is "
                f"left of {full}; cut the tree with `take`"
            )
        aval: Any = jax.typeof(leaf)
        return aval.update(shape=full)

    def tell(self, status: np.ndarray, values: Mapping[str, Traced]) -> None:
        """Marks the labels of what is dead and of what is kept."""
        for path, value in values.items():
            for axis, labels in enumerate(value.labels):
                stays = self.stays(path, axis)
                status[labels] |= np.where(stays, ALIVE, DEAD).astype(np.int8)

    def stays(self, path: str, axis: int) -> np.ndarray:
        """bool[size], which positions of an axis of a leaf are left."""
        found, axes = np.ones(self.shapes[path][axis], bool), self.layouts.get(path, {})
        for name, positions in axes[axis].slices if axis in axes else ():
            found[positions[~self.masks[name]]] = False
        return found
