"""Makes a function of fewer channels by doing its traced program again on less.

The function is traced at full size, whatever framework wrote it, and every operation is
done with what is left of its operands. So the smaller function divides by the numbers
the old one divided by, and nothing in it can depend on how many channels are left.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path, map_with_path
from prunex_jax.channels import ChannelGroup, TraceOptions, layouts_of
from prunex_jax.channels.labels import Traced
from prunex_jax.channels.resolve import ALIVE, DEAD, Resolution, resolve
from prunex_jax.channels.trace import Labelled, label_function
from prunex_jax.shrink.evaluator import Evaluator
from prunex_jax.shrink.rebuild import REBUILDS

Shapes = Mapping[str, tuple[int, ...]]


def shrink_function(
    apply: Callable[..., Any],
    groups: Sequence[ChannelGroup],
    masks: Mapping[str, np.ndarray],
    shapes: Shapes,
    statistics_shapes: Shapes | None,
    options: TraceOptions,
) -> Callable[..., Any]:
    """Makes the function of what is left; see `Cut.function`."""
    sizes = _Sizes.of(groups, masks, shapes, "members")
    running = _Sizes.of(groups, masks, statistics_shapes or {}, "statistics")
    rebuilds = {**REBUILDS, **(options.rebuilds or {})}

    def small(params: PyTree, *rest: Any) -> Any:
        has_statistics = statistics_shapes is not None
        statistics = rest[0] if has_statistics else None
        inputs = rest[1:] if has_statistics else rest
        full = sizes.full(params, "parameter")
        full_statistics = running.full(statistics, "statistic")
        given = jax.tree.map(jax.typeof, inputs)
        found = label_function(
            apply, full, given, full_statistics, options, with_jax_derivatives=True
        )
        resolution = _resolve(found, sizes, running)
        evaluator = Evaluator(resolution, rebuilds)
        values = jax.tree.leaves((params, *rest))
        return jax.tree.unflatten(found.outputs, evaluator.run(found.program, values))

    return small


@dataclasses.dataclass(frozen=True, eq=False)
class _Sizes:
    """What one of the two trees looks like, before and after.

    Attributes:
      shapes: Shape of every leaf, before.
      kept: path -> axis -> bool[size], for axes that lose something.
    """

    shapes: Shapes
    kept: Mapping[str, Mapping[int, np.ndarray]]

    @staticmethod
    def of(
        groups: Sequence[ChannelGroup],
        masks: Mapping[str, np.ndarray],
        shapes: Shapes,
        of: Any,
    ) -> "_Sizes":
        kept: dict[str, dict[int, np.ndarray]] = {}
        for path, axes in layouts_of(groups, shapes, of).items():
            for axis, layout in axes.items():
                left = np.ones(layout.size, bool)
                for name, positions in layout.slices:
                    left[positions[~np.asarray(masks[name])]] = False
                kept.setdefault(path, {})[axis] = left
        return _Sizes(shapes, kept)

    def full(self, tree: PyTree, what: str) -> PyTree:
        """Types of the leaves at full size, of those that are left."""
        paths = flatten_by_path(tree)
        if set(paths) != set(self.shapes):
            odd = sorted(set(paths) ^ set(self.shapes))
            raise UserError(
                f"the tree of {what}s is not that of the network; {odd[0]} is in one "
                "of them only"
            )
        return map_with_path(lambda path, x: self._full_leaf(path, x, what), tree)

    def _full_leaf(self, path: str, leaf: Any, what: str) -> Any:
        full = self.shapes[path]
        axes = self.kept.get(path, {})
        left = tuple(
            int(axes[axis].sum()) if axis in axes else size
            for axis, size in enumerate(full)
        )
        if np.shape(leaf) != left:
            raise UserError(
                f"{what} {path} has shape {np.shape(leaf)}, and {left} is what is left "
                f"of {full}; cut the tree with `take`"
            )
        aval: Any = jax.typeof(leaf)
        return aval.update(shape=full)

    def tell(self, status: np.ndarray, values: Mapping[str, Traced]) -> None:
        """Marks the labels of what is dead and of what is kept."""
        for path, value in values.items():
            for axis, labels in enumerate(value.labels):
                left = self.kept.get(path, {}).get(axis)
                if left is None:
                    status[labels] |= ALIVE
                else:
                    status[labels] |= np.where(left, ALIVE, DEAD).astype(np.int8)


def _resolve(found: Labelled, sizes: _Sizes, running: _Sizes) -> Resolution:
    status = np.zeros(found.table.num_labels, np.int8)
    sizes.tell(status, found.weights)
    running.tell(status, found.running)
    resolution = resolve(found.table, status)
    conflict = resolution.conflict()
    if conflict is not None:
        raise UserError(
            f"a channel that is dead by its mask cannot be cut out of this function: "
            f"{conflict}; trace the channels of this very function"
        )
    return resolution
