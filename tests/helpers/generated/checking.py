"""Reads the results of a drawn operation, and compares masked with shrunk."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from prunex_jax.base.errors import UserError
from prunex_jax.channels import trace_channels
from prunex_jax.shrink import make_cut
from tests.helpers.channel_checks import primitives_of
from tests.helpers.generated.drawing import Draw, is_complex
from tests.helpers.generated.operations import BUILDERS

# Relative errors that are rounding, by the bits of the narrowest floats.
TOLERANCES = {8: 0.5, 16: 5e-2, 32: 1e-4, 64: 1e-4}
READERS = ("nan_to_num", "isnan", "zeros", "cos", "max", "as it is")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one program.

    Attributes:
      is_known: Whether jax can do it on this machine.
      is_cut: Whether some of its channels could be removed, and were.
      primitives: Its primitives.
      problem: How masked and shrunk differ; "" if they do not.
      program: What was drawn.
    """

    is_known: bool
    is_cut: bool = False
    primitives: frozenset = frozenset()
    problem: str = ""
    program: str = ""


def reader(d, sizes):
    """Something that reads a result along one axis, and mostly weighs the others."""
    axis = d.channel_axis(sizes)
    kind = d.pick(*("weights",) * 6, "gated", "sum", "sum", *READERS)
    d.log.append(f"{kind}@{axis}")
    weights = {
        a: d.parameter((size,))
        for a, size in enumerate(sizes)
        if a != axis and d.chance(0.85)
    }
    if kind in ("weights", "gated"):
        weights[axis] = d.parameter((sizes[axis],))
    number = d.pick(0.0, 2.0)
    function = {
        "nan_to_num": lambda y: jnp.nan_to_num(y, nan=number, posinf=3.0, neginf=-1.0),
        "isnan": lambda y: jnp.isnan(y).astype(jnp.float32),
        "zeros": lambda y: (y == 0).astype(jnp.float32),
        "cos": jnp.cos,
    }.get(kind, lambda y: y)

    def read(y, p):
        y = function(y)
        for a, weight in weights.items():
            along = tuple(n if b == a else 1 for b, n in enumerate(sizes))
            if kind == "gated" or a != axis:
                y = y * weight(p, None).reshape(along)
        if kind == "weights":
            y = jnp.tensordot(y, weights[axis](p, None), (axis, 0))
            return y.sum(tuple(a - (a > axis) for a in weights if a != axis))
        if kind == "max":
            y = y.max(axis, keepdims=True)
        return y if kind == "as it is" else y.sum(tuple({axis, *weights}))

    return read


def plain(y):
    """A result as real numbers that can be summed."""
    if is_complex(y):
        return y.real + 2 * y.imag
    if jnp.issubdtype(y.dtype, jnp.floating):
        return y if y.dtype.itemsize > 2 else y.astype(jnp.float32)
    return y.astype(jnp.float32)


def drawn(name, seed):
    """A program around a primitive: (apply, what was drawn)."""
    d = Draw([seed, sorted(BUILDERS).index(name)])
    operation = BUILDERS[name](d)
    inputs = {key: draw(d.rng) for key, draw in d.inputs.items()}
    shapes = jax.eval_shape(lambda: operation(d.params, inputs))
    results = jax.tree.leaves(shapes)
    count = d.pick(1, 1, 2)
    readers = [
        (index, reader(d, result.shape))
        for _ in range(count)
        for index, result in enumerate(results)
        if result.ndim
    ]

    def apply(p, x):
        values = [plain(y) for y in jax.tree.leaves(operation(p, x))]
        alone = [y for y in values if not y.ndim]
        return [*alone, *(read(values[index], p) for index, read in readers)]

    return d, apply


def check(name, seed):
    """Draws a program around a primitive, and compares it masked and shrunk."""
    with jax.numpy_rank_promotion("allow"), _precision(name, seed):
        return _check(name, seed)


def _precision(name, seed):
    is_wide = np.random.default_rng([seed, len(name)]).random() < 0.2
    return jax.enable_x64(True) if is_wide else contextlib.nullcontext()


