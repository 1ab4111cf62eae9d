"""Finds the channel groups of any JAX function by walking its traced program.

`label_function` traces and walks, `trace_channels` draws the conclusions, and a
`ChannelTrace` explains them. They know no framework: the function is
`apply(params, *inputs)`, whoever wrote it.
"""

import dataclasses
import fnmatch
import math
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.trees import PyTree, flatten_by_path, path_of
from prunex_jax.channels.context import Rule
from prunex_jax.channels.factors import Factors
from prunex_jax.channels.groups import (
    ChannelGroup,
    ChannelSlice,
    kept_shape,
    layouts_of,
)
from prunex_jax.channels.labels import (
    LabelledProgram,
    LabelTable,
    Reason,
    Traced,
    frozen_value,
)
from prunex_jax.channels.resolve import (
    FrozenChannels,
    Place,
    added_labels,
    collect_groups,
    factors_that_stay,
    resolve,
)
from prunex_jax.channels.rules import RULES
from prunex_jax.channels.rules.refused import REFUSALS
from prunex_jax.channels.walk import Walk

_MAX_NAMED = 4
# Groups and reasons that a printed trace shows.
_MAX_ROWS, _MAX_REASONS = 60, 3
# A parameter axis: (path, axis). A path may hold wildcards where that is said.
AxisName = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How a function is traced; part of what `trace_channels` and `Cut` are told.

    Attributes:
      returns_statistics: Whether the function returns (outputs, new statistics).
      rules: More rules, or other ones, by primitive name.
      rebuilds: How such primitives are done on fewer channels, by name, where their
        parameters know sizes; see `shrink.rebuild`.
      freeze: Parameters whose channels stay, by path with wildcards (`stem/*`), or
        single axes as (path, axis); a string is one pattern.
      merge: Sets of axes that live or die together, position by position.
      renormalise: Whether means over channels become means over those that are kept,
        which is not the same function: see `trace_channels`.
      factors: Where an axis is made of several, or taken apart into them, such as into
        heads and their features: whether `one` of them can be cut, or `all`, each with
        a group of its own.
    """

    returns_statistics: bool = False
    rules: Mapping[str, Rule] | None = None
    rebuilds: Mapping[str, Callable[..., Any]] | None = None
    freeze: str | Sequence[str | AxisName] = ()
    merge: Sequence[Sequence[AxisName]] = ()
    renormalise: bool = False
    factors: Factors = "one"

    def __post_init__(self) -> None:
        if isinstance(self.freeze, str):
            object.__setattr__(self, "freeze", (self.freeze,))
        if self.factors not in typing.get_args(Factors):
            raise UserError(f"factors={self.factors!r} is unknown; use one or all")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ChannelTrace:
    """What `trace_channels` found; printed, a table of its groups.

    Attributes:
      groups: Channels that can be removed, in the order in which they are made.
      frozen: Positions that must stay, with the reason.
      shapes: Shape of every parameter by path.
      options: How the function was traced.
      beside: Axes that are split, such as into heads and their features -> length of a
        part that must stay, and why.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: tuple[FrozenChannels, ...]
    shapes: Mapping[str, tuple[int, ...]]
    options: TraceOptions
    beside: Mapping[AxisName, tuple[int, Reason]] = dataclasses.field(
        default_factory=dict
    )

    def __repr__(self) -> str:
        """Group by group: channels, parameters that go with them, and where."""
        total = sum(math.prod(shape) for shape in self.shapes.values())
        rows = [("group", "channels", "parameters", "in")]
        for group in self.groups[:_MAX_ROWS]:
            shapes = layouts_of([group], self.shapes)
            left = sum(
                math.prod(kept_shape(shape, shapes.get(path), {group.name: 0}))
                for path, shape in self.shapes.items()
            )
            where = [f"{member.path} axis {member.axis}" for member in group.members]
            more = f" and {len(where) - 2} more" if len(where) > 2 else ""
            listed = ", ".join(where[:2]) + more
            rows.append((group.name, f"{group.size:,}", f"{total - left:,}", listed))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {size:>{widths[1]}}  {count:>{widths[2]}}  {where}"
            for name, size, count, where in rows
        ]
        if len(self.groups) > _MAX_ROWS:
            lines.append(f"and {len(self.groups) - _MAX_ROWS} more groups")
        num_channels = sum(group.size for group in self.groups)
        lines.append(
            f"{len(self.groups)} groups, {num_channels:,} channels, "
            f"{self.prunable_share():.1%} of {total:,} parameters can go"
        )
        reasons = Counter(each.reason for each in self.frozen for _ in each.members)
        shown = [f"{why} ({count})" for why, count in reasons.most_common(_MAX_REASONS)]
        if len(reasons) > _MAX_REASONS:
            shown.append(f"{len(reasons) - _MAX_REASONS} more reasons")
        if shown:
            lines.append(f"axes that stay, and why: {'; '.join(shown)}")
        return "\n".join(lines)

    def explain(self, path: str | None = None) -> str:
        """Says for every axis of a parameter which group it is in, or why it stays.

        An axis of several owners has a line for each, with their positions. What stays
        names the operation that ties it, the line it comes from, and the parameters
        that are tied by it.

        Args:
          path: Path of the parameter, of NNX with or without `/value`; None for all.
        Raises:
          UserError: There is no such parameter.
        """
        if path is None:
            return "\n".join(self.explain(each) for each in self.shapes)
        if path not in self.shapes:
            names = (f"{path}/value", path.removesuffix("/value"))
            found = next((name for name in names if name in self.shapes), None)
            if found is None:
                first = ", ".join(list(self.shapes)[:_MAX_NAMED])
                more = ", ..." if len(self.shapes) > _MAX_NAMED else ""
                raise UserError(
                    f"no parameter {path!r}{suggest(path, self.shapes)}; there are "
                    f"{first}{more}"
                )
            path = found
        shape = self.shapes[path]
        lines = [
            f"{path} axis {axis} ({size}){where}: {what}"
            for axis, size in enumerate(shape)
            for _, where, what in sorted(self._owners(path, axis, size))
        ]
        return "\n".join(lines) or f"{path}: stays; is a single number"

    def _owners(self, path: str, axis: int, size: int) -> list[tuple[int, str, str]]:
        """(first position, which positions, who has them or why they stay)."""
        found = [] if size else [(0, "", "is empty")]

        def add(member: ChannelSlice, what: str) -> None:
            if (member.path, member.axis) == (path, axis):
                positions = np.sort(member.positions, axis=None)
                where = "" if len(positions) == size else f", {_ranges(positions)}"
                found.append((int(positions[0]), where, what))

        part = ""
        if (path, axis) in self.beside:
            length, why = self.beside[path, axis]
            part = f"; the axis of {length} that is a part of it stays; {why}"
        for group in self.groups:
            for member in group.members:
                width = member.positions.shape[1]
                of = f" of {width} positions" if width > 1 else ""
                add(member, f"group {group.name}, {group.size} channels{of}{part}")
        for staying in self.frozen:
            for member in staying.members:
                also = _together_with(staying, path, axis)
                add(member, f"stays; {staying.reason}{also}")
        return found

    def prunable_share(self) -> float:
        """Share of the parameters that can be cut, along each of their axes alike.

        A matrix of whose two axes one can be cut counts half, unless the other one
        stays in every network, as an axis of inputs or outputs does; see `Reason`.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> def apply(params, x):
          ...     h = jnp.tanh(x @ params['in'])
          ...     return jax.lax.cummax(h @ params['mid'], axis=1) @ params['out']
          >>> params = {'in': jnp.ones((2, 8)), 'out': jnp.ones((8, 2))}
          >>> params['mid'] = jnp.ones((8, 8))
          >>> trace_channels(apply, params, jnp.ones((1, 2))).prunable_share()
          0.5
        """
        layouts = layouts_of(self.groups, self.shapes)
        inherent: Counter[AxisName] = Counter()
        for staying in self.frozen:
            for member in staying.members if staying.reason.is_inherent else ():
                inherent[member.path, member.axis] += member.positions.size
        cut = total = 0.0
        for path, shape in self.shapes.items():
            axes = layouts.get(path, {})
            shares = [
                1 - len(axes[axis].free) / size if axis in axes else 0.0
                for axis, size in enumerate(shape)
                if 1 < size > inherent[path, axis]
            ]
            total += math.prod(shape)
            cut += math.prod(shape) * sum(shares) / max(len(shares), 1)
        return cut / max(total, 1)


