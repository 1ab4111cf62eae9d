"""Calls, loops, branches and derivatives of functions on fewer channels."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from prunex_jax.channels.labelled import LabelledEquation, LabelledProgram
from prunex_jax.channels.labels import FROZEN, LabelTable, Traced
from prunex_jax.channels.resolve import ALIVE, DEAD, resolve
from prunex_jax.channels.rules import RULES
from prunex_jax.channels.walk import Walk, evaluate
from prunex_jax.shrink.evaluator import Evaluator, Rebuild, put_positions


def _call(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    return evaluator.run(equation.inner[0], operands)


def _remat(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    params = equation.eqn.params
    inner = jax.checkpoint(
        lambda *values: evaluator.run(equation.inner[0], values),
        prevent_cse=params["prevent_cse"],
        policy=params["policy"],
    )
    return inner(*operands)


def _scan(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    params = equation.eqn.params
    (body,) = equation.inner
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts = operands[:num_consts]
    start = operands[num_consts : num_consts + num_carry]
    rows = operands[num_consts + num_carry :]

    def turn(carry: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        results = evaluator.run(body, [*consts, *carry, *row])
        after = _fit_all(evaluator, results, body.results, equation.results[:num_carry])
        return after, results[num_carry:]

    carry, stacked = lax.scan(
        turn,
        start,
        rows,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _fit_all(
    evaluator: Evaluator,
    values: Sequence[Any],
    have: Sequence[Traced],
    want: Sequence[Traced],
) -> list[Any]:
    return [
        evaluator.fit(value, before, after)
        for value, before, after in zip(values, have, want, strict=False)
    ]


def _while(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    params = equation.eqn.params
    test, body = equation.inner
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:num_cond]
    body_consts = operands[num_cond : num_cond + num_body]

    def goes_on(carry: Sequence[Any]) -> Any:
        return evaluator.run(test, [*cond_consts, *carry])[0]

    def turn(carry: Sequence[Any]) -> Sequence[Any]:
        results = evaluator.run(body, [*body_consts, *carry])
        return _fit_all(evaluator, results, body.results, equation.results)

    return lax.while_loop(goes_on, turn, operands[num_cond + num_body :])


def _cond(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    def branch(inner: LabelledProgram) -> Any:
        def run(*values: Any) -> list[Any]:
            results = evaluator.run(inner, values)
            return _fit_all(evaluator, results, inner.results, equation.results)

        return run

    which, *values = operands
    return lax.switch(which, [branch(inner) for inner in equation.inner], *values)


def _custom_jvp(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Keeps the derivative that somebody wrote."""

    @jax.custom_jvp
    def function(*values: Any) -> list[Any]:
        return evaluator.run(equation.inner[0], values)

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        found = _label_derivative(evaluator, equation)
        if found is None:
            return _derivative_at_full_size(evaluator, equation, primals, tangents)
        inner, program = found
        results = inner.run(program, [*primals, *tangents])
        want = [*equation.results, *equation.results]
        fitted = [
            _cut_to(evaluator, inner, value, before, after)
            for value, before, after in zip(results, program.results, want, strict=True)
        ]
        count = len(equation.results)
        return fitted[:count], fitted[count:]

    return function(*operands)


def _cut_to(
    outer: Evaluator, inner: Evaluator, x: Any, have: Traced, want: Traced
) -> Any:
    """`fit` where the two values carry labels of different tables."""
    for axis, (own, other) in enumerate(zip(have.labels, want.labels, strict=True)):
        left, needed = inner.kept(own), outer.kept(other)
        if not (left == needed).all():
            x = jnp.take(x, np.flatnonzero(needed[left]), axis=axis)
    return x


