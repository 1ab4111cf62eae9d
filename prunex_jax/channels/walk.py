"""Walks a traced program and keeps what is known of every value in it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.base.errors import UserError
from prunex_jax.base.jaxprs import (
    CALLS,
    MESH_CASTS,
    called_program,
    constants_of,
    has_own_derivative,
    interpret,
    mesh_axes_of,
    name_of,
    open_program,
)
from prunex_jax.channels.context import Context, Rule, freeze_all, is_of_jax, source_of
from prunex_jax.channels.derivatives import has_tangent, label_jvp, label_vjp
from prunex_jax.channels.labels import (
    Constant,
    LabelledEquation,
    LabelledProgram,
    LabelTable,
    Reason,
    Traced,
    frozen_axis,
    has_channels,
    uniform_axis,
    uniform_value,
)
from prunex_jax.channels.numbers import (
    ELEMENTWISE,
    bound_of,
    is_nan,
    is_positive,
    may_be_infinite,
    value_of_logaddexp,
)
from prunex_jax.channels.shuffles import with_shuffles
from prunex_jax.channels.softmax import (
    dead_behind_mask,
    filled,
    is_sum_with_peak,
    masked,
    maximum_of,
    peaks,
    transposed,
)
from prunex_jax.mesh.varying import cast, differs

# Those whose values may be read outside; others are derived or done again as a whole.
_INLINED = {"closed_call", "composite", "core_call", "eval_jaxpr", "jit", "pjit"}
# Operations that leave whole numbers what they are, where they fit.
_MOVES = {
    *("broadcast_in_dim", "convert_element_type", "copy", "reshape", "rev", "slice"),
    *("squeeze", "transpose"),
}
# How often a function with a derivative of its own is expected to be differentiated.
_MAX_DEPTH = 2


@dataclasses.dataclass(eq=False)
class Walk:
    """One walk over one program, and the programs in it."""

    rules: Mapping[str, Rule]  # Of every known primitive.
    table: LabelTable  # Where labels are joined and frozen.
    renormalise: bool  # See `trace_channels`.
    # Whether forward derivatives of jax's own are walked. They mix no channels that the
    # functions keep apart, so it can be left out where nothing is differentiated.
    with_jax_derivatives: bool
    # Values that some equation reads, with how many came before it.
    first_use: dict[Traced, int] = dataclasses.field(default_factory=dict)
    num_equations: int = 0
    depth: int = 0

    def run(
        self,
        program: Any,
        arguments: Sequence[Traced],
        site: core.JaxprEqn | None = None,
    ) -> LabelledProgram:
        """Walks a program."""
        program = with_shuffles(program)
        equations = []

        def label(eqn: core.JaxprEqn, operands: list[Traced]) -> Sequence[Traced]:
            equations.append(self._equation(eqn, operands, site or eqn))
            return equations[-1].results

        results = interpret(program, arguments, label, _constant_value)
        jaxpr, consts = open_program(program), constants_of(program)
        return LabelledProgram(jaxpr, consts, equations, results)

    def _equation(
        self, eqn: core.JaxprEqn, operands: list[Traced], site: core.JaxprEqn
    ) -> LabelledEquation:
        name = eqn.primitive.name
        is_call = name in CALLS and name not in self.rules
        if is_call and (program := called_program(eqn)) is not None:
            if has_own_derivative(eqn):
                operands = _without_shared(operands)
            inner = self._inside(program, operands, site)
            notes, results = self._derivative(eqn, operands, inner.results, site)
            if name not in _INLINED:
                results = _without_shared(results)
            if _is_logaddexp(eqn):
                results = [_with_logaddexp(eqn, operands, results[0])]
            return LabelledEquation(eqn, operands, results, {}, (inner,), notes)
        for operand in operands:
            self.first_use.setdefault(operand, self.num_equations)
        self.num_equations += 1
        context = Context(
            eqn,
            self.table,
            tuple(operands),
            site,
            lambda program, arguments: self._inside(program, arguments, site),
            self.renormalise,
        )
        results = self.rules.get(name, freeze_all)(context, *operands)
        shapes = [result.shape for result in results]
        expected = [context.out_shape(i) for i in range(len(eqn.outvars))]
        if shapes != expected:
            raise UserError(
                f"the rule for {name} returned shapes {shapes} instead of {expected}; "
                "correct the rule"
            )
        constants = _constants(eqn, operands)
        finished = [
            _finished(context, atom, result, constant)
            for atom, result, constant in zip(
                eqn.outvars, results, constants, strict=True
            )
        ]
        return LabelledEquation(
            eqn, operands, finished, context.fits, context.inner, context.notes
        )

    def _derivative(
        self,
        eqn: core.JaxprEqn,
        operands: Sequence[Traced],
        results: Sequence[Traced],
        site: core.JaxprEqn,
    ) -> tuple[dict[str, LabelledProgram], Sequence[Traced]]:
        """Walks the derivative that somebody wrote, and its derivative, no further.

        Returns:
          The derivative, if there is one, and what is known of results that it moves.
        """
        name = name_of(eqn)
        if not has_own_derivative(eqn) or self.depth == _MAX_DEPTH:
            return {}, results
        is_of_jax = _is_derivative_of_jax(eqn)
        if not self.with_jax_derivatives and is_of_jax:
            return {}, results
        moving = results
        mark = len(self.table.added)

        def walk(program: Any, arguments: Sequence[Traced]) -> LabelledProgram:
            return self.run(program, arguments, site)

        is_first = self.depth == 0 and not is_of_jax
        self.depth += 1
        try:
            if name == "custom_jvp_call":
                found, moving = label_jvp(eqn, operands, results, self.table, walk)
            else:
                text = "has a derivative that is not zero at removed channels"
                reason = Reason(name, text, source_of(site)) if is_first else None
                found = label_vjp(
                    eqn, operands, results, self.table, walk, evaluate, reason
                )
        except Exception:  # somebody else's code, which may fail in any way
            self._freeze_underived(name, operands, site)
            return {}, results
        finally:
            self.depth -= 1
            del self.table.added[mark:]  # Gradients are not added up by the function.
        return {"derivative": found}, moving if is_first else results

    def _freeze_underived(
        self, name: str, operands: Sequence[Traced], site: core.JaxprEqn
    ) -> None:
        text = "has a derivative that cannot be traced"
        for operand in operands:
            for labels in operand.labels:
                if self.depth == 1 and has_channels(labels):
                    self.table.freeze(labels, Reason(name, text, source_of(site)))

    def _inside(
        self, program: Any, arguments: Sequence[Traced], site: core.JaxprEqn
    ) -> LabelledProgram:
        is_of_caller = not is_of_jax(open_program(program))
        return self.run(program, arguments, None if is_of_caller else site)


def _without_shared(values: Sequence[Traced]) -> list[Traced]:
    """What can be told across the border of a program that is done as a whole."""
    return [dataclasses.replace(x, shared={}) if x.shared else x for x in values]


def _is_derivative_of_jax(eqn: core.JaxprEqn) -> bool:
    """Whether jax wrote both a function and its forward derivative."""
    params: Any = eqn.params
    derivative = params.get("jvp_jaxpr_fun")
    if derivative is None:
        return False
    is_function_of_jax = is_of_jax(open_program(params["call_jaxpr"]))
    return is_function_of_jax and is_of_jax(derivative)


def _is_logaddexp(eqn: core.JaxprEqn) -> bool:
    """Whether this is the function of jax that softplus is made of."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    program = open_program(eqn.params["call_jaxpr"])
    name = str(getattr(program.debug_info, "func_src_info", "")).split(" at ")[0]
    return name == "logaddexp" and is_of_jax(program)