def _ranges(positions: np.ndarray) -> str:
    """Names sorted positions: `positions 0-7 and 16-23`."""
    ends = np.flatnonzero(np.diff(positions) > 1)
    starts = positions[np.concatenate([[0], ends + 1])]
    stops = positions[np.concatenate([ends, [len(positions) - 1]])]
    if len(starts) > _MAX_NAMED:
        return f"{len(positions)} positions from {starts[0]} to {stops[-1]}"
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    return "positions " + " and ".join(
        f"{a}-{b}" if a < b else f"{a}" for a, b in pairs
    )


def _together_with(owner: FrozenChannels, path: str, axis: int) -> str:
    others = [
        f"{member.path} axis {member.axis}"
        for member in owner.members
        if (member.path, member.axis) != (path, axis)
    ]
    if not others:
        return ""
    more = len(others) - _MAX_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"; together with {', '.join(others[:_MAX_NAMED])}{rest}"


@dataclasses.dataclass(frozen=True, eq=False)
class Labelled:
    """A function with labels: what `trace_channels` and `shrink` start from.

    `weights` and `running` say what is known of parameters and running statistics,
    `first_use` when each is first read, `outputs` how results are structured.
    """

    program: LabelledProgram
    table: LabelTable
    weights: Mapping[str, Traced]
    running: Mapping[str, Traced]
    first_use: Mapping[Traced, int]
    outputs: Any