def _check(name, seed):
    try:
        d, apply = drawn(name, seed)
    except (TypeError, NotImplementedError, ValueError):  # not of these types
        return Verdict(False)
    rng = np.random.default_rng(seed)
    batches = [{key: draw(rng) for key, draw in d.inputs.items()} for _ in range(3)]
    program = f"{name} {seed}: {', '.join(d.log)}"
    trace = trace_channels(apply, d.params, batches[0])
    found = frozenset(primitives_of(jax.make_jaxpr(apply)(d.params, batches[0])))
    if not trace.groups:
        return Verdict(True, False, found, program=program)
    masks = {group.name: _mask(rng, group.size) for group in trace.groups}
    cut = make_cut(trace, masks, d.params)
    small = cut.function(apply)
    pair = []
    others = batches[1:] if d.chance(0.5) else batches[1:2]
    with jax.disable_jit():
        masked, taken = cut.mask(d.params), cut.take(d.params)
    for function, params in ((apply, masked), (small, taken)):
        try:
            outputs, grads = _evaluate(function, params, others)
        except UserError:
            raise
        except (NotImplementedError, jax.errors.JaxRuntimeError, TypeError):
            if function is apply:
                return Verdict(False)
            raise
        by_params, by_inputs = grads
        with jax.disable_jit():
            by_params = cut.take(by_params) if function is apply else by_params
        pair.append((outputs, [by_params, by_inputs]))
    bits = _narrowest(jax.make_jaxpr(apply)(d.params, batches[0]))
    tolerance = TOLERANCES[max(known for known in TOLERANCES if known <= max(bits, 8))]
    problem = _difference(*pair, tolerance)
    return Verdict(True, True, found, problem, program)


def _mask(rng, size):
    """Half of the channels, so that few sizes occur, and few programs are compiled."""
    mask = np.zeros(size, bool)
    mask[rng.permutation(size)[: max(1, size // 2)]] = True
    return mask


def _evaluate(function, params, batches):
    """Outputs for one batch, or for several by way of vmap, and their gradients."""
    is_one = len(batches) == 1
    stacked = {
        key: value if is_one else jnp.stack([batch[key] for batch in batches])
        for key, value in batches[0].items()
    }

    def loss(moving, fixed, inputs):
        real, whole = inputs
        of_one = lambda x: function({**moving, **fixed}, x)  # noqa: E731
        mapped = of_one if is_one else jax.vmap(of_one, axis_size=len(batches))
        outputs = mapped({**real, **whole})
        terms = [
            (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() for y in outputs
        ]
        return sum(terms, start=jnp.float32(0)).astype(jnp.float32), outputs

    def run(moving, fixed, inputs):
        grad = jax.value_and_grad(loss, argnums=(0, 2), has_aux=True, allow_int=True)
        (_, outputs), (by_params, by_inputs) = grad(moving, fixed, inputs)
        return outputs, by_params, by_inputs[0]

    moving = {k: v for k, v in params.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    fixed = {k: v for k, v in params.items() if k not in moving}
    real = {k: v for k, v in stacked.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    whole = {k: v for k, v in stacked.items() if k not in real}
    arguments = moving, fixed, (real, whole)
    closed = jax.make_jaxpr(run)(*arguments)
    shapes = jax.eval_shape(run, *arguments)
    with jax.disable_jit():
        flat = core.jaxpr_as_fun(closed)(*jax.tree.leaves(arguments))
    outputs, by_params, by_inputs = jax.tree.unflatten(jax.tree.structure(shapes), flat)
    zeros = {k: np.zeros(v.shape, np.float32) for k, v in fixed.items()}
    return outputs, ({**by_params, **zeros}, by_inputs)


def _narrowest(program):
    """Bits of the narrowest floats in a program, and in the programs in it.

    Rounding to fewer counts: its gradient is rounded too, before or after a sum.
    """
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    bits = [64]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reduce_precision":
            bits.append(1 + eqn.params["exponent_bits"] + eqn.params["mantissa_bits"])
        for atom in (*eqn.invars, *eqn.outvars):
            dtype = getattr(atom.aval, "dtype", np.dtype(np.int32))
            if jnp.issubdtype(dtype, jnp.inexact):
                bits.append(jnp.finfo(dtype).bits)
        for value in jax.tree.leaves(
            dict(eqn.params), is_leaf=lambda x: isinstance(x, core.ClosedJaxpr)
        ):
            if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
                bits.append(_narrowest(value))
    return min(bits)


def _difference(masked, shrunk, tolerance):
    """How two results differ: where they are finite, and then by how much."""
    (a_outputs, a_grads), (b_outputs, b_grads) = masked, shrunk
    for what, a, b in (
        ("outputs", a_outputs, b_outputs),
        ("gradients", a_grads, b_grads),
    ):
        a, b = (
            [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
            for tree in (a, b)
        )
        largest = max([_largest(x) for x in a], default=0.0)
        for one, other in zip(a, b, strict=True):
            if one.shape != other.shape:
                return f"{what} of shapes {one.shape} and {other.shape}"
            if (np.isfinite(one) != np.isfinite(other)).any():
                return f"{what} finite in other places: {one} and {other}"
            scale = max(_largest(one), 0.1 * largest, 1e-3)
            with np.errstate(invalid="ignore"):
                error = _largest(one - other) / scale
            if error > tolerance:
                return f"{what} by {error:.1e}: {one} and {other}"
    return ""


def _largest(x):
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max(initial=0.0))