def _with_logaddexp(
    eqn: core.JaxprEqn, operands: Sequence[Traced], result: Traced
) -> Traced:
    """Adds to its result what it makes of the values of dead channels."""
    dtype = eqn.outvars[0].aval.dtype  # type: ignore[attr-defined]
    dead = list(result.dead)
    for axis, size in enumerate(result.shape):
        values = [
            x.dead[axis] if x.labels and len(x.labels[axis]) == size else x.number
            for x in operands
        ]
        value = value_of_logaddexp(values, dtype)
        if value is not None and has_channels(result.labels[axis]):
            dead[axis] = value
    bound = max(operand.at_least for operand in operands)
    return dataclasses.replace(result, dead=tuple(dead), at_least=bound)


def _constant_value(value: Any) -> Traced:
    """What is known of a constant: nobody owns its positions, and it can be cut."""
    constant = Constant(lambda: value)
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    is_number = any(
        jax.dtypes.issubdtype(dtype, kind)
        for kind in (np.floating, np.integer, np.bool_)
    )
    is_known = is_number and not isinstance(value, jax.core.Tracer)
    number = _number_of(value) if is_known else None
    shape = np.shape(value)
    traced = uniform_value(shape, number)
    if isinstance(value, jax.core.Tracer):  # of a function around this one
        may_be_nan = jax.dtypes.issubdtype(dtype, np.inexact)
        return dataclasses.replace(traced, is_given=True, may_be_nan=may_be_nan)
    return dataclasses.replace(
        traced,
        is_given=True,
        is_fixed=True,
        constant=constant,
        is_positive=is_known and _is_above_zero_everywhere(value),
        at_least=_lowest(value) if is_known else -math.inf,
    )