def trace_channels(
    apply: Callable[..., Any],
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
    **options: Any,
) -> ChannelTrace:
    """Finds which channels of which parameters can only be removed together.

    Walks the program of `apply` and follows what every position of every axis is tied
    to. Channels that occur together form one `ChannelGroup`; masking them and cutting
    them out give the same outputs. What a primitive without a rule touches stays, as do
    the axes of inputs and outputs.

    Where an axis is split, such as into heads and their features, one of the parts is
    cut: one that is tied to what was cut elsewhere, or else the finest. With
    `factors="all"`, all of them are: heads and features have groups of their own, and a
    position of the axis stays if both do.

    Args:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)` where
        `statistics` is given.
      params: Parameters, or their shapes (`jax.ShapeDtypeStruct`).
      *inputs: Example inputs, or their shapes.
      statistics: Running statistics shaped like channels but not trained or masked,
        such as those of batch norm.
      **options: Fields of `TraceOptions`. With `renormalise=True`, sums over channels
        that are divided by their number become means over the kept ones, as in a layer
        norm of the smaller width; the smaller function is then another one, and
        `shrink.certify` says by how much.
    Returns:
      The groups and the reasons for what stays.
    Raises:
      UserError: Two leaves have one path, a leaf is no array, the function uses an axis
        name that nothing binds, a rule returned other shapes than its primitive, or
        `freeze` or `merge` name what is not there.
    Example:
      >>> import jax.numpy as jnp
      >>> def apply(params, x):
      ...     return jnp.tanh(x @ params['in']) @ params['out']
      >>> params = {'in': jnp.ones((3, 8)), 'out': jnp.ones((8, 2))}
      >>> trace = trace_channels(apply, params, jnp.ones((1, 3)))
      >>> [(g.name, g.size, [(m.path, m.axis) for m in g.members])
      ...  for g in trace.groups]
      [('in', 8, [('in', 1), ('out', 0)])]
      >>> print(trace.explain('out').split(' at ')[0])
      out axis 0 (8): group in, 8 channels
      out axis 1 (2): stays; is an output of the function
    """
    chosen = TraceOptions(**options)
    found = label_function(apply, params, inputs, statistics, chosen)
    unread = () if chosen.returns_statistics else found.running.values()
    for value in [*found.weights.values(), *unread]:
        if value not in found.first_use:
            for labels in value.labels:
                found.table.freeze(labels, Reason("", "is not used"))
    shapes = {path: value.shape for path, value in found.weights.items()}
    groups, frozen, beside = _groups_of(found, chosen.factors)
    return ChannelTrace(groups, frozen, shapes, chosen, beside)


