"""What is cut out of a network, from trees and from functions alike."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, map_with_path, shapes_by_path
from prunex_jax.channels import (
    ChannelGroup,
    ChannelTrace,
    Layouts,
    TraceOptions,
    layouts_of,
    mask_channels,
    take_channels,
)
from prunex_jax.shrink.function import shrink_function


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Which channels of a network go; made by `make_cut`.

    Attributes:
      groups: Channel groups of the network.
      masks: bool[size] per group, True where kept.
      shapes: Shape of every parameter by path, before.
      statistics_shapes: The same of running statistics; None if there are none.
      options: How the network was traced.
    """

    groups: tuple[ChannelGroup, ...]
    masks: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]
    statistics_shapes: Mapping[str, tuple[int, ...]] | None
    options: TraceOptions

    @property
    def keep_indices(self) -> dict[str, np.ndarray]:
        """int32[keep_count] positions that are kept, per group."""
        return {
            name: np.flatnonzero(mask).astype(np.int32)
            for name, mask in self.masks.items()
        }

    def layouts(self) -> Layouts:
        """Who owns which position of which parameter axis."""
        return layouts_of(self.groups, self.shapes)

    def statistics_layouts(self) -> Layouts:
        """The same of running statistics."""
        return layouts_of(self.groups, self.statistics_shapes or {}, "statistics")

    def take(self, tree: PyTree) -> PyTree:
        """Cuts parameters, or any tree that holds trees shaped like them.

        A leaf belongs to a parameter if its path ends with that parameter's path, as in
        the moments of an optimizer.

        Args:
          tree: Leaves of full size.
        Returns:
          The tree with smaller leaves; what belongs to no parameter as it was.
        Raises:
          UserError: A leaf belongs to a parameter and has another shape.
        """
        return _take(tree, self.shapes, self.layouts(), self._indices())

    def take_statistics(self, tree: PyTree) -> PyTree:
        """Cuts running statistics, as `take` cuts parameters."""
        shapes = self.statistics_shapes or {}
        return _take(tree, shapes, self.statistics_layouts(), self._indices())

    def mask(self, params: PyTree) -> PyTree:
        """Sets dead channels to exact zeros.

        Args:
          params: Parameters of full size.
        Returns:
          Parameters of the same size.
        """
        masks = {name: jnp.asarray(mask) for name, mask in self.masks.items()}
        return mask_channels(params, self.layouts(), masks)

    def function(self, apply: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function without the dead channels; see `shrink_function`.

        Args:
          apply: A function of the full network: the one that was traced, or another one
            of the same parameters, such as that of training.
          **options: Fields of `TraceOptions` that are different for this function.
        Returns:
          A function of smaller parameters.
        """
        return shrink_function(
            apply,
            self.groups,
            self.masks,
            self.shapes,
            self.statistics_shapes,
            dataclasses.replace(self.options, **options),
        )

    def _indices(self) -> dict[str, jax.Array]:
        return {name: jnp.asarray(kept) for name, kept in self.keep_indices.items()}


def make_cut(
    trace: ChannelTrace,
    masks: Mapping[str, Any],
    params: PyTree,
    statistics: PyTree | None = None,
) -> Cut:
    """Decides what is cut out of a network.

    Args:
      trace: Its channel groups.
      masks: bool[size] per group, True where kept; groups without one stay whole.
      params: Parameters of full size, or their shapes.
      statistics: Running statistics of full size, or their shapes; None if the traced
        function takes none.
    Returns:
      What cuts trees and functions.
    Raises:
      UserError: A mask fits no group, or keeps no channel of its group.
    Example:
      >>> from prunex_jax.channels import trace_channels
      >>> def apply(params, x):
      ...     h = x @ params['in']
      ...     return jnp.tanh(h / h.shape[-1]) @ params['out']
      >>> params = {'in': jnp.ones((3, 8)), 'out': jnp.ones((8, 2))}
      >>> x = jnp.ones((1, 3))
      >>> trace = trace_channels(apply, params, x)
      >>> cut = make_cut(trace, {'in': np.arange(8) < 2}, params)
      >>> cut.take(params)['out'].shape
      (2, 2)
      >>> small = cut.function(apply)  # still divides by 8
      >>> bool(jnp.allclose(small(cut.take(params), x), apply(cut.mask(params), x)))
      True
    """
    check_masks(trace.groups, masks)
    return Cut(
        groups=trace.groups,
        masks={
            group.name: np.asarray(masks.get(group.name, np.ones(group.size, bool)))
            for group in trace.groups
        },
        shapes=shapes_by_path(params),
        statistics_shapes=None if statistics is None else shapes_by_path(statistics),
        options=trace.options,
    )


def check_masks(groups: Sequence[ChannelGroup], masks: Mapping[str, Any]) -> None:
    """Refuses masks that do not fit.

    Args:
      groups: Channel groups.
      masks: bool[size] per group.
    Raises:
      UserError: A mask fits no group, or keeps no channel of its group.
    """
    sizes = {group.name: group.size for group in groups}
    for name, mask in masks.items():
        if name not in sizes:
            raise UserError(
                f"there is a mask for channel group {name!r} and no such group; use "
                "the groups that the masks were made for"
            )
        if np.shape(mask) != (sizes[name],):
            raise UserError(
                f"the mask of channel group {name} has shape {np.shape(mask)} and "
                f"should have ({sizes[name]},); use the masks of this network"
            )
        if not np.any(mask):
            raise UserError(
                f"the mask of channel group {name} keeps no channel, which leaves no "
                "network; keep at least one"
            )


def _take(
    tree: PyTree,
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Layouts,
    keep_indices: Mapping[str, jax.Array],
) -> PyTree:
    owners = {
        path: owner
        for path, shape in shapes_by_path(tree).items()
        if (owner := _owner(path, shape, shapes)) is not None
    }
    own_layouts = {
        path: layouts[owner] for path, owner in owners.items() if owner in layouts
    }
    cut = jax.jit(lambda tree: take_channels(tree, own_layouts, keep_indices))
    leaves = map_with_path(lambda path, x: x if path in own_layouts else None, tree)
    smaller = cut(leaves)  # one program instead of one per shape
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.map(
        lambda small, old: old if small is None else small,
        smaller,
        tree,
        is_leaf=is_none,
    )


def _owner(
    path: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The parameter that a leaf belongs to: the longest one its path ends with."""
    keys = path.split("/")
    for start in range(len(keys)):
        name = "/".join(keys[start:])
        if name not in shapes:
            continue
        if shape == shapes[name]:
            return name
        if np.prod(shape) > 1:  # counters and placeholders have nothing to cut
            raise UserError(
                f"{path} has shape {shape} and belongs to the parameter {name}, whose "
                f"shape is {shapes[name]}; cut it apart from the rest"
            )
        return None
    return None
