"""Does a labelled program on what is left of its values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from prunex_jax.base.errors import UserError
from prunex_jax.base.jaxprs import interpret
from prunex_jax.channels.labels import (
    LabelledEquation,
    LabelledProgram,
    LabelTable,
    Shared,
    Traced,
    beside_axis,
)
from prunex_jax.channels.resolve import Resolution
from prunex_jax.channels.walk import evaluate


class Evaluator:
    """Evaluates programs without their dead channels."""

    def __init__(
        self,
        resolution: Resolution,
        rebuilds: Mapping[str, "Rebuild"],
        table: LabelTable,
    ) -> None:
        self.rebuilds = rebuilds
        self.alive = resolution.is_alive()
        self.means = table.means  # Sums over channels that became means.
        self.read = table.read  # Shared values that something reads.
        self.shared: dict[Shared, Any] = {}

    def kept(self, labels: np.ndarray) -> np.ndarray:
        """bool[size], which positions of an axis are left."""
        return self.alive[labels]

    def sizes(self, value: Traced) -> tuple[int, ...]:
        """Shape of what is left of a value."""
        return tuple(int(self.alive[labels].sum()) for labels in value.labels)

    def run(self, program: LabelledProgram, values: Sequence[Any]) -> list[Any]:
        """What is left of a program's results, from what is left of its arguments."""
        labelled = iter(program.equations)
        closed = core.ClosedJaxpr(program.jaxpr, program.consts)
        return interpret(
            closed, values, lambda _, operands: self._equation(next(labelled), operands)
        )

    def _equation(
        self, equation: LabelledEquation, operands: list[Any]
    ) -> Sequence[Any]:
        for (index, axis), labels in equation.fits.items():
            have = equation.operands[index].labels[axis]
            if have is not labels:
                operands[index] = self.cut_axis(operands[index], axis, have, labels)
        results = self._rebuilt(equation, operands)
        # What the programs that it calls make is theirs to compute.
        for index, value in enumerate(() if equation.inner else equation.results):
            for axis, shared in value.shared.items():
                if shared in self.read:
                    beside = self._done_beside(equation, operands, index, axis)
                    self.shared[shared] = beside
        return results

    def num_dead(self, labels: np.ndarray) -> int:
        """How many positions of an axis are not left."""
        return int((~self.kept(labels)).sum())

    def dead_value(
        self, equation: LabelledEquation, operands: Sequence[Any], index: int, axis: int
    ) -> Any:
        """What an operand is at dead positions of an axis, with length 1 along it."""
        value, x = equation.operands[index], operands[index]
        if axis not in value.shared:
            shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
            number: Any = value.dead[axis]
            # Like `x` it varies over a mesh, or not.
            return jnp.full_like(x, number, jnp.result_type(x), shape)
        found = self.shared[value.shared[axis]]
        for (operand, other), labels in equation.fits.items():
            if operand == index and other != axis:
                found = self.cut_axis(found, other, value.labels[other], labels)
        return found

    def _done_beside(
        self, equation: LabelledEquation, operands: Sequence[Any], index: int, axis: int
    ) -> Any:
        """Does an equation for one dead position of an axis of a result."""
        shared = equation.results[index].shared[axis]
        values, known = list(operands), list(equation.operands)
        for operand, source in enumerate(shared.axes):
            if source is not None:
                values[operand] = self.dead_value(equation, operands, operand, source)
                known[operand] = _with_one_left(known[operand], source)
        results = list(equation.results)
        results[index] = _with_one_left(results[index], axis)
        beside = dataclasses.replace(equation, operands=known, results=results)
        return self._rebuilt(beside, values)[index]

    def _rebuilt(
        self, equation: LabelledEquation, operands: Sequence[Any]
    ) -> Sequence[Any]:
        eqn = equation.eqn
        name = eqn.primitive.name
        with eqn.ctx.manager:
            rebuild = self.rebuilds.get(name, _as_it_is)
            results = rebuild(self, equation, list(operands))
        expected = [self.sizes(value) for value in equation.results]
        shapes = [np.shape(result) for result in results]
        if shapes != expected:
            raise UserError(
                f"{name} with fewer channels gave shapes {shapes} instead of "
                f"{expected}; say how it is done with `rebuilds`"
            )
        return results

    def fit(self, x: Any, have: Traced, want: Traced) -> Any:
        """Cuts a value down to what is left of another one."""
        pairs = zip(have.labels, want.labels, strict=True)
        for axis, (own, other) in enumerate(pairs):
            x = self.cut_axis(x, axis, own, other)
        return x

    def cut_axis(self, x: Any, axis: int, have: np.ndarray, want: np.ndarray) -> Any:
        """Cuts one axis, that has what is left of `have`, down to what `want` has."""
        own, other = self.kept(have), self.kept(want)
        if (own == other).all():
            return x
        if (other & ~own).any():
            raise AssertionError("a channel is needed that was cut out")
        return take_positions(x, np.flatnonzero(other[own]), axis)


# (evaluator, equation, what is left of the operands, cut to fit) -> the same of results
Rebuild = Callable[[Evaluator, LabelledEquation, list[Any]], Sequence[Any]]


def _with_one_left(value: Traced, axis: int) -> Traced:
    labels = list(value.labels)
    labels[axis] = beside_axis(len(labels[axis]))
    return dataclasses.replace(value, labels=tuple(labels))


def _as_it_is(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Does an equation whose parameters know nothing of sizes."""
    return evaluate(equation.eqn, operands)


def take_positions(x: Any, positions: np.ndarray, axis: int) -> Any:
    """Takes positions int[n], known beforehand, along an axis."""
    count = len(positions)
    if count and count == x.shape[axis] and (positions == np.arange(count)).all():
        return x
    steps = np.unique(np.diff(positions))
    if count == 1 or (len(steps) == 1 and steps[0] > 0):
        step = int(steps[0]) if count > 1 else 1
        first, last = int(positions[0]), int(positions[-1])
        return lax.slice_in_dim(x, first, last + 1, step, axis)
    return jnp.take(x, jnp.asarray(positions), axis=axis, mode="clip")
