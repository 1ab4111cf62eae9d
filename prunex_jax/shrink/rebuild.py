"""How operations, calls, loops and derivatives are done on fewer channels.

Only those whose parameters know sizes are listed; everything else is done as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prunex_jax.base.jaxprs import (
    OF_A_CLASS,
    is_rematerialised,
    linear_solve_operands,
    rematerialised,
    scan_operands,
    scanned,
    transposed_call,
    while_operands,
)
from prunex_jax.channels.derivatives import (
    has_tangent,
    moving_operands,
    tangents_of,
)
from prunex_jax.channels.labels import LabelledEquation, LabelledProgram, Traced
from prunex_jax.channels.rules.lookup import SCATTERS
from prunex_jax.channels.walk import evaluate
from prunex_jax.shrink.evaluator import Evaluator, Rebuild, take_positions


def _broadcast_in_dim(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    shape = evaluator.sizes(equation.results[0])
    return evaluate(equation.eqn, operands, shape=shape)


def _reshape(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    sizes = evaluator.sizes(equation.results[0])
    return evaluate(equation.eqn, operands, new_sizes=sizes)


def _slice(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    params = equation.eqn.params
    (x,) = operands
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    ranges = list(zip(starts, limits, strides, strict=True))
    for axis, labels in enumerate(equation.operands[0].labels):
        kept = evaluator.kept(labels)
        if not kept.all():
            positions = np.arange(*ranges[axis])
            rank = np.cumsum(kept) - 1
            x = take_positions(x, rank[positions[kept[positions]]], axis)
            ranges[axis] = (0, x.shape[axis], 1)
    return [lax.slice(x, *zip(*ranges, strict=True))] if ranges else [x]


def _split(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    axis = equation.eqn.params["axis"]
    sizes = tuple(evaluator.sizes(piece)[axis] for piece in equation.results)
    return evaluate(equation.eqn, operands, sizes=sizes)


def _conv(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    params = equation.eqn.params
    groups = params["feature_group_count"]
    numbers = params["dimension_numbers"]
    x, kernel = operands
    if 0 in (*x.shape, *kernel.shape):  # nothing is left to convolve
        (result,) = equation.eqn.outvars
        aval: Any = result.aval
        return [jnp.zeros(evaluator.sizes(equation.results[0]), aval.dtype)]
    if groups > 1:
        groups = x.shape[numbers.lhs_spec[1]] // kernel.shape[numbers.rhs_spec[1]]
    return evaluate(equation.eqn, operands, feature_group_count=groups)


def _gather(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    x, indices = operands
    params, notes = equation.eqn.params, equation.notes
    sizes = tuple(
        x.shape[axis] if is_full else size
        for axis, (size, is_full) in enumerate(
            zip(params["slice_sizes"], notes["full"], strict=True)
        )
    )
    if "positions" in notes:
        axis, positions = notes["positions"]
        indices = _new_positions(evaluator, equation, axis, positions)
    return evaluate(equation.eqn, [x, indices], slice_sizes=sizes)


def _new_positions(
    evaluator: Evaluator,
    equation: LabelledEquation,
    axis: int,
    positions: np.ndarray,
) -> Any:
    """Where what is read lies now; without what is no longer read."""
    (result,) = equation.results
    offset_dims = equation.eqn.params["dimension_numbers"].offset_dims
    batch_axes = [a for a in range(len(result.labels)) if a not in offset_dims]
    left = [np.flatnonzero(evaluator.kept(result.labels[a])) for a in batch_axes]
    rank = np.cumsum(evaluator.kept(equation.operands[0].labels[axis])) - 1
    now = rank[positions[np.ix_(*left)]]
    aval: Any = equation.eqn.invars[1].aval
    return jnp.asarray(now[..., None], aval.dtype)


def _scatter(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Writes to where known positions lie now, without what is no longer written."""
    x, indices, updates = operands
    if "positions" in equation.notes:
        axis, source, positions = equation.notes["positions"]
        if not updates.shape[source]:
            return [x]
        labels = equation.fits.get((2, source), equation.operands[2].labels[source])
        rank = np.cumsum(evaluator.kept(equation.results[0].labels[axis])) - 1
        now = rank[positions[evaluator.kept(labels)]]
        starts = now[:, None] if indices.ndim > 1 else now[:1]
        indices = jnp.asarray(starts, indices.dtype)
    return evaluate(equation.eqn, [x, indices, updates])


