"""Finds the channel groups of any JAX function by walking its traced program.

It owns the walk and what is said about it; `channels.rules` says what each primitive
does, `channels.labels` keeps the books and `channels.components` gathers groups. It
knows no framework: the function is `apply(params, *inputs)`, whoever wrote it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.channels.components import (
    FrozenChannels,
    Place,
    collect_groups,
)
from prunex_jax.channels.groups import ChannelGroup, ChannelSlice
from prunex_jax.channels.labels import (
    FROZEN,
    Context,
    LabelTable,
    Reason,
    Rule,
    Traced,
    freeze_all,
    frozen_value,
    is_of_jax,
)
from prunex_jax.channels.rules import RULES
from prunex_jax.errors import UserError
from prunex_jax.trees import PyTree, flatten_by_path

# Where primitives that call a program once keep it.
_INNER_PROGRAM = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "composite": "jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}
_MAX_NAMED = 4


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelTrace:
    """What `trace_channels` found.

    Attributes:
      groups: Channels that can be removed, in the order in which they are made.
      frozen: Positions that must stay, with the reason.
      shapes: Shape of every parameter by path.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: tuple[FrozenChannels, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def explain(self, path: str | None = None) -> str:
        """Says for every axis of a parameter which group it is in, or why it stays.

        An axis of several owners has a line for each, with their positions. What stays
        names the operation that ties it, the line it comes from, and the parameters
        that are tied by it.

        Args:
          path: Path of the parameter; None for all.
        Returns:
          Lines in the order of axes and positions.
        Raises:
          UserError: There is no such parameter.
        """
        if path is None:
            return "\n".join(self.explain(each) for each in self.shapes)
        if path not in self.shapes:
            raise UserError(
                f"no parameter {path!r}; there are {', '.join(self.shapes)}"
            )
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

        for group in self.groups:
            for member in group.members:
                width = member.positions.shape[1]
                of = f" of {width} positions" if width > 1 else ""
                add(member, f"group {group.name}, {group.size} channels{of}")
        for staying in self.frozen:
            for member in staying.members:
                also = _together_with(staying, path, axis)
                add(member, f"stays; {staying.reason}{also}")
        return found

    def prunable_share(self) -> float:
        """Share of the parameters that lie in some prunable group."""
        free = {path: list(shape) for path, shape in self.shapes.items()}
        for group in self.groups:
            for member in group.members:
                free[member.path][member.axis] -= member.positions.size
        total = sum(math.prod(shape) for shape in self.shapes.values())
        return 1 - sum(math.prod(sizes) for sizes in free.values()) / max(total, 1)


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


def trace_channels(
    apply: Callable[..., Any],
    params: PyTree,
    *inputs: Any,
    statistics: PyTree | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> ChannelTrace:
    """Finds which channels of which parameters can only be removed together.

    Walks the program of `apply` and follows what every position of every axis is tied
    to. Channels that occur together form one `ChannelGroup`; masking them and cutting
    them out give the same outputs. What a primitive without a rule touches stays, as do
    the axes of inputs and outputs.

    Args:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)` where
        `statistics` is given.
      params: Parameters, or their shapes (`jax.ShapeDtypeStruct`).
      *inputs: Example inputs, or their shapes.
      statistics: Running statistics shaped like channels but not trained or masked,
        such as those of batch norm.
      rules: More rules, or other ones, by primitive name; see `channels.rules`.
    Returns:
      The groups and the reasons for what stays.
    Raises:
      UserError: Two leaves have one path, or a rule returned other shapes than its
        primitive.
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
    trees = (params,) if statistics is None else (params, statistics)
    closed = jax.make_jaxpr(apply)(*trees, *inputs)
    walk = _Walk({**RULES, **(rules or {})})
    weights = walk.parameters(params, is_masked=True)
    running = walk.parameters(statistics, is_masked=False)
    given = [
        _fixed(np.shape(leaf), f"input {path}")
        for path, leaf in flatten_by_path(inputs).items()
    ]
    outputs = walk.run(
        closed.jaxpr,
        closed.consts,
        [*weights.values(), *running.values(), *given],
    )
    for output in outputs:
        for labels in output.labels:
            walk.table.freeze(labels, Reason("", "is an output of the function"))
    for value in [*weights.values(), *running.values()]:
        if value not in walk.first_use:
            for labels in value.labels:
                walk.table.freeze(labels, Reason("", "is not used"))
    groups, frozen = collect_groups(
        walk.table, walk.places(weights), walk.places(running)
    )
    shapes = {path: value.shape for path, value in weights.items()}
    return ChannelTrace(groups, frozen, shapes)


def _fixed(shape: tuple[int, ...], origin: str) -> Traced:
    return dataclasses.replace(frozen_value(shape, origin), is_given=True)


class _Walk:
    """One walk over one program."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.table = LabelTable()
        self.rules = rules
        # Values that some equation reads, with how many came before it.
        self.first_use: dict[Traced, int] = {}
        self.num_equations = 0

    def parameters(self, tree: PyTree, is_masked: bool) -> dict[str, Traced]:
        """Gives every position of every leaf a label of its own."""
        shapes = {path: np.shape(x) for path, x in flatten_by_path(tree).items()}
        if len(shapes) != len(jax.tree.leaves(tree)):
            raise UserError(
                "two leaves of the parameters have the same path, keys joined by '/'; "
                "rename one of them"
            )
        return {path: self._parameter(s, is_masked) for path, s in shapes.items()}

    def _parameter(self, shape: tuple[int, ...], is_masked: bool) -> Traced:
        labels = []
        for size in shape:
            own = self.table.fresh(size)
            if size == 1:
                self.table.freeze(own, Reason("", "has length 1"))
            labels.append(own)
        dead = (0.0 if is_masked else None,) * len(shape)
        return Traced(tuple(labels), dead, is_given=not is_masked)

    def run(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        arguments: Sequence[Traced],
        site: core.JaxprEqn | None = None,
    ) -> list[Traced]:
        """Walks a program; `site` is the equation to blame in its stead."""
        known: dict[core.Var, Traced] = {}
        known.update(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = _constant(value)

        def read(atom: Any) -> Traced:
            if isinstance(atom, core.Literal):
                return _constant(atom.val)
            return known[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            results = self._equation(eqn, operands, site or eqn)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, eqn: core.JaxprEqn, operands: list[Traced], site: core.JaxprEqn
    ) -> Sequence[Traced]:
        name = eqn.primitive.name
        if name in _INNER_PROGRAM and name not in self.rules:
            inner = eqn.params[_INNER_PROGRAM[name]]
            is_closed = isinstance(inner, core.ClosedJaxpr)
            jaxpr, consts = (inner.jaxpr, inner.consts) if is_closed else (inner, ())
            return self.run(jaxpr, consts, operands, site if is_of_jax(jaxpr) else None)
        for operand in operands:
            self.first_use.setdefault(operand, self.num_equations)
        self.num_equations += 1
        context = Context(eqn, self.table, tuple(operands), site)
        results = self.rules.get(name, freeze_all)(context, *operands)
        shapes = [result.shape for result in results]
        expected = [context.out_shape(i) for i in range(len(eqn.outvars))]
        if shapes != expected:
            raise UserError(
                f"the rule for {name} returned shapes {shapes} instead of {expected}; "
                "correct the rule"
            )
        return [_finished(context, result) for result in results]

    def places(self, values: Mapping[str, Traced]) -> list[Place]:
        """Every axis of every parameter, earliest use first: made before read."""
        order = sorted(
            values.items(),
            key=lambda item: self.first_use.get(item[1], self.num_equations),
        )
        return [
            Place(path, axis, labels)
            for path, value in order
            for axis, labels in enumerate(value.labels)
        ]


def _constant(value: Any) -> Traced:
    shape = np.shape(value)
    if shape:
        return _fixed(shape, "a constant")
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    is_number = any(
        jax.dtypes.issubdtype(dtype, kind)
        for kind in (np.floating, np.integer, np.bool_)
    )
    return Traced((), (), float(value) if is_number else None, is_given=True)


def _finished(ctx: Context, result: Traced) -> Traced:
    """Adds what follows from the operands, whatever the rule."""
    labels = []
    for own in result.labels:
        if len(own) == 1:
            ctx.freeze(own, "leaves one channel alone on its axis")
            own = np.array([FROZEN], np.int64)
        labels.append(own)
    return dataclasses.replace(
        result,
        labels=tuple(labels),
        is_given=all(operand.is_given for operand in ctx.operands),
        origin=result.origin or ctx.origin,
    )
