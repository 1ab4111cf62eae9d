"""Finds the channel groups of any JAX function by walking its traced program.

It owns the walk and the grouping; `channels.rules` says what each primitive does and
`channels.labels` keeps the books. It knows no framework: the function is `apply(params,
*inputs)`, whoever wrote it.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.channels.groups import ChannelGroup, ChannelSlice
from prunex_jax.channels.labels import (
    LabelTable,
    Reason,
    Traced,
    frozen_value,
)
from prunex_jax.channels.rules import RULES, Context, Rule, freeze_all, scalar
from prunex_jax.errors import UserError
from prunex_jax.trees import PyTree, flatten_by_path

# Where primitives that call a program keep it.
_INNER_PROGRAM = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelTrace:
    """What `trace_channels` found.

    Attributes:
      groups: Channels that can be removed, in the order in which they are made.
      frozen: (path, axis) -> why some or all positions of that axis must stay.
      shapes: Shape of every parameter by path.
    """

    groups: tuple[ChannelGroup, ...]
    frozen: Mapping[tuple[str, int], Reason]
    shapes: Mapping[str, tuple[int, ...]]

    def explain(self, path: str) -> str:
        """Says for every axis of a parameter which group it is in, or why it stays.

        Args:
          path: Path of the parameter.
        Returns:
          One line per axis and owner.
        Raises:
          UserError: There is no such parameter.
        """
        if path not in self.shapes:
            raise UserError(
                f"no parameter {path!r}; there are {', '.join(self.shapes)}"
            )
        lines = []
        for axis, size in enumerate(self.shapes[path]):
            for group in self.groups:
                for member in group.members:
                    if (member.path, member.axis) == (path, axis):
                        lines.append(
                            f"{path} axis {axis} ({size}): group {group.name}, "
                            f"{group.size} channels of {member.positions.shape[1]}"
                        )
            if (path, axis) in self.frozen:
                reason = self.frozen[path, axis]
                lines.append(f"{path} axis {axis} ({size}): stays; {reason}")
        return "\n".join(lines)

    def prunable_share(self) -> float:
        """Share of the parameters that lie in some prunable group."""
        touched: dict[str, np.ndarray] = {
            path: np.zeros(shape, bool) for path, shape in self.shapes.items()
        }
        for group in self.groups:
            for member in group.members:
                view = np.moveaxis(touched[member.path], member.axis, 0)
                view[member.positions.ravel()] = True
        total = sum(mask.size for mask in touched.values())
        return sum(int(mask.sum()) for mask in touched.values()) / max(total, 1)


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
      out axis 0 (8): group in, 8 channels of 1
      out axis 1 (2): stays; is an output of the function
    """
    if statistics is None:
        closed = jax.make_jaxpr(apply)(params, *inputs)
    else:
        closed = jax.make_jaxpr(apply)(params, statistics, *inputs)
    walk = _Walk(LabelTable(), {**RULES, **(rules or {})})
    weights = {
        path: walk.parameter(path, leaf.shape, is_masked=True)
        for path, leaf in flatten_by_path(params).items()
    }
    running = {
        path: walk.parameter(path, leaf.shape, is_masked=False)
        for path, leaf in flatten_by_path(statistics).items()
    }
    arguments = [*weights.values(), *running.values()]
    for var in closed.jaxpr.invars[len(arguments) :]:
        arguments.append(_fixed(tuple(var.aval.shape)))
    outputs = walk.run(closed.jaxpr, closed.consts, arguments)
    for output in outputs:
        for labels in output.labels:
            walk.table.freeze(labels, Reason("", "is an output of the function", ""))
    for value in [*weights.values(), *running.values()]:
        if id(value) not in walk.first_use:
            for labels in value.labels:
                walk.table.freeze(labels, Reason("", "is not used", ""))
    return _collect(walk, weights, running)


def _fixed(shape: tuple[int, ...]) -> Traced:
    return frozen_value(shape) if shape else scalar(None)


