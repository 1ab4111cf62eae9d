"""Takes stacks of layers apart, so that every layer has its own channels.

Frameworks stack the parameters of equal layers and loop over them with `lax.scan`. All
layers then have one shape, so they keep the same channels. `unroll_stacks` finds such
parameters; the `Unrolled` that it returns makes a leaf of every layer, in any tree, and
a function of those leaves in which the loop is written out.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.trees import (
    PyTree,
    flatten_by_path,
    map_with_path,
    named_by,
    path_of,
    shapes_by_path,
)
from prunex_jax.shrink.layers import (
    Layers,
    Loop,
    find_loops,
    is_layers,
    layer_of,
    put_together,
    run_layers,
)
from prunex_jax.shrink.part import Shapes, owners_of, refuse_numbers

# Loops of more turns are hardly over layers: they are unrolled only where named.
_MOST_TURNS = 256
_MAX_NAMED = 4
# A leaf among parameters (0) or running statistics (1), by path.
_Leaf = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A leaf that holds layers."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]  # Those that are looped over, the outermost loop first.


@dataclasses.dataclass(frozen=True, eq=False)
class _Tree:
    """One of the two trees of a network: parameters or running statistics."""

    what: str  # What to call a leaf of it.
    shapes: Shapes  # Shape of every leaf by path.
    stacks: Mapping[str, Stack]  # Those that are taken apart.

    def split(self, tree: PyTree) -> PyTree:
        """See `Unrolled.split`."""
        owners = owners_of(tree, self.shapes, self.what, "split", self.stacks)
        leaves = {
            path: leaf
            for path, leaf in flatten_by_path(tree).items()
            if owners.get(path) in self.stacks
        }

        def split_all(leaves: Mapping[str, Any]) -> dict[str, Any]:
            return {
                path: _taken_apart(leaf, self.stacks[owners[path]].axes)
                for path, leaf in leaves.items()
            }

        parts = _done(split_all, leaves)
        return map_with_path(lambda path, leaf: parts.get(path, leaf), tree)

    def join(self, tree: PyTree) -> PyTree:
        """See `Unrolled.join`."""
        found: dict[str, Any] = {}
        self.changed(tree, lambda name, where, parts: found.setdefault(where, parts))
        owned = [named_by(path, self.shapes) for path in flatten_by_path(tree)]
        if not found and not any(owned):
            refuse_numbers(tree, self.shapes, self.what)

        def join_all(found: Mapping[str, Any]) -> dict[str, Any]:
            return {where: self._joined(where, parts) for where, parts in found.items()}

        stacked = _done(join_all, found)
        return self.changed(tree, lambda name, where, parts: stacked[where])

    def _joined(self, where: str, parts: Any) -> jax.Array:
        name = named_by(where, self.stacks)
        assert name is not None
        sizes = sorted({np.shape(part) for part in jax.tree.leaves(parts)})
        if len(sizes) > 1:
            raise UserError(
                f"layers of {where} have shapes {sizes[0]} and {sizes[-1]}, and layers "
                "of one shape can be stacked; put back what was cut out of them first"
            )
        return put_together(_layers(parts, self.stacks[name].axes))

    def layers(self, tree: PyTree) -> PyTree:
        """The tree of the network, with `Layers` for leaves that are taken apart."""
        return self.changed(
            tree, lambda name, _, parts: _layers(parts, self.stacks[name].axes)
        )

    def full(self, tree: PyTree) -> PyTree:
        """Types of the leaves before they were taken apart.

        Raises:
          UserError: This is not the tree of the network, taken apart.
        """

        def stacked(name: str, _: str, parts: Any) -> Any:
            return jax.tree.leaves(parts)[0].update(shape=self.stacks[name].shape)

        full = self.changed(jax.tree.map(jax.typeof, tree), stacked)
        found = shapes_by_path(full)
        for path in (*self.shapes, *found):
            if found.get(path) != self.shapes.get(path):
                raise UserError(
                    f"{self.what} {path} is {found.get(path, 'absent')} here and was "
                    f"{self.shapes.get(path, 'absent')} when loops were looked for; "
                    "give the tree that `split` gave"
                )
        return full

    def changed(self, tree: PyTree, change: Callable[[str, str, Any], Any]) -> PyTree:
        """Replaces every tuple of layers by `change(name of the leaf, path, tuple)`."""

        def visit(keys: tuple[Any, ...], node: Any) -> Any:
            path = path_of(keys)
            name = named_by(path, self.shapes)
            if name is not None and name in self.stacks and type(node) is tuple:
                self._check_parts(path, node, self.stacks[name])
                return change(name, path, node)
            children, structure = jax.tree_util.tree_flatten_with_path(
                node, is_leaf=lambda x: x is not node
            )
            if jax.tree_util.treedef_is_leaf(structure):
                return node
            changed = [visit((*keys, *key), child) for key, child in children]
            return jax.tree.unflatten(structure, changed)

        return visit((), tree)

    def _check_parts(self, path: str, parts: tuple[Any, ...], stack: Stack) -> None:
        if len(parts) != stack.shape[stack.axes[0]]:
            raise UserError(
                f"{path} has {len(parts)} layers and should have "
                f"{stack.shape[stack.axes[0]]}; give the tree that `split` gave"
            )


def _done(function: Callable[..., Any], tree: PyTree) -> Any:
    """What a function gives for arrays, or for shapes."""
    leaves = jax.tree.leaves(tree)
    is_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return jax.eval_shape(function, tree) if is_shapes else jax.jit(function)(tree)


def _taken_apart(x: Any, axes: Sequence[int]) -> Any:
    """A tuple of the positions of the first axis, each a tuple of those of the next."""
    if not axes:
        return put_together(x)
    first, rest = axes[0], _behind(axes)
    return tuple(
        _taken_apart(layer_of(x, index, first), rest) for index in range(x.shape[first])
    )


def _layers(parts: Any, axes: Sequence[int]) -> Any:
    """Inverts `_taken_apart`, to `Layers`."""
    if not axes:
        return parts
    return Layers(axes[0], tuple(_layers(part, _behind(axes)) for part in parts))


def _behind(axes: Sequence[int]) -> tuple[int, ...]:
    """The axes after the first, as they count when it is gone."""
    return tuple(axis - (axis > axes[0]) for axis in axes[1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Unrolled:
    """A network whose stacks are taken apart; made by `unroll_stacks`."""

    _parameters: _Tree
    _statistics: _Tree | None

    @property
    def stacks(self) -> Mapping[str, Stack]:
        """The parameters that are taken apart, by path."""
        return self._parameters.stacks

    def split(self, tree: PyTree) -> PyTree:
        """Takes parameters apart, or any tree that holds trees shaped like them.

        A leaf belongs to a parameter if its path ends with that parameter's path, as in
        the moments of an optimizer.

        Args:
          tree: Leaves are arrays, or shapes (`jax.ShapeDtypeStruct`).
        Returns:
          The tree with a tuple in place of every stack, one array per layer, so that
          `layers/kernel` becomes `layers/kernel/0`, `layers/kernel/1` and so on.
        Raises:
          UserError: A leaf belongs to a stack and has another shape, or nothing in the
            tree belongs to any parameter.
        """
        return self._parameters.split(tree)

    def join(self, tree: PyTree) -> PyTree:
        """Stacks again what `split` took apart.

        Raises:
          UserError: Layers of a stack have different shapes, as when channels were cut
            out of them (`Cut.put` puts them back), or nothing belongs to a parameter.
        """
        return self._parameters.join(tree)

    def split_statistics(self, tree: PyTree) -> PyTree:
        """Takes running statistics apart, as `split` does parameters."""
        return self._running.split(tree)

    def join_statistics(self, tree: PyTree) -> PyTree:
        """Stacks running statistics again, as `join` does parameters."""
        return self._running.join(tree)

    def function(
        self, apply: Callable[..., Any], returns_statistics: bool = False
    ) -> Callable[..., Any]:
        """The same function, of what `split` gave, with loops over layers written out.

        It can be traced, cut, jitted, differentiated and vmapped; every call traces
        `apply` again, for the shapes it is given. Its program, and the time to compile
        it, grow with the number of layers.

        Args:
          apply: A function of the stacked network, `apply(params, *inputs)` or
            `apply(params, statistics, *inputs)`: the one that was given to
            `unroll_stacks`, or another one of the same parameters.
          returns_statistics: Whether it returns (outputs, new statistics); the latter
            are taken apart, too.
        Returns:
          A function of the same arguments, of trees that are taken apart. It raises
          UserError if they are not.
        """

        def unrolled(params: PyTree, *rest: Any) -> Any:
            trees = [(self._parameters, params)]
            if self._statistics is not None:
                trees.append((self._statistics, rest[0]))
            inputs = rest[len(trees) - 1 :]
            full = [part.full(tree) for part, tree in trees]
            given = jax.tree.map(jax.typeof, inputs)
            program, out = jax.make_jaxpr(apply, return_shape=True)(*full, *given)
            layered = [part.layers(tree) for part, tree in trees]
            values = jax.tree.leaves([*layered, *inputs], is_leaf=is_layers)
            results = run_layers(program, values)
            axes = self._axes_of_results(len(results), returns_statistics)
            split = [_taken_apart(x, own) for x, own in zip(results, axes, strict=True)]
            return jax.tree.unflatten(jax.tree.structure(out), split)

        return unrolled

    @property
    def _running(self) -> _Tree:
        return self._statistics or _Tree("statistic", {}, {})

    def _axes_of_results(
        self, count: int, has_statistics: bool
    ) -> Sequence[tuple[int, ...]]:
        """Along which axes every result is taken apart; statistics come last."""
        if not has_statistics:
            return [()] * count
        stacks, shapes = self._running.stacks, self._running.shapes
        known = [stacks[path].axes if path in stacks else () for path in shapes]
        return [*[()] * (count - len(known)), *known]


def unroll_stacks(
    apply: Callable[..., Any],
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
    paths: Sequence[str] | None = None,
) -> Unrolled:
    """Finds parameters that are stacked for `lax.scan`, to take them apart.

    A stack keeps the same channels in all its layers. Taken apart, each layer has its
    own channel groups, and may keep another number. Outputs and gradients are those of
    the stacked network, to the rounding of another order of compilation.

    Between a parameter and its loop there may be casts, element-wise operations,
    transpositions, reshapes, slices and the like; loops may be nested, reversed,
    rematerialised, carry states and stack outputs. Not taken apart is what is looped
    over inside a function with a derivative of its own (`jax.custom_vjp`), and what a
    loop reads by a counter of its own, as `fori_loop` bodies do.

    Args:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)` where
        `statistics` is given.
      params: Parameters, or their shapes (`jax.ShapeDtypeStruct`).
      *inputs: Example inputs, or their shapes.
      statistics: Running statistics; those of unrolled loops are taken apart as well.
      paths: Which loops are unrolled: those over parameters of these paths, which may
        hold wildcards. None for every loop over parameters.
    Returns:
      What takes trees and functions apart.
    Raises:
      UserError: No loop is over parameters, or over those of `paths`; one parameter is
        looped over along two axes apart from each other; or a loop has so many turns
        that it is hardly over layers, and `paths` is not given.
    Example:
      >>> import jax.numpy as jnp
      >>> def apply(params, x):
      ...     def layer(x, p):
      ...         return x + jnp.tanh(x @ p['in']) @ p['out'], None
      ...     return jax.lax.scan(layer, x, params)[0]
      >>> params = {'in': jnp.ones((2, 3, 8)), 'out': jnp.ones((2, 8, 3))}
      >>> x = jnp.ones((1, 3))
      >>> layers = unroll_stacks(apply, params, x)
      >>> from prunex_jax.channels import trace_channels
      >>> split, unrolled = layers.split(params), layers.function(apply)
      >>> trace = trace_channels(unrolled, split, x)
      >>> [(group.name, group.size) for group in trace.groups]
      [('in/0', 8), ('in/1', 8)]
      >>> bool(jnp.allclose(unrolled(split, x), apply(params, x)))
      True
    """
    trees = [params] if statistics is None else [params, statistics]
    program = jax.make_jaxpr(apply)(*trees, *inputs)
    shapes = [shapes_by_path(tree) for tree in trees]
    leaves: list[_Leaf | None] = [
        (index, path) for index, own in enumerate(shapes) for path in own
    ]
    leaves += [None] * len(jax.tree.leaves(inputs))
    chosen = _chosen(find_loops(program, leaves), paths)
    stacks = _stacks(chosen, shapes)
    parts = [
        _Tree(what, own, {path: s for (i, path), s in stacks.items() if i == index})
        for index, (what, own) in enumerate(
            zip(("parameter", "statistic"), shapes, strict=False)
        )
    ]
    return Unrolled(parts[0], parts[1] if len(parts) > 1 else None)


def _chosen(loops: Sequence[Loop], paths: Sequence[str] | None) -> list[Loop]:
    """The loops that are unrolled."""
    over = [
        (loop, [path for tree, path in sorted(loop.leaves) if tree == 0])
        for loop in loops
    ]
    over = [(loop, names) for loop, names in over if names]
    if not over:
        raise UserError(
            "no loop of this function is over parameters, so there is nothing to "
            "unroll; a stack is found where `lax.scan` loops over it, outside of "
            "functions with derivatives of their own"
        )
    if paths is None:
        for loop, names in over:
            _check_turns(loop, names)
        return [loop for loop, _ in over]
    known = dict.fromkeys(name for _, names in over for name in names)
    for pattern in paths:
        if not fnmatch.filter(known, pattern):
            raise UserError(
                f"paths has {pattern!r}, and no loop is over a parameter called so"
                f"{suggest(pattern, known)}; loops are over {_listed(list(known))}"
            )
    return [
        loop
        for loop, names in over
        if any(fnmatch.filter(names, pattern) for pattern in paths)
    ]


def _check_turns(loop: Loop, names: Sequence[str]) -> None:
    if loop.length > _MOST_TURNS:
        where = f" at {loop.source}" if loop.source else ""
        raise UserError(
            f"the loop{where} over {_listed(names)} has {loop.length} turns, which is "
            "much to write out; name the loops that are over layers with `paths`"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _stacks(
    loops: Sequence[Loop], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[_Leaf, Stack]:
    """Along which axes every leaf is taken apart, in which order."""
    # For every leaf: (the axis, the axes that are not looped over yet) of its loops.
    uses: dict[Any, list[tuple[int, set[int]]]] = {}
    for loop in loops:
        for own, others in loop.rows:
            for leaf, axis in own:
                left = {other for same, other in others if same == leaf}
                uses.setdefault(leaf, []).append((axis, left))
    return {
        leaf: Stack(shapes[leaf[0]][leaf[1]], _order(leaf[1], found))
        for leaf, found in uses.items()
    }


def _order(path: str, uses: Sequence[tuple[int, set[int]]]) -> tuple[int, ...]:
    """Axes of a leaf, that of the outermost loop first."""
    looped = {axis for axis, _ in uses}
    done = [(looped - left - {axis}, axis) for axis, left in uses]
    order = list(dict.fromkeys(a for _, a in sorted(done, key=lambda use: len(use[0]))))
    for before, axis in done:
        if before != set(order[: order.index(axis)]):
            raise UserError(
                f"{path} is looped over along axes {sorted(looped)}, not one inside "
                "the other, so its layers cannot be told apart; name other loops with "
                "`paths`"
            )
    return tuple(order)
