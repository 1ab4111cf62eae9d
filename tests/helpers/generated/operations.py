"""How the primitive of every rule is drawn: its operands, sizes and settings.

A builder draws operands and returns what the operation makes of them: a function of
(params, inputs) that gives one result or several.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.extend.random import threefry_2x32

from prunex_jax.channels.numbers import ELEMENTWISE
from tests.helpers.generated.drawing import FLOATS, INTEGERS, TINY_FLOATS

BUILDERS = {}
ACCURATE = set(
    "cbrt cos exp exp2 expm1 log log1p log2 logistic rsqrt sin sqrt tan tanh".split()
)
SETTINGS = {
    "conj": {"input_dtype": np.dtype(np.complex64)},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 4},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
}
ARITY = {
    **dict.fromkeys(
        "add add_any and atan2 complex div eq eq_to ge gt le le_to lt lt_to max min "
        "mul mulhi ne nextafter or "
        "pow rem shift_left shift_right_arithmetic shift_right_logical sub xor".split(),
        2,
    ),
    **dict.fromkeys(("clamp", "polynomial"), 3),
}
WHOLE = (
    "clz mulhi population_count shift_left shift_right_arithmetic shift_right_logical"
)
LOGIC = "and not or xor"
COMPLEX = "conj imag real"
ANY_NUMBER = (
    "abs add add_any clamp div eq ge gt le lt max min mul ne neg rem sign sub square"
)
# What jax has no primitive of this name for, or takes only so.
BY_FUNCTION = {
    "add_any": primitives.add_jaxvals_p.bind,
    "log2": jnp.log2,
    "copy": jnp.copy,
    "copy_p": jnp.copy,
    "mulhi": lambda x, y: lax.mul(x, y),
    "one_minus_square": lambda x: 1 - x * x,
    "polynomial": lambda x, a, b: a + x * b,
    "stop_gradient": lax.stop_gradient,
}


def builder(*names):
    def register(build):
        for name in names:
            BUILDERS[name] = lambda d, name=name: build(d, name)
        return build

    return register


def types_of(name):
    if name in WHOLE.split():
        return tuple(t for t in INTEGERS if "2" not in t[-2:] or t == "int32")
    if name in LOGIC.split():
        return ("bool", "bool", *INTEGERS)
    if name in COMPLEX.split():
        return ("complex64",)
    if name in ("bessel_i0e", "bessel_i1e", "complex", "nextafter", "polynomial"):
        return ("float32",)
    if name in ANY_NUMBER.split():
        return (*FLOATS, *FLOATS, *TINY_FLOATS, *INTEGERS)
    return FLOATS


def bound(name):
    """The primitive of a name, as a function."""
    if name in BY_FUNCTION or not hasattr(primitives, f"{name}_p"):
        return BY_FUNCTION[name]
    primitive = getattr(primitives, f"{name}_p")
    settings = {"accuracy": None} if name in ACCURATE else SETTINGS.get(name, {})
    return lambda *values: primitive.bind(*values, **settings)


@builder(*ELEMENTWISE)
def elementwise(d, name):
    shape = d.shape(1, 2, 2, 3)
    axis = d.channel_axis(shape)
    dtype = d.dtype(*types_of(name))
    operands = [d.operand(shape, dtype, axis) for _ in range(ARITY.get(name, 1))]
    function = bound(name)
    return lambda p, x: function(*(operand(p, x) for operand in operands))


@builder("integer_pow")
def integer_pow(d, name):
    x, y = one(d), d.pick(-2, -1, 0, 1, 2, 3)
    return lambda p, i: lax.integer_pow(x(p, i), y)


def one(d, *ranks, dtypes=FLOATS, least=1, kinds=None):
    """One operand; its shape is `shape_of(operand)`."""
    shape = tuple(max(least, n) for n in d.shape(*(ranks or (1, 2, 2, 3))))
    axis = d.channel_axis(shape)
    value = d.operand(shape, d.dtype(*dtypes), axis, kinds)
    operand = lambda p, x: value(p, x)  # noqa: E731
    operand.shape, operand.axis = shape, axis
    return operand


@builder("convert_element_type")
def convert(d, name):
    x = one(d, dtypes=(*FLOATS, *INTEGERS, "bool"))
    dtype = d.dtype(*FLOATS, *TINY_FLOATS, *INTEGERS, "bool")
    return lambda p, i: lax.convert_element_type(x(p, i), dtype)


@builder("bitcast_convert_type")
def bitcast(d, name):
    x = one(d, dtypes=("float32",))
    dtype = d.pick(jnp.int32, jnp.uint16)
    return lambda p, i: lax.bitcast_convert_type(lax.stop_gradient(x(p, i)), dtype)


@builder("select_n")
def select(d, name):
    shape = d.shape(1, 2, 2, 3)
    axis = d.channel_axis(shape)
    dtype = d.dtype(*FLOATS, *INTEGERS)
    which = d.operand(shape, jnp.dtype(bool), axis)
    cases = [d.operand(shape, dtype, axis) for _ in range(2)]
    return lambda p, x: lax.select_n(which(p, x), *(case(p, x) for case in cases))


# Axes.


@builder("broadcast_in_dim")
def broadcast_in_dim(d, name):
    x = one(d, 1, 2)
    rank = len(x.shape) + d.pick(0, 1, 1)
    where = sorted(d.rng.permutation(rank)[: len(x.shape)].tolist())
    shape = [d.size() for _ in range(rank)]
    for source, target in enumerate(where):
        shape[target] = x.shape[source] if x.shape[source] > 1 else shape[target]
    return lambda p, i: lax.broadcast_in_dim(x(p, i), shape, where)


@builder("concatenate", "stack")
def concatenate(d, name):
    shape = d.shape(1, 2, 2, 3)
    axis, along = d.channel_axis(shape), d.pick(*range(len(shape)))
    dtype, parts = d.dtype(*FLOATS, "int8", "int32", "uint8", "int64"), []
    for _ in range(d.pick(2, 2, 3)):
        own = list(shape)
        if name == "concatenate":
            own[along] = d.size()
        parts.append(d.operand(tuple(own), dtype, axis))
    function = lax.concatenate if name == "concatenate" else jnp.stack
    return lambda p, x: function([part(p, x) for part in parts], along)


@builder("pad")
def pad(d, name):
    x = one(d, dtypes=("float32", "float16", "int8", "int4"))
    value = d.pick(0.0, 0.0, 1.0, np.inf, np.nan)
    config = [
        (d.pick(0, 0, 1, 2), d.pick(0, 0, 1, -1 if n > 1 else 0), d.pick(0, 0, 0, 1))
        for n in x.shape
    ]
    number = d.parameter(()) if d.chance(0.2) else lambda p, i: np.float32(value)

    def apply(p, i):
        padded, padding = x(p, i), number(p, i)
        if jnp.issubdtype(padded.dtype, jnp.integer) and not np.isfinite(value):
            padding = np.float32(1)  # nothing whole stands for what is not finite
        return lax.pad(padded, padding.astype(padded.dtype), config)

    return apply


@builder("reshape")
def reshape(d, name):
    x = one(d, 1, 2, 3)
    total = int(np.prod(x.shape))
    sizes = []
    while total > 1 and len(sizes) < 3:
        sizes.append(d.pick(*[n for n in range(1, total + 1) if total % n == 0]))
        total //= sizes[-1]
    shape = (*sizes, total) if total > 1 or not sizes else tuple(sizes)
    return lambda p, i: lax.reshape(x(p, i), shape)


@builder("rev")
def rev(d, name):
    x = one(d)
    axes = tuple(a for a in range(len(x.shape)) if d.chance(0.6))
    return lambda p, i: lax.rev(x(p, i), axes)


@builder("slice")
def slice_(d, name):
    x = one(d, dtypes=(*FLOATS, *INTEGERS))
    starts = [int(d.rng.integers(n)) for n in x.shape]
    stops = [
        int(d.rng.integers(a, n)) + 1 for a, n in zip(starts, x.shape, strict=True)
    ]
    strides = [d.pick(1, 1, 2) for _ in x.shape]
    return lambda p, i: lax.slice(x(p, i), starts, stops, strides)


@builder("split")
def split(d, name):
    x = one(d)
    axis = d.pick(*range(len(x.shape)))
    first = int(d.rng.integers(x.shape[axis] + 1))
    sizes = (
        (first, x.shape[axis] - first)
        if 0 < first < x.shape[axis]
        else (x.shape[axis],)
    )
    return lambda p, i: lax.split(x(p, i), sizes, axis)


@builder("squeeze")
def squeeze(d, name):
    x = one(d)
    new = d.pick(*range(len(x.shape) + 1))
    return lambda p, i: lax.squeeze(lax.expand_dims(x(p, i), [new]), [new])


@builder("tile")
def tile(d, name):
    x = one(d)
    reps = tuple(d.pick(1, 2, 3) for _ in x.shape)
    return lambda p, i: jnp.tile(x(p, i), reps)


@builder("transpose")
def transpose(d, name):
    x = one(d, 2, 3)
    order = tuple(d.rng.permutation(len(x.shape)).tolist())
    return lambda p, i: lax.transpose(x(p, i), order)


@builder("unstack")
def unstack(d, name):
    x = one(d, 2, 3)
    axis = d.pick(*range(len(x.shape)))
    return lambda p, i: jnp.unstack(x(p, i), axis=axis)


@builder("iota", "random_bits", "threefry2x32")
def made(d, name):
    x = one(d, 1, 2)
    if name == "iota":
        counter = lambda: lax.broadcasted_iota(jnp.float32, x.shape, x.axis)  # noqa: E731
    elif name == "random_bits":
        counter = lambda: jax.random.uniform(jax.random.key(3), x.shape)  # noqa: E731
    else:
        key = jnp.array([3, 5], jnp.uint32)
        total = int(np.prod(x.shape))

        def counter():
            bits = threefry_2x32(key, jnp.arange(total, dtype=jnp.uint32))
            return (bits % 8).astype(jnp.float32).reshape(x.shape)

    return lambda p, i: x(p, i) * counter().astype(x(p, i).dtype)


@builder("device_put", "name", "optimization_barrier", "sharding_constraint")
def passed(d, name):
    x = one(d, dtypes=(*FLOATS, *INTEGERS))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    function = {
        "device_put": lambda v: jax.device_put(v, jax.devices()[0]),
        "name": lambda v: checkpoint_name(v, "own"),
        "optimization_barrier": lax.optimization_barrier,
        "sharding_constraint": lambda v: lax.with_sharding_constraint(v, device),
    }[name]
    return lambda p, i: function(x(p, i))


# Sums and orders.


@builder("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
def reduce(d, name):
    whole = ("int8", "int32", "uint8")
    x = one(d, dtypes=(*FLOATS, *whole, *(("int4",) if name == "reduce_sum" else ())))
    axes = tuple(a for a in range(len(x.shape)) if d.chance(0.5)) or (0,)
    long = d.pick(1, 1, 40) if name == "reduce_sum" else 1  # may wrap around
    function = {
        "reduce_sum": lambda v: primitives.reduce_sum_p.bind(
            v, axes=axes, out_sharding=None
        ),
        "reduce_prod": lambda v: lax.reduce_prod(v, axes),
        "reduce_max": lambda v: lax.reduce_max(v, axes),
        "reduce_min": lambda v: lax.reduce_min(v, axes),
    }[name]
    return lambda p, i: function(jnp.repeat(x(p, i), long, axis=axes[0]))


@builder("reduce_and", "reduce_or")
def reduce_bools(d, name):
    x = one(d, dtypes=("bool",))
    axes = tuple(a for a in range(len(x.shape)) if d.chance(0.5)) or (0,)
    function = getattr(lax, name)
    return lambda p, i: function(x(p, i), axes)


@builder("argmax", "argmin")
def arg_reduce(d, name):
    x = one(d, dtypes=("float32", "float16", "int8"))
    axis, function = d.pick(*range(len(x.shape))), getattr(lax, name)
    return lambda p, i: function(x(p, i), axis, jnp.int32)


@builder("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(d, name):
    x = one(d, dtypes=("float32", "float32", "float16", "float64"))
    axis, is_reversed = d.pick(*range(len(x.shape))), d.chance(0.3)
    function = getattr(lax, name)
    return lambda p, i: function(x(p, i), axis, reverse=is_reversed)


@builder("sort")
def sort(d, name):
    shape = d.shape(1, 2, 2, 3)
    axis, along = d.channel_axis(shape), d.pick(*range(len(shape)))
    dtype = d.dtype(*FLOATS, "int8")
    operands = [d.operand(shape, dtype, axis) for _ in range(d.pick(1, 2))]
    return lambda p, x: lax.sort(
        tuple(operand(p, x) for operand in operands), dimension=along
    )


@builder("top_k", "approx_top_k")
def top_k(d, name):
    x = one(d, dtypes=("float32", "float16"))
    count = int(d.rng.integers(x.shape[-1])) + 1
    if name == "approx_top_k":
        return lambda p, i: lax.approx_max_k(x(p, i), count)
    return lambda p, i: lax.top_k(x(p, i), count)


@builder("reduce")
def reduce_by_program(d, name):
    x = one(d, dtypes=("float32",))
    axes = tuple(a for a in range(len(x.shape)) if d.chance(0.5)) or (0,)
    start, combine = d.pick(
        (0.0, lambda a, b: a + b + a * b),
        (1.0, lambda a, b: jnp.sin(a) * b),
        (0.0, lambda a, b: jnp.sqrt(a * a + b * b)),
        (-1.0, lambda a, b: jnp.maximum(a, b) - 1),
    )
    return lambda p, i: lax.reduce(
        lax.stop_gradient(x(p, i)), np.float32(start), combine, axes
    )


@builder("reduce_xor")
def reduce_xor(d, name):
    x = one(d, dtypes=("int32", "int8"))
    axes = tuple(a for a in range(len(x.shape)) if d.chance(0.5)) or (0,)
    return lambda p, i: lax.reduce_xor(x(p, i), axes)


@builder("fft")
def fft(d, name):
    x = one(d, 1, 2, 3, dtypes=("float32",))
    axis = d.pick(*range(len(x.shape)))
    change = d.pick(jnp.real, jnp.imag, jnp.abs)
    if d.chance(0.5):
        return lambda p, i: change(jnp.fft.fft(x(p, i), axis=axis))
    return lambda p, i: change(jnp.fft.rfft(x(p, i), axis=axis))


@builder("triangular_solve", "tridiagonal_solve")
def solve(d, name):
    size, columns, batch = d.size(), d.size(), d.size()
    right = d.operand((batch, size, columns), axis=d.pick(0, 1, 2))
    matrix = d.operand((batch, size, size), axis=d.pick(0, 1, 2))
    if name == "triangular_solve":
        near = lambda p, i: jnp.tril(matrix(p, i)) / 8 + 2 * jnp.eye(size)  # noqa: E731
        plain = lambda p, i: 2 * jnp.tril(jnp.ones((batch, size, size)))  # noqa: E731
        a = d.pick(near, plain, matrix)
        return lambda p, i: lax.linalg.triangular_solve(
            a(p, i), right(p, i), left_side=True, lower=True
        )
    size = 3
    off = jnp.ones((batch, size))
    right = d.operand((batch, size, columns), axis=d.pick(0, 1, 2))
    middle = d.operand((batch, size), axis=d.pick(0, 1))
    shift = d.pick(0.0, 4.0)
    return lambda p, i: lax.linalg.tridiagonal_solve(
        off.at[:, 0].set(0.0),
        middle(p, i) / 8 + shift,
        off.at[:, -1].set(0.0),
        right(p, i),
    )


@builder("custom_linear_solve")
def linear_solve(d, name):
    shape = (d.size(), d.size())
    right = d.operand(shape, axis=d.pick(0, 1))
    other = d.operand(shape, axis=d.pick(0, 1))
    matrix = 2 * np.eye(shape[0], dtype=np.float32)
    matrix[1:, 0] = 0.5
    inverse, is_dense = np.linalg.inv(matrix), d.chance(0.3)
    wrong = d.pick(*(4 * [lambda b: b]), lambda b: b - b.mean(0), lambda b: b + 1)

    def solved(p, i):
        factor = jnp.exp(other(p, i) / 4)
        if is_dense:
            return lax.custom_linear_solve(
                lambda v: matrix @ v,
                right(p, i),
                lambda _, b: (inverse @ b, b.max(0)),
                lambda _, b: (wrong(inverse.T @ b), b.max(0)),
                has_aux=True,
            )
        return lax.custom_linear_solve(
            lambda v: factor * v,
            right(p, i),
            lambda _, b: b / factor,
            lambda _, b: wrong(b / factor),
        )

    return solved


@builder("linear_call")
def linear_call(d, name):
    shape = d.shape(1, 2, 2)
    axis = d.channel_axis(shape)
    x, other = d.operand(shape, axis=axis), d.operand(shape, axis=axis)
    transposed = d.pick(
        *(3 * [lambda r, t: r * t]),
        lambda r, t: t + r,
        lambda r, t: t - t.mean(axis, keepdims=True),
    )

    def called(p, i):
        known = lax.stop_gradient(other(p, i))
        call = jax.custom_derivatives.linear_call
        return call(lambda r, v: r * v, transposed, known, x(p, i))

    return called


@builder("ragged_dot_general")
def ragged_dot(d, name):
    inner, outer, groups = d.size(), d.size(), 3
    left = d.operand((4, inner), axis=d.pick(0, 1))
    right = d.operand((groups, inner, outer), axis=d.pick(0, 1, 2))
    sizes = jnp.array([1, 0, 3])
    return lambda p, i: lax.ragged_dot(left(p, i), right(p, i), sizes)


@builder("select_and_scatter_add")
def pooled_backwards(d, name):
    shape = d.shape(2, 3)
    x = d.operand(shape, axis=d.channel_axis(shape))
    window = tuple(d.pick(1, 1, 2) if n > 1 else 1 for n in shape)
    start = np.float32(-np.inf)

    def pooled(v):
        return jnp.sin(lax.reduce_window(v, start, lax.max, window, window, "VALID"))

    return lambda p, i: jax.grad(lambda v: pooled(v).sum())(x(p, i))


@builder("dot_general")
def dot_general(d, name):
    batch, inner = d.size(), d.size()
    with_batch = d.chance(0.5)
    left = [inner, *d.shape(0, 1)]
    right = [inner, *d.shape(0, 1)]
    dtype = d.dtype("float32", "float32", "float32", "float64", "int32", "int8")
    first = [batch] if with_batch else []
    pair = []
    for sizes in (first + left, first + right):
        axis = d.channel_axis(sizes)
        pair.append(d.operand(tuple(sizes), dtype, axis))
    at = len(first)
    numbers = (((at,), (at,)), ((0,), (0,)) if with_batch else ((), ()))
    return lambda p, x: lax.dot_general(pair[0](p, x), pair[1](p, x), numbers)


@builder("conv_general_dilated")
def conv(d, name):
    groups, num_in, num_out = d.pick(1, 2, 3), d.pick(1, 2, 3), d.pick(1, 2, 4)
    image = d.operand((2, 3, groups * num_in), axis=2)
    kernel_shape = (d.pick(1, 2), num_in, groups * num_out)
    kernel = d.operand(kernel_shape, axis=d.pick(1, 2, 2))
    if d.chance(0.3):
        before = kernel
        kernel = lambda p, x: jnp.exp2(before(p, x))  # noqa: E731
    batches = 2 if groups == 1 and num_out > 1 and d.chance(0.2) else 1
    settings = {"feature_group_count": groups, "batch_group_count": batches}
    return lambda p, x: lax.conv_general_dilated(
        image(p, x),
        kernel(p, x),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        **settings,
    )


@builder("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
def reduce_window(d, name):
    x = one(d, 2, 3)
    window = tuple(d.pick(1, 1, min(2, n)) for n in x.shape)
    padding = d.pick("VALID", "SAME", [(d.pick(0, 0, 1), 0) for _ in x.shape])
    start, function = {
        "reduce_window": (1.0, lax.mul),
        "reduce_window_max": (-np.inf, lax.max),
        "reduce_window_min": (np.inf, lax.min),
        "reduce_window_sum": (0.0, lax.add),
    }[name]
    change = lax.stop_gradient if name == "reduce_window" else lambda v: v
    return lambda p, i: lax.reduce_window(
        change(x(p, i)),
        np.asarray(start, x(p, i).dtype),
        function,
        window,
        (1,) * len(x.shape),
        padding,
    )


@builder("psum", "pmax", "pmin")
def over_mesh(d, name):
    x = one(d, 2, 3, dtypes=("float32", "float16"))
    along = d.pick(*range(len(x.shape)))
    function = getattr(lax, name)
    change = (lambda v: v) if name == "psum" else lax.stop_gradient
    inner = lambda v: v + function(change(v), "own")  # noqa: E731
    return lambda p, i: jax.vmap(inner, along, along, axis_name="own")(x(p, i))


# Positions by number.


def positions(d, shape, size):
    """Where to look up: known beforehand or given, some of them nowhere."""
    outside = d.chance(0.3)
    low, high = (-size - 1, size + 2) if outside else (0, size)
    if d.chance(0.5):
        values = jnp.asarray(d.rng.integers(low, high, shape), jnp.int32)
        return lambda p, x: values
    return d.whole(shape, high, low)


@builder("gather")
def gather(d, name):
    x = one(d, 1, 2, 3, dtypes=("float32", "float32", "float16", "int8", "int4"))
    axis = d.pick(*range(len(x.shape)))
    mode = d.pick("fill", "clip", "fill", "wrap")
    if d.chance(0.6):
        where = positions(d, d.shape(0, 1, 1, 2), x.shape[axis])
        return lambda p, i: jnp.take(x(p, i), where(p, i), axis=axis, mode=mode)
    mode = "clip" if mode == "wrap" else mode
    shape = list(x.shape)
    shape[axis] = d.size()
    if d.chance(0.5):
        where = d.operand(
            tuple(shape), jnp.int32, x.axis, ("layer", "unknown", "input")
        )
    else:
        where = positions(d, tuple(shape), x.shape[axis])
    return lambda p, i: jnp.take_along_axis(x(p, i), where(p, i), axis, mode=mode)


WRITES = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter_add": "add",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "multiply",
    "scatter-sub": "subtract",
}


@builder(*WRITES)
def scatter(d, name):
    dtype = d.dtype("float32", "float32", "float16", "int8")
    shape = d.shape(1, 2, 2, 3)
    channel, axis = d.channel_axis(shape), d.pick(*range(len(shape)))
    x, new = d.operand(shape, dtype, channel), list(shape)
    if d.chance(0.3):
        start = int(d.rng.integers(shape[axis]))
        new[axis] = int(d.rng.integers(shape[axis] - start)) + 1
        where = lambda p, i: slice(start, start + new[axis])  # noqa: E731
    else:
        new[axis] = d.size()
        where = positions(d, (new[axis],), shape[axis])
    update = d.operand(tuple(new), dtype, channel)
    before = (slice(None),) * axis

    def written(p, i):
        # Products at one place have no derivative.
        change = lax.stop_gradient if name == "scatter-mul" else lambda v: v
        place = change(x(p, i)).at[(*before, where(p, i))]
        return getattr(place, WRITES[name])(change(update(p, i)))

    if name in ("scatter-max", "scatter-min") and d.chance(0.5):
        lowest = -np.inf if name == "scatter-max" else np.inf
        old, x = x, lambda p, i: jnp.full_like(old(p, i).astype(jnp.float32), lowest)
    return written


@builder("dynamic_slice", "dynamic_update_slice")
def dynamic_slice(d, name):
    x = one(d, dtypes=("float32", "float16", "int8", "int4"))
    sizes = tuple(n if d.chance(0.5) else int(d.rng.integers(n)) + 1 for n in x.shape)
    starts = [positions(d, (), n) for n in x.shape]
    if name == "dynamic_slice":
        return lambda p, i: lax.dynamic_slice(x(p, i), [s(p, i) for s in starts], sizes)
    new = d.operand(sizes, np.float32, x.axis)
    return lambda p, i: lax.dynamic_update_slice(
        x(p, i), new(p, i).astype(x(p, i).dtype), [s(p, i) for s in starts]
    )


# Loops and branches.


@builder("cond")
def cond(d, name):
    x, which = one(d, dtypes=("float32", "float64")), d.whole((), 2)
    branches = [
        d.pick(jnp.sin, jnp.cos, jnp.negative, lambda v: v * 0 + 1) for _ in "ab"
    ]
    return lambda p, i: lax.switch(which(p, i), branches, x(p, i))


@builder("scan")
def scan(d, name):
    shape = d.shape(1, 2)
    axis, turns = d.channel_axis(shape), d.pick(1, 2, 3)
    start = d.operand(shape, axis=axis)
    rows = d.operand((turns, *shape), axis=axis + 1)
    more = d.pick(jnp.sin, jnp.cos, lambda v: v + 1, lambda v: v - v.sum())
    is_reversed = d.chance(0.3)

    def turn(carry, row):
        return more(carry) + row, carry * row

    return lambda p, x: lax.scan(turn, start(p, x), rows(p, x), reverse=is_reversed)


@builder("while")
def while_loop(d, name):
    x = one(d, dtypes=("float32", "float64"))
    more = d.pick(jnp.sin, jnp.cos, lambda v: v + 1, lambda v: v * 2)
    count = d.pick(0, 1, 3)

    def looped(p, i):
        start = (0, lax.stop_gradient(x(p, i)))
        _, end = lax.while_loop(
            lambda c: c[0] < count, lambda c: (c[0] + 1, more(c[1])), start
        )
        return x(p, i) + end

    return looped


# Derivatives that people write, right and wrong.


def function_of_two(d):
    """The axis of channels, two operands, and a function of the first one."""
    shape = d.shape(1, 2, 2)
    axis = d.channel_axis(shape)
    h, s = d.operand(shape, axis=axis), d.operand(shape, axis=axis)
    return axis, h, s, d.pick(jnp.sin, jnp.cos, lambda v: v * 1.0)


@builder("custom_jvp_call")
def custom_jvp(d, name):
    axis, h, s, value = function_of_two(d)
    slope = d.pick(
        lambda v, w, t, u: t * jnp.cos(v),
        lambda v, w, t, u: t + u,
        lambda v, w, t, u: t * w,
        lambda v, w, t, u: t - t.mean(axis, keepdims=True),
        lambda v, w, t, u: t * (1 + v.mean(axis, keepdims=True)),
    )
    own = jax.custom_jvp(lambda v, w: value(v))
    own.defjvp(lambda values, moved: (value(values[0]), slope(*values, *moved)))
    return lambda p, x: own(h(p, x), s(p, x))


@builder("custom_vjp_call")
def custom_vjp(d, name):
    axis, h, s, value = function_of_two(d)
    slope = d.pick(
        lambda v, w, g: (g * jnp.cos(v), w * 0),
        lambda v, w, g: (g + 0.1 * v, g),
        lambda v, w, g: (g * w, g * v),
        lambda v, w, g: (g * (1 + v * v), jnp.zeros_like(w)),
        lambda v, w, g: (g - g.mean(axis, keepdims=True), w),
    )
    own = jax.custom_vjp(lambda v, w: value(v))
    own.defvjp(lambda v, w: (value(v), (v, w)), lambda saved, g: slope(*saved, g))
    return lambda p, x: own(h(p, x), s(p, x))