def _groups_of(
    found: Labelled, factors: Factors
) -> tuple[
    tuple[ChannelGroup, ...],
    tuple[FrozenChannels, ...],
    dict[AxisName, tuple[int, Reason]],
]:
    weights, running = _places(found, found.weights), _places(found, found.running)
    resolution = resolve(found.table, factors=factors)
    added = resolution.component[added_labels(found.table)]
    moving = resolution.component[found.table.moving_labels()]
    groups, frozen = collect_groups(resolution, weights, running, added, moving)
    if factors == "all":
        try:
            layouts_of(groups, {p: v.shape for p, v in found.weights.items()})
            running_shapes = {p: v.shape for p, v in found.running.items()}
            layouts_of(groups, running_shapes, "statistics")
        except UserError:
            # What is left of some axis would be no box; of one factor, it always is.
            return _groups_of(found, "one")
    stays = factors_that_stay(found.table, resolution)
    beside = {
        (place.path, place.axis): stays[own]
        for place in weights
        if stays
        for own in resolution.component[place.labels].tolist()
        if own in stays
    }
    return groups, frozen, beside


def _places(found: Labelled, values: Mapping[str, Traced]) -> list[Place]:
    """Every axis of every parameter, earliest use first: made before read."""
    never = len(found.first_use)
    order = sorted(values.items(), key=lambda item: found.first_use.get(item[1], never))
    return [
        Place(path, axis, labels)
        for path, value in order
        for axis, labels in enumerate(value.labels)
    ]


def label_function(
    apply: Callable[..., Any],
    params: PyTree,
    inputs: Sequence[Any],
    statistics: PyTree | None,
    options: TraceOptions,
    with_jax_derivatives: bool = False,
) -> Labelled:
    """Traces a function and walks its program; arguments as for `trace_channels`."""
    trees = (params,) if statistics is None else (params, statistics)
    for kind, tree in zip(("parameter", "statistic"), trees, strict=False):
        _check_arrays(kind, tree)
    _check_arrays("input", inputs)
    closed, outputs = _traced(apply, *trees, *inputs)
    table = LabelTable()
    walk = Walk(
        {**REFUSALS, **RULES, **(options.rules or {})},
        table,
        options.renormalise,
        with_jax_derivatives,
    )
    weights = _parameters(table, params, is_masked=True)
    running = _parameters(table, statistics, is_masked=False)
    leaves, _ = jax.tree_util.tree_flatten_with_path(inputs)
    avals = closed.in_avals[len(closed.in_avals) - len(leaves) :]
    given = [
        _input(f"input {path_of(path)}", aval)
        for (path, _), aval in zip(leaves, avals, strict=True)
    ]
    program = walk.run(closed, [*weights.values(), *running.values(), *given])
    _freeze_outputs(table, program.results, running, options.returns_statistics)
    _apply_wishes(table, weights, options)
    table.freeze_inexact_sums()
    return Labelled(
        program, table, weights, running, walk.first_use, jax.tree.structure(outputs)
    )


def _check_arrays(kind: str, tree: PyTree) -> None:
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if not is_array and not isinstance(leaf, bool | int | float | complex):
            raise UserError(
                f"{kind} {path_of(key_path)!r} is a {type(leaf).__name__} and not an "
                "array; give trees of arrays, and let the function hold the rest: of "
                "an Equinox module, arrays, rest = eqx.partition(module, eqx.is_array) "
                "and lambda arrays, x: eqx.combine(arrays, rest)(x)"
            )