class _Walk:
    """One walk over one program."""

    def __init__(self, table: LabelTable, rules: Mapping[str, Rule]) -> None:
        self.table = table
        self.rules = rules
        self.first_use: dict[int, int] = {}
        self.num_equations = 0

    def parameter(self, path: str, shape: tuple[int, ...], is_masked: bool) -> Traced:
        labels = []
        for size in shape:
            own = self.table.fresh(size)
            if size == 1:
                self.table.freeze(own, Reason("", "has length 1", ""))
            labels.append(own)
        return Traced(tuple(labels), (is_masked,) * len(shape), path)

    def run(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        arguments: Sequence[Traced],
    ) -> list[Traced]:
        known: dict[core.Var, Traced] = {}
        known.update(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._constant(value)

        def read(atom: Any) -> Traced:
            if isinstance(atom, core.Literal):
                return self._constant(atom.val)
            return known[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            results = self._equation(eqn, operands)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, operands: list[Traced]) -> Sequence[Traced]:
        name = eqn.primitive.name
        if name in _INNER_PROGRAM and name not in self.rules:
            inner = eqn.params[_INNER_PROGRAM[name]]
            if isinstance(inner, core.ClosedJaxpr):
                return self.run(inner.jaxpr, inner.consts, operands)
            return self.run(inner, (), operands)
        for operand in operands:
            self.first_use.setdefault(id(operand), self.num_equations)
        self.num_equations += 1
        rule = self.rules.get(name, freeze_all)
        return rule(Context(eqn, self.table), *operands)

    def _constant(self, value: Any) -> Traced:
        array = np.asarray(value)
        if array.ndim:
            return frozen_value(array.shape)
        is_number = np.issubdtype(array.dtype, np.number)
        return scalar(float(array) if is_number else None)


def _collect(
    walk: _Walk, weights: Mapping[str, Traced], running: Mapping[str, Traced]
) -> ChannelTrace:
    """Gathers labels into groups: channels that occur in the same places are one."""
    component, reasons = walk.table.components()
    places = _places(walk, weights) + _places(walk, running)
    occurrences: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    frozen: dict[tuple[str, int], Reason] = {}
    for place, (path, axis, labels) in enumerate(places):
        for position, item in enumerate(component[labels].tolist()):
            if item in reasons:
                frozen.setdefault((path, axis), reasons[item])
            else:
                occurrences[item].append((place, position))
    by_signature: dict[tuple[int, ...], list[list[tuple[int, int]]]]
    by_signature = collections.defaultdict(list)
    for channel in occurrences.values():
        by_signature[tuple(place for place, _ in channel)].append(channel)
    names: collections.Counter[str] = collections.Counter()
    groups = []
    num_weight_places = sum(len(value.labels) for value in weights.values())
    for signature, channels in sorted(by_signature.items()):
        slices = _slices(places, signature, channels)
        members = tuple(s for place, s in slices if place < num_weight_places)
        if not members:
            continue
        base = members[0].path.removesuffix("/kernel")
        names[base] += 1
        groups.append(
            ChannelGroup(
                name=base if names[base] == 1 else f"{base}#{names[base]}",
                size=len(channels),
                members=members,
                statistics=tuple(s for p, s in slices if p >= num_weight_places),
            )
        )
    shapes = {path: value.shape for path, value in weights.items()}
    return ChannelTrace(tuple(groups), frozen, shapes)


def _places(
    walk: _Walk, values: Mapping[str, Traced]
) -> list[tuple[str, int, np.ndarray]]:
    """(path, axis, labels) of every axis; made before read, earliest use first."""
    order = sorted(
        values.items(),
        key=lambda item: walk.first_use.get(id(item[1]), walk.num_equations),
    )
    return [
        (path, axis, labels)
        for path, value in order
        for axis, labels in enumerate(value.labels)
    ]


def _slices(
    places: Sequence[tuple[str, int, np.ndarray]],
    signature: tuple[int, ...],
    channels: Sequence[Sequence[tuple[int, int]]],
) -> list[tuple[int, ChannelSlice]]:
    """Positions of all channels of one group, place by place."""
    result = []
    for place in sorted(set(signature)):
        path, axis, _ = places[place]
        positions = np.array(
            [[pos for p, pos in channel if p == place] for channel in channels],
            np.int32,
        )
        result.append((place, ChannelSlice(path, axis, positions)))
    return result
