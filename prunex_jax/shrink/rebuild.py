"""How operations are done on fewer channels, where their parameters know sizes.

Everything else is done as it is. Calls, loops and derivatives are in `shrink.calls`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from prunex_jax.channels.labelled import LabelledEquation
from prunex_jax.channels.walk import evaluate
from prunex_jax.shrink import calls
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


REBUILDS: Mapping[str, Rebuild] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _conv,
    "div": _mean,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "mul": _mean,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    **calls.REBUILDS,
}