def _lowest(value: Any) -> float:
    """The lowest number of an array; minus infinity where it is none."""
    lowest = float(np.min(np.asarray(value))) if np.size(value) else math.nan
    return lowest if math.isfinite(lowest) else -math.inf


def _is_above_zero_everywhere(value: Any) -> bool:
    with np.errstate(invalid="ignore"):  # of nan, which small types warn about
        return bool((np.asarray(value) > 0).all())


def _number_of(value: Any) -> float | None:
    """The number that an array is everywhere; nan if it is not finite everywhere."""
    if np.ndim(value) == 0:
        return float(value)
    array = np.asarray(value)
    if not array.size:
        return None
    first = float(array.flat[0])
    if (array == array.flat[0]).all():
        return first
    return None if np.isfinite(np.asarray(array, np.float32)).all() else float("nan")


def _constants(
    eqn: core.JaxprEqn, operands: Sequence[Traced]
) -> Sequence[Constant | None]:
    """What an equation makes of constants, computed when somebody asks."""
    count, name = len(eqn.outvars), eqn.primitive.name
    if not all(operand.constant for operand in operands) or eqn.effects:
        return [None] * count
    if name in MESH_CASTS:
        return [operand.constant for operand in operands]
    if mesh_axes_of(eqn):  # Is nothing that can be computed here.
        return [None] * count

    def compute() -> list[Any]:
        values = [operand.constant.value for operand in operands if operand.constant]
        with jax.ensure_compile_time_eval():
            return evaluate(eqn, values)

    results = Constant(compute)
    if count == 1:
        return [Constant(lambda: results.value[0], lambda: _small(eqn, operands))]
    return [Constant(lambda i=i: results.value[i]) for i in range(count)]  # type: ignore[misc]


def _small(eqn: core.JaxprEqn, operands: Sequence[Traced]) -> Any:
    """What an equation makes of constants, kept short along axes of repetition."""
    name = eqn.primitive.name
    values = [np.asarray(x.constant.small) for x in operands if x.constant]
    with jax.ensure_compile_time_eval():
        if name == "broadcast_in_dim" and len(values) == 1:
            shape = [1] * len(eqn.params["shape"])
            for source, target in enumerate(eqn.params["broadcast_dimensions"]):
                shape[target] = values[0].shape[source]
            return values[0].reshape(shape)
        if name in ELEMENTWISE or name in ("convert_element_type", "select_n"):
            common = np.broadcast_shapes(*(value.shape for value in values))
            alike = [np.broadcast_to(x, common) if x.ndim else x for x in values]
            return evaluate(eqn, alike)[0]
        return evaluate(eqn, [x.constant.value for x in operands if x.constant])[0]


def evaluate(eqn: core.JaxprEqn, values: Sequence[Any], **params: Any) -> list[Any]:
    """Does what an equation does, with other operands and perhaps other parameters.

    Inside of `shard_map`, all operands differ along the axes along which one does.
    """
    if len(values) > 1 and not mesh_axes_of(eqn):
        names = sorted(differs(values))
        values = [cast(x, names) for x in values] if names else values
    primitive: Any = eqn.primitive
    bound = primitive.get_bind_params({**eqn.params, **params})
    # jax before 0.9 keeps functions apart.
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    result = primitive.bind(*functions, *values, **bound)
    return list(result) if primitive.multiple_results else [result]


