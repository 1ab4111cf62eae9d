"""What is cut out of a network, from trees and from functions alike."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, shapes_by_path
from prunex_jax.channels import (
    ChannelGroup,
    ChannelTrace,
    TraceOptions,
    layouts_of,
    mask_channels,
    put_channels,
    take_channels,
)
from prunex_jax.shrink.function import shrink_function
from prunex_jax.shrink.part import Part, Shapes


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Which channels of a network go; made by `make_cut`.

    Attributes:
      groups: Channel groups of the network.
      masks: bool[size] per group, True where kept.
      parameters: Shapes and owners of the parameters.
      statistics: The same of running statistics; None if there are none.
      options: How the network was traced.
    """

    groups: tuple[ChannelGroup, ...]
    masks: Mapping[str, np.ndarray]
    parameters: Part
    statistics: Part | None
    options: TraceOptions

    @property
    def keep_indices(self) -> dict[str, np.ndarray]:
        """int32[keep_count] positions that are kept, per group."""
        return {
            name: np.flatnonzero(mask).astype(np.int32)
            for name, mask in self.masks.items()
        }

    def take(self, tree: PyTree) -> PyTree:
        """Cuts parameters, or any tree that holds trees shaped like them.

        A leaf belongs to a parameter if its path ends with that parameter's path, as in
        the moments of an optimizer.

        Args:
          tree: Leaves of full size.
        Returns:
          The tree with smaller leaves; what belongs to no parameter as it was.
        Raises:
          UserError: A leaf belongs to a parameter and has another shape, or nothing in
            the tree belongs to any.
        """
        return self.parameters.changed(tree, take_channels, self._indices())

    def take_statistics(self, tree: PyTree) -> PyTree:
        """Cuts running statistics, as `take` cuts parameters."""
        return self._running.changed(tree, take_channels, self._indices())

    def put(self, tree: PyTree) -> PyTree:
        """Puts what `take` gave back in its place, zeros elsewhere; raises like it."""
        return self.parameters.changed(tree, put_channels, self._indices(), True)

    def put_statistics(self, tree: PyTree) -> PyTree:
        """Puts running statistics back, as `put` does parameters."""
        return self._running.changed(tree, put_channels, self._indices(), True)

    def mask(self, tree: PyTree) -> PyTree:
        """Sets dead channels to exact zeros; raises like `take`."""
        masks = {name: jnp.asarray(mask) for name, mask in self.masks.items()}
        return self.parameters.changed(tree, mask_channels, masks)

    def function(self, apply: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The function that the masked network computes, of parameters that are cut.

        It can be differentiated, vmapped and given any batch size, and should be
        jitted: every call traces `apply` again, for the shapes it is given.

        Args:
          apply: A function of the full network, `apply(params, *inputs)` or
            `apply(params, statistics, *inputs)`: the one that was traced, or another
            one of the same parameters, such as that of training.
          **options: Fields of `TraceOptions` that are different for this function.
        Returns:
          A function of the same arguments, with smaller parameters and statistics. It
          raises UserError if they have other sizes than those that are left, or if
          `apply` ties what is dead to what is kept, which the traced function does not.
        """
        chosen = dataclasses.replace(self.options, **options)
        return shrink_function(apply, self.parameters, self.statistics, chosen)

    @property
    def _running(self) -> Part:
        return self.statistics or Part("statistic", {}, {}, self.masks)

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
      UserError: A mask fits no group, or keeps no channel of its group; the trees are
        not those of the traced network.
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
    _check_masks(trace.groups, masks)
    shapes = shapes_by_path(params)
    running = None if statistics is None else shapes_by_path(statistics)
    _check_traced(trace, shapes, running or {})
    kept = {
        group.name: np.asarray(masks.get(group.name, np.ones(group.size)), bool)
        for group in trace.groups
    }
    layouts = layouts_of(trace.groups, shapes)
    part = None
    if running is not None:
        running_layouts = layouts_of(trace.groups, running, "statistics")
        part = Part("statistic", running, running_layouts, kept)
    return Cut(
        groups=trace.groups,
        masks=kept,
        parameters=Part("parameter", shapes, layouts, kept),
        statistics=part,
        options=trace.options,
    )


def _check_masks(groups: Sequence[ChannelGroup], masks: Mapping[str, Any]) -> None:
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
        values = np.asarray(mask)
        if values.dtype != bool and not np.isin(values, (0, 1)).all():
            raise UserError(
                f"the mask of channel group {name} has the value "
                f"{values[~np.isin(values, (0, 1))][0]}; give True where a channel is "
                "kept, not its number or a score"
            )
        if not np.any(mask):
            raise UserError(
                f"the mask of channel group {name} keeps no channel, which leaves no "
                "network; keep at least one"
            )


def _check_traced(trace: ChannelTrace, shapes: Shapes, running: Shapes) -> None:
    """Refuses trees that are not those of the traced network."""
    for path in (*trace.shapes, *shapes):
        there, here = trace.shapes.get(path), shapes.get(path)
        if there != here:
            raise UserError(
                f"parameter {path} is {here or 'absent'} here and was "
                f"{there or 'absent'} when the channels were traced; give the "
                "parameters of the traced network"
            )
    for group in trace.groups:
        for member in group.statistics:
            if member.path not in running:
                raise UserError(
                    f"channel group {group.name} has the running statistic "
                    f"{member.path}, which is absent here; give the statistics of the "
                    "traced network"
                )