def _label_derivative(
    evaluator: Evaluator, equation: LabelledEquation
) -> tuple[Evaluator, LabelledProgram] | None:
    """Walks the program of a derivative; None if it ties what is dead to what is kept.

    Its arguments carry the channels of the operands, whose fate is known.
    """
    params = equation.eqn.params
    if params["num_consts"] or params["symbolic_zeros"]:
        return None
    if any(not _has_tangent(atom) for atom in equation.eqn.invars):
        return None
    jvp = params["jvp_jaxpr_fun"]
    jaxpr, consts, is_zero = jvp.call_wrapped(*[False] * len(equation.operands))
    if any(is_zero):
        return None
    component = evaluator.resolution.component
    status = np.append(0, np.where(evaluator.resolution.status & DEAD, DEAD, ALIVE))
    table = LabelTable(len(status))
    primals = [_as_components(value, component) for value in equation.operands]
    tangents = [Traced(value.labels, (None,) * len(value.labels)) for value in primals]
    rules = {**RULES, **(evaluator.options.rules or {})}
    program = Walk(rules, table, evaluator.options.renormalise).run(
        core.ClosedJaxpr(jaxpr, consts), [*primals, *tangents]
    )
    resolution = resolve(table, status.astype(np.int8))
    inner = Evaluator(resolution, evaluator.options, evaluator.rebuilds)
    if resolution.conflict() is not None or not _is_covered(
        evaluator, inner, program, equation
    ):
        return None
    return inner, program


def _has_tangent(atom: Any) -> bool:
    return jax.dtypes.issubdtype(atom.aval.dtype, np.inexact)


def _as_components(value: Traced, component: np.ndarray) -> Traced:
    """The value with components, counted from 1, in place of labels."""
    labels = tuple(
        np.where(own > FROZEN, component[np.maximum(own, 0)] + 1, own)
        for own in value.labels
    )
    return Traced(labels, value.dead, value.number, value.is_given)


def _is_covered(
    outer: Evaluator,
    inner: Evaluator,
    program: LabelledProgram,
    equation: LabelledEquation,
) -> bool:
    """Whether nothing that is needed of the results was cut out."""
    wants = [*equation.results, *equation.results]
    return all(
        not (outer.kept(b) & ~inner.kept(a)).any()
        for have, want in zip(program.results, wants, strict=True)
        for a, b in zip(have.labels, want.labels, strict=True)
    )


def _put_back(evaluator: Evaluator, x: Any, value: Traced) -> Any:
    """A value of full size, with what dead channels are where they are known."""
    if jax.dtypes.result_type(x) == jax.dtypes.float0:  # tangent of integers
        return np.zeros(value.shape, jax.dtypes.float0)
    for axis, labels in enumerate(value.labels):
        kept = evaluator.kept(labels)
        if not kept.all():
            dead = value.dead[axis]
            fill = 0.0 if dead is None or not np.isfinite(dead) else dead
            x = put_positions(x, kept, axis, fill)
    return x


def _put_all(
    evaluator: Evaluator, xs: Sequence[Any], values: Sequence[Traced]
) -> list[Any]:
    return [_put_back(evaluator, x, v) for x, v in zip(xs, values, strict=True)]


def _take_all(
    evaluator: Evaluator, xs: Sequence[Any], values: Sequence[Traced]
) -> list[Any]:
    for index, value in enumerate(values):
        for axis, labels in enumerate(value.labels):
            kept = evaluator.kept(labels)
            if not kept.all():
                taken = jnp.take(xs[index], np.flatnonzero(kept), axis=axis)
                xs = [*xs[:index], taken, *xs[index + 1 :]]
    return list(xs)


def _derivative_at_full_size(
    evaluator: Evaluator, equation: LabelledEquation, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    full, tangents = jax.jvp(
        lambda *values: evaluate(equation.eqn, values),
        tuple(_put_all(evaluator, primals, equation.operands)),
        tuple(_put_all(evaluator, tangents, equation.operands)),
    )
    return (
        _take_all(evaluator, full, equation.results),
        _take_all(evaluator, tangents, equation.results),
    )


def _custom_vjp(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Forward on less; backward at full size, since nobody can look into it."""

    @jax.custom_vjp
    def function(*values: Any) -> list[Any]:
        return evaluator.run(equation.inner[0], values)

    def forward(*values: Any) -> tuple[Any, Any]:
        return function(*values), values

    def backward(values: Any, cotangents: Any) -> Any:
        _, pull = jax.vjp(
            lambda *full: evaluate(equation.eqn, full),
            *_put_all(evaluator, values, equation.operands),
        )
        full = pull(_put_all(evaluator, cotangents, equation.results))
        return tuple(_take_all(evaluator, full, equation.operands))

    function.defvjp(forward, backward)
    return function(*operands)


REBUILDS: Mapping[str, Rebuild] = {
    "checkpoint": _remat,
    "closed_call": _call,
    "composite": _call,
    "cond": _cond,
    "core_call": _call,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "jit": _call,
    "pjit": _call,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
}
