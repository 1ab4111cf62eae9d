"""Finds loops over stacked parameters in a traced program, and does them turn by turn.

A parameter that `lax.scan` loops over holds one layer per position of an axis.
`find_loops` follows axes of parameters through the program to the loops; `run_layers`
does the program on `Layers`, values of which every layer is an array of its own.
Both know the same operations that leave layers apart. Any other puts the layers
together first, which is what the program did, and so as right.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util

from prunex_jax.base.jaxprs import (
    called_program,
    interpret,
    open_program,
    rematerialised,
    scan_operands,
    scanned,
    while_operands,
)
from prunex_jax.channels.context import source_of
from prunex_jax.channels.numbers import ELEMENTWISE
from prunex_jax.channels.walk import evaluate

# Calls that say nothing of derivatives.
_CALLS = {"checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2"}
# Operations that leave every axis where it is.
_IN_PLACE = {
    *ELEMENTWISE,
    *("concatenate", "convert_element_type", "integer_pow", "name", "rev", "select_n"),
    *("slice", "split"),
}
# Which axes of which leaves an axis consists of: (leaf, axis) pairs.
_Origin = frozenset[tuple[Hashable, int]]
_NOWHERE: _Origin = frozenset()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """A value of which every position of one axis is an array, or `Layers`, itself."""

    # Where the layers would be stacked.
    axis: int = dataclasses.field(metadata={"static": True})
    parts: tuple[Any, ...]  # Of the shape of the value without that axis.

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layers put together."""
        inner = np.shape(self.parts[0])
        return (*inner[: self.axis], len(self.parts), *inner[self.axis :])


def put_together(x: Any) -> Any:
    """The array that layers are, stacked."""
    if not isinstance(x, Layers):
        return x
    return jnp.stack([put_together(part) for part in x.parts], x.axis)


def layer_of(x: Any, index: int, axis: int) -> Any:
    """One position of an axis of an array or of layers, without that axis."""
    if not isinstance(x, Layers):
        return lax.index_in_dim(x, index, axis, keepdims=False)
    if axis == x.axis:
        return x.parts[index]
    parts = [layer_of(part, index, axis - (axis > x.axis)) for part in x.parts]
    return Layers(x.axis - (axis < x.axis), tuple(parts))


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop over leaves of a tree."""

    length: int  # Number of turns.
    # For every operand that is looped over: which axes of leaves its first axis
    # consists of, and which ones its other axes do.
    rows: tuple[tuple[_Origin, _Origin], ...]
    source: str  # `file:line` of the caller's code, or "".

    @property
    def leaves(self) -> set[Any]:
        """What it loops over."""
        return {leaf for own, _ in self.rows for leaf, _ in own}


def find_loops(program: Any, leaves: Sequence[Hashable | None]) -> list[Loop]:
    """Finds the loops of a program over its arguments, in the order of the program."""
    finder = _Finder()
    arguments = [
        _nowhere(var) if leaf is None else _own_axes(var, leaf)
        for var, leaf in zip(open_program(program).invars, leaves, strict=True)
    ]
    finder.run(program, arguments)
    return finder.loops


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _own_axes(atom: Any, leaf: Hashable) -> list[_Origin]:
    return [frozenset([(leaf, axis)]) for axis in range(len(_shape(atom)))]


def _nowhere(atom: Any) -> list[_Origin]:
    return [_NOWHERE] * len(_shape(atom))


class _Finder:
    """Follows axes of leaves to the loops over them."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def run(self, program: Any, arguments: Sequence[list[_Origin]]) -> list[Any]:
        return interpret(
            program, arguments, self._equation, lambda x: [_NOWHERE] * np.ndim(x)
        )

    def _equation(
        self, eqn: core.JaxprEqn, operands: Sequence[list[_Origin]]
    ) -> Sequence[list[_Origin]]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.run(called_program(eqn), operands)
        if name == "scan":
            return self._scan(eqn, operands)
        nothing = [_nowhere(var) for var in eqn.outvars]
        if name == "while":
            _, consts, _ = while_operands(eqn, operands)
            self.run(params["body_jaxpr"], [*consts, *nothing])
            return nothing
        if name == "cond":
            for branch in params["branches"]:
                self.run(branch, operands[1:])
            return nothing
        for index, origins in enumerate(operands):
            for axis, origin in enumerate(origins):
                if origin:
                    self._follow(eqn, index, axis, origin, nothing)
        return nothing

    def _follow(
        self,
        eqn: core.JaxprEqn,
        index: int,
        axis: int,
        origin: _Origin,
        results: Sequence[list[_Origin]],
    ) -> None:
        before, after = _shape(eqn.invars[index]), _shape(eqn.outvars[0])
        where = _kept_axis(eqn.primitive.name, eqn.params, before, after, axis)
        if where is not None:
            for result in results:
                result[where] |= origin

    def _scan(
        self, eqn: core.JaxprEqn, operands: Sequence[list[_Origin]]
    ) -> Sequence[list[_Origin]]:
        consts, carry, rows = scan_operands(eqn, operands)
        params: Any = eqn.params
        if params["length"]:
            looped = tuple((row[0], _NOWHERE.union(*row[1:])) for row in rows if row[0])
            if looped:
                self.loops.append(Loop(params["length"], looped, source_of(eqn)))
        carried = [_nowhere(var) for var in eqn.outvars[: len(carry)]]
        arguments = [*consts, *carried, *(row[1:] for row in rows)]
        results = self.run(params["jaxpr"], arguments)
        stacked = [[_NOWHERE, *result] for result in results[len(carry) :]]
        return [*carried, *stacked]