def _dynamic_slice(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    x, *starts = operands
    (before,), (after,) = equation.operands[:1], equation.results
    sizes = list(evaluator.sizes(after))
    for axis, begin in enumerate(equation.notes["begins"]):
        kept = evaluator.kept(before.labels[axis])
        if begin is not None and not kept.all():
            chosen = np.zeros(len(kept), bool)
            chosen[begin : begin + len(after.labels[axis])] = True
            x = take_positions(x, np.flatnonzero(chosen[kept]), axis)
            starts[axis] = jnp.zeros_like(starts[axis])
    return evaluate(equation.eqn, [x, *starts], slice_sizes=tuple(sizes))


def _mean(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Divides by the number of channels that are left, where that was asked for."""
    if "mean_of" in equation.notes:
        index, summed = equation.notes["mean_of"]
        share = float(evaluator.kept(summed.labels).mean())
        factor = share if equation.eqn.primitive.name == "div" else 1 / share
        other = operands[1 - index]
        operands[1 - index] = jnp.asarray(other * factor, jnp.result_type(other))
    return evaluate(equation.eqn, operands)


def _sum(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Adds what dead channels share, as often as there are dead channels."""
    counted = _counted(evaluator, equation)
    if equation.results[0].summed in evaluator.means:
        counted = {}
    if len(counted) > 1:
        return _reduce(evaluator, equation, operands)
    (result,) = evaluate(equation.eqn, operands)
    for axis, num_dead in counted.items():
        beside = evaluator.dead_value(equation, operands, 0, axis)
        (term,) = evaluate(equation.eqn, [beside])
        result = _plus(result, num_dead, term)
    return [result]


def _counted(evaluator: Evaluator, equation: LabelledEquation) -> dict[int, int]:
    """Axes whose dead channels count -> how many are dead, where there are some."""
    labels = equation.operands[0].labels
    axes = equation.notes.get("counted", ())
    num_dead = {axis: evaluator.num_dead(labels[axis]) for axis in axes}
    return {axis: count for axis, count in num_dead.items() if count}


def _plus(result: Any, times: int, term: Any) -> Any:
    return result + jnp.asarray(times).astype(term.dtype) * term  # may wrap around


def _reduce(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Puts dead channels back, in any order, where they count one by one."""
    (x,) = operands
    for axis, num_dead in _counted(evaluator, equation).items():
        beside = evaluator.dead_value(equation, [x], 0, axis)
        shape = (*x.shape[:axis], num_dead, *x.shape[axis + 1 :])
        x = jnp.concatenate([x, jnp.broadcast_to(beside, shape)], axis)
    return evaluate(equation.eqn, [x])


def _dot_general(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Adds products of what dead channels share, as often as there are some."""
    (result,) = evaluate(equation.eqn, operands)
    for axes in equation.notes.get("counted", ()):
        labels = equation.operands[0].labels[axes[0]]
        num_dead = evaluator.num_dead(equation.fits.get((0, axes[0]), labels))
        if num_dead:
            beside = [
                evaluator.dead_value(equation, operands, index, axis)
                for index, axis in enumerate(axes)
            ]
            (term,) = evaluate(equation.eqn, beside)
            result = _plus(result, num_dead, term)
    return [result]


def _call(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    return evaluator.run(equation.inner[0], operands)


def _remat(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    def run(*values: Any) -> list[Any]:
        return evaluator.run(equation.inner[0], values)

    return rematerialised(equation.eqn, run, operands)


def _scan(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    (body,) = equation.inner
    consts, start, rows = scan_operands(equation.eqn, operands)
    carried = equation.results[: len(start)]

    def turn(carry: Sequence[Any], row: Sequence[Any]) -> tuple[Any, Any]:
        results = evaluator.run(body, [*consts, *carry, *row])
        after = _fit_all(evaluator, results, body.results, carried)
        return after, results[len(start) :]

    return scanned(equation.eqn, turn, start, rows)


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
    test, body = equation.inner
    cond_consts, body_consts, start = while_operands(equation.eqn, operands)

    def goes_on(carry: Sequence[Any]) -> Any:
        return evaluator.run(test, [*cond_consts, *carry])[0]

    def turn(carry: Sequence[Any]) -> Sequence[Any]:
        results = evaluator.run(body, [*body_consts, *carry])
        return _fit_all(evaluator, results, body.results, equation.results)

    return lax.while_loop(goes_on, turn, start)


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


def _of_a_class(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Does what such an operation is made of, as its class was told sizes."""
    if not equation.inner:  # which is not known, so that it stays as it is
        return evaluate(equation.eqn, operands)
    again = _remat if is_rematerialised(equation.eqn) else _custom_vjp
    return again(evaluator, equation, operands)


def _linear_solve(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    programs, right = linear_solve_operands(equation.eqn, operands)
    count = len(right)
    solve, matvec, *transpose = [
        _of_right_side(evaluator, equation, inner, consts)
        for inner, (_, consts) in zip(equation.inner, programs, strict=True)
    ]

    def solved(run: Callable[..., list[Any]]) -> Callable[..., Any]:
        def function(_: Any, values: Sequence[Any]) -> tuple[Any, Any]:
            results = run(values)
            return results[:count], results[count:]

        return function

    named: Any = equation.eqn.params["jaxprs"]
    solution, aside = lax.custom_linear_solve(
        matvec,
        right,
        solved(solve),
        solved(transpose[0]) if transpose else None,
        symmetric=bool(transpose) and named.vecmat is named.matvec,
        has_aux=True,
    )
    return [*solution, *aside]


def _of_right_side(
    evaluator: Evaluator,
    equation: LabelledEquation,
    program: LabelledProgram,
    consts: Sequence[Any],
) -> Callable[..., list[Any]]:
    """A program of what is left of a right side, that gives something shaped alike."""

    def run(values: Sequence[Any]) -> list[Any]:
        results = evaluator.run(program, [*consts, *values])
        count = len(values)
        like = equation.results[:count]
        fitted = _fit_all(evaluator, results[:count], program.results, like)
        return [*fitted, *results[count:]]

    return run


def _linear_call(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Keeps the transpose that somebody wrote."""
    program = equation.notes.get("transpose")
    if program is None:  # which stays as it is
        return evaluate(equation.eqn, operands)
    (callee,) = equation.inner
    _, kept, moving = transposed_call(equation.eqn)
    first = kept.start
    consts = operands[:first]

    def function(known: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        return evaluator.run(callee, [*consts, *known, *moved])

    def transposed(known: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        results = evaluator.run(program, [*known, *cotangents])
        like = [equation.operands[index] for index in moving]
        return _fit_all(evaluator, results, program.results, like)

    known, moved = ([operands[i] for i in some] for some in (kept, moving))
    return jax.custom_derivatives.linear_call(function, transposed, known, moved)


def _custom_jvp(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Keeps the derivative that somebody wrote."""
    program = equation.notes.get("derivative")
    if program is None:  # of a derivative of a derivative of ...
        return evaluator.run(equation.inner[0], operands)
    eqn, results = equation.eqn, equation.results
    first = eqn.params["num_consts"]
    moving = moving_operands(eqn)

    @jax.custom_jvp
    def function(*values: Any) -> list[Any]:
        return evaluator.run(equation.inner[0], values)

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        moved = [tangents[index] for index in moving]
        values = evaluator.run(program, [*primals[first:], *moved])
        outs = _fit_all(evaluator, values, program.results, results)
        out_tangents = [_zero_tangent(out) for out in outs]
        indices = tangents_of(eqn)
        rest = zip(
            indices, values[len(outs) :], program.results[len(outs) :], strict=True
        )
        for index, value, have in rest:
            out_tangents[index] = evaluator.fit(value, have, results[index])
        return outs, out_tangents

    return function(*operands)


def _zero_tangent(x: Any) -> Any:
    if jax.dtypes.issubdtype(jnp.result_type(x), np.inexact):
        return jnp.zeros_like(x)
    return np.zeros(np.shape(x), jax.dtypes.float0)


def _custom_vjp(
    evaluator: Evaluator, equation: LabelledEquation, operands: list[Any]
) -> Sequence[Any]:
    """Keeps the derivative that somebody wrote; it does the forward part again."""
    program = equation.notes.get("derivative")
    if program is None:
        return evaluator.run(equation.inner[0], operands)
    eqn = equation.eqn
    first = eqn.params.get("num_consts", 0)
    consts = operands[:first]  # which jax does not let anybody differentiate
    given = [i for i, atom in enumerate(eqn.outvars) if has_tangent(atom)]

    @jax.custom_vjp
    def function(*values: Any) -> list[Any]:
        return evaluator.run(equation.inner[0], [*consts, *values])

    def forward(*values: Any) -> tuple[Any, Any]:
        return function(*values), values

    def backward(values: Any, cotangents: Any) -> Any:
        moved = [cotangents[index] for index in given]
        pulled = evaluator.run(program, [*consts, *values, *moved])
        back = [_zero_tangent(value) for value in values]
        pairs = zip(moving_operands(eqn), pulled, program.results, strict=True)
        for index, value, have in pairs:
            want = equation.operands[index]
            back[index - first] = evaluator.fit(value, have, want)
        return tuple(back)

    function.defvjp(forward, backward)
    return function(*operands[first:])


REBUILDS: Mapping[str, Rebuild] = {
    "broadcast_in_dim": _broadcast_in_dim,
    OF_A_CLASS: _of_a_class,
    "checkpoint": _remat,
    "closed_call": _call,
    "composite": _call,
    "cond": _cond,
    "conv_general_dilated": _conv,
    "core_call": _call,
    "custom_jvp_call": _custom_jvp,
    "custom_linear_solve": _linear_solve,
    "custom_vjp_call": _custom_vjp,
    "div": _mean,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "eval_jaxpr": _call,
    "gather": _gather,
    "jit": _call,
    "linear_call": _linear_call,
    "mul": _mean,
    "pjit": _call,
    "reduce_and": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_or": _reduce,
    "reduce_prod": _reduce,
    "reduce_sum": _sum,
    "remat2": _remat,
    "reshape": _reshape,
    "scan": _scan,
    **dict.fromkeys(SCATTERS, _scatter),
    "slice": _slice,
    "split": _split,
    "while": _while,
}
