"""Does a labelled program on what is left of its values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from prunex_jax.base.errors import UserError
from prunex_jax.channels.labels import LabelledEquation, LabelledProgram, Traced
from prunex_jax.channels.resolve import Resolution
from prunex_jax.channels.walk import evaluate


class Evaluator:
    """Evaluates programs without their dead channels."""

    def __init__(
        self, resolution: Resolution, rebuilds: Mapping[str, "Rebuild"]
    ) -> None:
        self.rebuilds = rebuilds
        self.alive = resolution.is_alive()

    def kept(self, labels: np.ndarray) -> np.ndarray:
        """bool[size], which positions of an axis are left."""
        return self.alive[labels]

    def sizes(self, value: Traced) -> tuple[int, ...]:
        """Shape of what is left of a value."""
        return tuple(int(self.alive[labels].sum()) for labels in value.labels)

    def run(self, program: LabelledProgram, values: Sequence[Any]) -> list[Any]:
        """What is left of a program's results, from what is left of its arguments."""
        jaxpr = program.jaxpr
        known: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))
        known.update(zip(jaxpr.constvars, program.consts, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else known[atom]

        for equation in program.equations:
            operands = [read(atom) for atom in equation.eqn.invars]
            results = self._equation(equation, operands)
            known.update(zip(equation.eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, equation: LabelledEquation, operands: list[Any]
    ) -> Sequence[Any]:
        eqn = equation.eqn
        name = eqn.primitive.name
        for (index, axis), labels in equation.fits.items():
            have = equation.operands[index].labels[axis]
            if have is not labels:
                operands[index] = self.cut_axis(operands[index], axis, have, labels)
        with eqn.ctx.manager:
            results = self.rebuilds.get(name, as_it_is)(self, equation, operands)
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


def as_it_is(
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