def _kept_axis(
    name: str,
    params: Mapping[str, Any],
    shape: Sequence[int],
    out: Sequence[int],
    axis: int,
) -> int | None:
    """Where an axis of an operand is in the results; None if its layers do not stay.

    Layers may be left out, reversed, or laid out beside others. `shape` is that of the
    operand, `out` that of the first result.
    """
    if name in _IN_PLACE:
        return axis if len(out) == len(shape) else None
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "squeeze":
        gone = params["dimensions"]
        return None if axis in gone else axis - sum(other < axis for other in gone)
    if name == "broadcast_in_dim":
        where = params["broadcast_dimensions"][axis]
        return where if out[where] == shape[axis] else None
    if name == "reshape" and params.get("dimensions") is None:
        before = math.prod(shape[:axis])
        for where, size in enumerate(out):
            if size == shape[axis] and math.prod(out[:where]) == before:
                return where
    return None


def run_layers(program: Any, values: Sequence[Any]) -> list[Any]:
    """Does a program on arrays and layers; loops over layers are done turn by turn."""
    return interpret(program, values, _as_of_caller)


def _as_of_caller(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    # Explanations name the lines of whoever wrote the function.
    caller = source_info_util.user_context(eqn.source_info.traceback)
    with caller, eqn.ctx.manager:
        return _equation(eqn, operands)


def _equation(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    if not any(is_layers(x) for x in operands):
        return evaluate(eqn, operands)
    if eqn.primitive.name in _CONTROL:
        return _CONTROL[eqn.primitive.name](eqn, operands)
    shapes = [_shape(var) for var in eqn.outvars]
    return _operation(eqn, dict(eqn.params), shapes, operands)


def _operation(
    eqn: core.JaxprEqn,
    params: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    operands: Sequence[Any],
) -> Sequence[Any]:
    """Does an operation on every layer where it leaves layers apart.

    Parameters, and shapes of results, are those for these operands.
    """
    name = eqn.primitive.name
    layered = [x for x in operands if isinstance(x, Layers)]
    if not layered:
        return evaluate(eqn, operands, **params)
    axis, size = layered[0].axis, len(layered[0].parts)
    if name == "squeeze" and axis in params["dimensions"]:  # of a single layer
        inner = {"dimensions": _without(params["dimensions"], axis)}
        return _operation(eqn, inner, shapes, layered[0].parts)
    where = _kept_axis(name, params, layered[0].shape, shapes[0], axis)
    turns = _layers_left(name, params, axis, size)
    is_apart = where is not None and all(x.axis == axis for x in layered)
    if not is_apart or any(0 in shape for shape in shapes):
        return evaluate(eqn, [put_together(x) for x in operands], **params)
    assert where is not None
    if name == "concatenate" and params["dimension"] == axis:
        every = [(x, turn) for x in operands for turn in range(x.shape[axis])]
        return [Layers(axis, tuple(layer_of(x, turn, axis) for x, turn in every))]
    if name == "split" and params["axis"] == axis:
        ends = itertools.accumulate(params["sizes"], initial=0)
        return [
            Layers(axis, layered[0].parts[a:b]) for a, b in itertools.pairwise(ends)
        ]
    inner = _params_of_a_layer(name, params, axis, where)
    left = [(*shape[:where], *shape[where + 1 :]) for shape in shapes]
    rows = [
        _operation(eqn, inner, left, [_of_turn(x, turn, axis) for x in operands])
        for turn in turns
    ]
    return [Layers(where, parts) for parts in zip(*rows, strict=True)]


def _of_turn(x: Any, turn: int, axis: int) -> Any:
    """What one layer of an operation is given; single numbers go with every layer."""
    return layer_of(x, turn, axis) if np.shape(x) else x


def _layers_left(
    name: str, params: Mapping[str, Any], axis: int, size: int
) -> Sequence[int]:
    """Which layers an operation leaves, in their new order."""
    if name == "slice":
        step = params["strides"][axis] if params["strides"] else 1
        return range(params["start_indices"][axis], params["limit_indices"][axis], step)
    if name == "rev" and axis in params["dimensions"]:
        return range(size)[::-1]
    return range(size)


def _without(axes: Sequence[int], gone: int) -> tuple[int, ...]:
    """Axes when one is gone: it is left out, and those behind it move up."""
    return tuple(axis - (axis > gone) for axis in axes if axis != gone)


def _params_of_a_layer(
    name: str, params: dict[str, Any], axis: int, where: int
) -> dict[str, Any]:
    """Parameters of an operation on one layer of an operand, at `axis`, or result."""

    def drop(values: Sequence[int] | None, index: int) -> tuple[int, ...] | None:
        return None if values is None else (*values[:index], *values[index + 1 :])

    changed: dict[str, Any] = {}
    if name == "transpose":
        changed = {"permutation": _without(params["permutation"], axis)}
    elif name in ("squeeze", "rev"):
        changed = {"dimensions": _without(params["dimensions"], axis)}
    elif name == "broadcast_in_dim":
        changed = {
            "shape": drop(params["shape"], where),
            "broadcast_dimensions": _without(params["broadcast_dimensions"], where),
        }
    elif name == "reshape":
        changed = {"new_sizes": drop(params["new_sizes"], where)}
    elif name == "slice":
        keys = ("start_indices", "limit_indices", "strides")
        changed = {key: drop(params[key], axis) for key in keys}
    elif name in ("concatenate", "split"):
        key = "dimension" if name == "concatenate" else "axis"
        changed = {key: params[key] - (params[key] > axis)}
    return {**params, **changed}


def _call(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    return run_layers(called_program(eqn), operands)


def _remat(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    return rematerialised(
        eqn, lambda *values: run_layers(called_program(eqn), values), operands
    )


def _scan(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """Loops turn by turn where layers are looped over."""
    params: Any = eqn.params
    consts, carry, rows = scan_operands(eqn, operands)
    num_carry = len(carry)

    def turn(carry: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        results = run_layers(params["jaxpr"], [*consts, *carry, *row])
        return results[:num_carry], results[num_carry:]

    def whole(carry: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        return jax.tree.map(put_together, turn(carry, row), is_leaf=is_layers)

    if not any(is_layers(row) and row.axis == 0 for row in rows):
        start, rows = ([put_together(x) for x in xs] for xs in (carry, rows))
        return scanned(eqn, whole, start, rows)
    stacked: dict[int, Sequence[Any]] = {}
    turns = range(params["length"])
    for index in reversed(turns) if params["reverse"] else turns:
        carry, stacked[index] = turn(carry, [layer_of(row, index, 0) for row in rows])
    columns = zip(*(stacked[index] for index in turns), strict=True)
    return [*carry, *(Layers(0, column) for column in columns)]


def is_layers(x: Any) -> bool:
    """Whether a value has layers of its own."""
    return isinstance(x, Layers)


def _while(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    params: Any = eqn.params
    cond_consts, body_consts, start = while_operands(eqn, operands)

    def goes_on(carry: Sequence[Any]) -> Any:
        return run_layers(params["cond_jaxpr"], [*cond_consts, *carry])[0]

    def turn(carry: Sequence[Any]) -> Sequence[Any]:
        results = run_layers(params["body_jaxpr"], [*body_consts, *carry])
        return [put_together(x) for x in results]

    return lax.while_loop(goes_on, turn, [put_together(x) for x in start])


def _cond(eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    def branch(program: Any) -> Any:
        return lambda *values: [put_together(x) for x in run_layers(program, values)]

    which, *values = operands
    branches: Any = eqn.params["branches"]
    return lax.switch(which, [branch(program) for program in branches], *values)


_CONTROL: Mapping[str, Callable[..., Sequence[Any]]] = {
    **dict.fromkeys(("closed_call", "core_call", "jit", "pjit"), _call),
    **dict.fromkeys(("checkpoint", "remat2"), _remat),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