def _finished(
    ctx: Context, atom: Any, result: Traced, constant: Constant | None
) -> Traced:
    """Adds what follows from the operands, whatever the rule."""
    labels, dead = result.labels, result.dead
    if constant is not None:  # computed in full before anything is cut
        labels = tuple(uniform_axis(len(own)) for own in labels)
        if may_be_infinite(ctx.name) and labels and has_tangent(atom):
            dead = _constant_value(constant.value).dead
    else:
        dead = dead_behind_mask(ctx, dead)
    mask = masked(ctx, dead)
    alone = frozen_axis(1)
    if any(len(own) == 1 and own is not alone for own in labels):
        for own in result.labels:
            if len(own) == 1:
                # Such as one layer of a stack.
                ctx.freeze(own, "leaves one channel alone on its axis", True)
        labels = tuple(alone if len(own) == 1 else own for own in labels)
    is_fixed = all(operand.is_fixed for operand in ctx.operands)
    for own in () if is_fixed else labels:
        ctx.table.move(own)
    is_lost = mask is None and any(map(is_nan, dead))
    return Traced(
        labels,
        dead,
        result.number,
        all(operand.is_given for operand in ctx.operands),
        result.origin or ctx.origin,
        constant,
        result.summed,
        has_tangent(atom)
        and (result.may_be_nan or any(operand.may_be_nan for operand in ctx.operands)),
        has_tangent(atom)
        and (
            is_positive(ctx.name, [operand.is_positive for operand in ctx.operands])
            or is_sum_with_peak(ctx)
        ),
        result.below or _below(ctx),
        result.shared,
        is_fixed,
        maximum_of(ctx),
        transposed(ctx),
        peaks(ctx),
        mask,
        filled(ctx),
        ctx.operands[0] if ctx.name == "is_finite" else None,
        _bound(ctx, atom),
        _causes(ctx, result, is_lost),
    )


def _causes(ctx: Context, result: Traced, is_lost: bool) -> dict[str, str]:
    """Why dead channels are no numbers, or not the same one: what came first."""
    causes = dict[str, str]()
    is_known = any("broken" in x.causes for x in ctx.operands)
    if ctx.name in ("scatter-max", "scatter-min") and any(map(is_nan, result.dead)):
        causes["broken"] = (
            f"{ctx.name}{ctx.at} may leave a segment infinite that nothing is written "
            "to; use jnp.where(jnp.isfinite(x), x, 0.0)"
        )
    elif (
        is_lost
        and not is_known
        and any(x.masked or -math.inf in (x.number, *x.dead) for x in ctx.operands)
    ):
        causes["broken"] = (
            f"the mask of -inf{ctx.at} may leave a row without a finite score; use a "
            "large finite number such as -1e9, or a constant mask that leaves one"
        )
    for found in (*(operand.causes for operand in ctx.operands), result.causes):
        causes = {**found, **causes}
    return causes


def _bound(ctx: Context, atom: Any) -> float:
    """What a result is not below; of whole numbers, which wrap around, nothing."""
    if not jax.dtypes.issubdtype(atom.aval.dtype, np.floating):
        return -math.inf
    bounds = [operand.at_least for operand in ctx.operands]
    return bound_of(ctx.name, bounds, ctx.eqn.params)


def _below(ctx: Context) -> int | None:
    """Below what number a result is known to be; see `Traced.below`."""
    if not ctx.operands:
        return None
    x, *others = ctx.operands
    if x.below is None:
        return None
    dtype = ctx.eqn.outvars[0].aval.dtype  # type: ignore[attr-defined]
    if ctx.name in _MOVES and jax.dtypes.issubdtype(dtype, np.integer):
        return x.below if x.below - 1 <= jax.numpy.iinfo(dtype).max else None
    if ctx.name == "lt" and others[0].number == 0:
        return 1  # is never true
    if ctx.name == "select_n" and x.below == 1:
        return others[0].below
    return None