def _traced(apply: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """The program of a function, and its outputs' shapes."""
    try:
        return jax.make_jaxpr(apply, return_shape=True)(*arguments)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise UserError(
            f"the function uses a mesh or vmap that is not around it ({error}); give "
            "one that holds it, such as lambda params, x: jax.vmap(apply, (None, 0), "
            "axis_name=...)(params, x), or one that needs none, as in evaluation"
        ) from error


def _input(name: str, aval: Any) -> Traced:
    may_be_nan = jax.dtypes.issubdtype(aval.dtype, np.inexact)
    value = frozen_value(aval.shape, name)
    return dataclasses.replace(value, is_given=True, may_be_nan=may_be_nan)


def _parameters(table: LabelTable, tree: PyTree, is_masked: bool) -> dict[str, Traced]:
    """Gives every position of every leaf a label of its own."""
    shapes = {path: np.shape(x) for path, x in flatten_by_path(tree).items()}
    if len(shapes) != len(jax.tree.leaves(tree)):
        raise UserError(
            "two leaves of the parameters have the same path, keys joined by '/'; "
            "rename one of them"
        )
    return {path: _parameter(table, s, is_masked) for path, s in shapes.items()}


def _parameter(table: LabelTable, shape: tuple[int, ...], is_masked: bool) -> Traced:
    labels = []
    for size in shape:
        own = table.fresh(size)
        if size == 1:
            table.freeze(own, Reason("", "has length 1"))
        labels.append(own)
        if is_masked and size:
            table.entries.append((own, math.prod(shape) // size))
    dead = (0.0 if is_masked else None,) * len(shape)
    return Traced(tuple(labels), dead, is_given=not is_masked, is_fixed=True)


def _freeze_outputs(
    table: LabelTable,
    outputs: Sequence[Traced],
    running: Mapping[str, Traced],
    returns_statistics: bool,
) -> None:
    """Outputs stay; new statistics are tied to the old ones."""
    count = len(running) if returns_statistics else 0
    new = outputs[len(outputs) - count :]
    for (path, before), after in zip(
        running.items() if count else (), new, strict=True
    ):
        if before.shape != after.shape:
            raise UserError(
                f"the function returns statistics of shape {after.shape} for {path}, "
                f"whose shape is {before.shape}; return (outputs, statistics) with "
                "statistics as they came in"
            )
        for own, other in zip(before.labels, after.labels, strict=True):
            table.join(own, other)
            reason = Reason("", "is tied to an output of the function")
            table.freeze(own[other == 0], reason)
    for output in outputs[: len(outputs) - count]:
        for labels in output.labels:
            reason = Reason("", "is an output of the function", is_inherent=True)
            table.freeze(labels, reason)


def _apply_wishes(
    table: LabelTable, weights: Mapping[str, Traced], options: TraceOptions
) -> None:
    for wish in options.freeze:
        pattern, only = (wish, None) if isinstance(wish, str) else wish
        paths = fnmatch.filter(weights, pattern)
        if not paths:
            raise UserError(
                f"freeze names {pattern!r} and no parameter is called so; there are "
                f"{', '.join(weights)}"
            )
        for path in paths:
            every = range(len(weights[path].labels))
            for axis in every if only is None else [only]:
                own = _labels_of(weights, (path, axis), "freeze")
                table.freeze(own, Reason("", "is frozen by request"))
    for together in options.merge:
        parts = [_labels_of(weights, name, "merge") for name in together]
        for name, part in zip(together, parts, strict=True):
            if len(part) != len(parts[0]):
                raise UserError(
                    f"merge names axes of {len(parts[0])} and {len(part)} positions, "
                    f"{together[0]} and {name}; only axes of one length can be merged"
                )
            table.join(parts[0], part)


def _labels_of(weights: Mapping[str, Traced], name: AxisName, wish: str) -> np.ndarray:
    path, axis = name
    if path not in weights or not 0 <= axis < len(weights[path].labels):
        raise UserError(
            f"{wish} names axis {axis} of {path!r} and there is none; the parameters "
            f"are {', '.join(f'{p} {v.shape}' for p, v in weights.items())}"
        )
    return weights[path].labels[axis]
