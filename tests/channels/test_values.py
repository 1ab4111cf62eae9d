"""What values dead channels have, and so how they may be read."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from prunex_jax.channels import trace_channels
from prunex_jax.channels.numbers import ELEMENTWISE, value_of
from tests.helpers.channel_checks import assert_exact, draw, members_of

X = draw({"x": (4, 3)}, seed=1)["x"]

# Values at which operations are compared with what is said of them.
GRID = (-np.inf, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, np.inf, np.nan)
SMALL_GRID = (-np.inf, -1.0, 0.0, 1.0, 2.0, np.nan)
FINITE = tuple(value for value in GRID if math.isfinite(value))
# Types other than float32 that a primitive needs.
TYPES = {
    **dict.fromkeys(("and", "or", "not", "xor"), np.bool_),
    **dict.fromkeys(("conj", "imag", "real"), np.complex64),
    **dict.fromkeys(
        (
            "clz",
            "mulhi",
            "population_count",
            "shift_left",
            "shift_right_arithmetic",
            "shift_right_logical",
        ),
        np.int32,
    ),
}
# Those that jax has no primitive of this name for, in one version or the other.
NAMES = [name for name in ELEMENTWISE if hasattr(primitives, f"{name}_p")]


def num_operands_of(name):
    binary = "add add_any and atan2 complex div eq eq_to ge gt le le_to lt lt_to"
    binary += " max min mul mulhi ne nextafter"
    binary += " or pow rem shift_left shift_right_arithmetic shift_right_logical sub"
    return {"clamp": 3, "polynomial": 3, "xor": 2}.get(
        name, 2 if name in binary.split() else 1
    )


PARAMS = {
    "conj": {"input_dtype": np.dtype(np.complex64)},
    "reduce_precision": {"exponent_bits": 8, "mantissa_bits": 23},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
}
ACCURATE = (
    "cbrt cos exp exp2 expm1 log log1p log2 logistic rsqrt sin sqrt tan tanh".split()
)


def compute(name, *values):
    """What jax makes of rows of values, all at once."""
    primitive = getattr(primitives, f"{name}_p")
    dtype = TYPES.get(name, np.float32)
    params = {"accuracy": None} if name in ACCURATE else PARAMS.get(name, {})
    with np.errstate(invalid="ignore"):
        columns = [jnp.asarray(np.asarray(v).astype(dtype)) for v in values]
    return np.asarray(primitive.bind(*columns, **params)).astype(np.complex64)


def is_representable(name, values):
    integral = TYPES.get(name) in (np.bool_, np.int32)
    bits = name.startswith("shift")
    return not integral or all(
        math.isfinite(v) and v == int(v) and (v >= 0 or not bits) for v in values
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_values_is_what_jax_computes(name):
    count = num_operands_of(name)
    grid = GRID if count < 3 else SMALL_GRID
    rows = [
        r for r in itertools.product(grid, repeat=count) if is_representable(name, r)
    ]
    results = compute(name, *zip(*rows, strict=True))
    for row, result in zip(rows, results, strict=True):
        said = value_of(name, [float(value) for value in row])
        if said is None:
            assert np.isfinite(result), f"{name}{row} is {result}, said to be finite"
        elif math.isfinite(said):
            assert np.isclose(said, result, rtol=1e-5, atol=1e-6), (name, row, said)
            assert (said == 0) == (result == 0), (name, row, said, result)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_unknown_values_holds_for_all_of_them(name):
    count = num_operands_of(name)
    rows = [
        r for r in itertools.product(FINITE, repeat=count) if is_representable(name, r)
    ]
    results = compute(name, *zip(*rows, strict=True))
    for unknown in itertools.product((True, False), repeat=count):
        for row, result in zip(rows, results, strict=True):
            pairs = list(zip(row, unknown, strict=True))
            values = [None if hidden else value for value, hidden in pairs]
            said = value_of(name, values, unknown)
            if said is None:
                assert np.isfinite(result), f"{name}{values} may be {result} at {row}"
            elif math.isfinite(said):
                is_right = np.isclose(said, result, rtol=1e-5, atol=1e-6)
                assert is_right, f"{name}{values} is {result} at {row}"


def per_channel(v, x):
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


# What f does to a dead channel decides how f(h) may be read: by a running sum if
# f(0) = 0, with weights and by a sum if f(0) is finite. None where a sum cannot tell:
# of an input that is nan, a comparison is another number.
@pytest.mark.parametrize(
    ("f", "is_zero", "is_finite"),
    [
        (jax.nn.relu, True, True),
        (jax.nn.leaky_relu, True, True),
        (jax.nn.elu, True, True),
        (jax.nn.gelu, True, True),
        (functools.partial(jax.nn.gelu, approximate=False), True, True),
        (jax.nn.silu, True, True),
        (jax.nn.relu6, True, True),
        (jax.nn.hard_swish, True, True),
        (jnp.sqrt, False, False),  # has an infinite slope at 0
        (jnp.cbrt, False, False),
        (jnp.round, True, True),
        (lambda h: h**3, True, True),
        (lambda h: jnp.clip(h, -1, 2), True, True),
        (lambda h: jnp.exp(h) - 1, True, True),
        (lambda h: lax.stop_gradient(h), True, True),
        (lambda h: (h > 0).astype(jnp.float32), True, True),
        (lambda h: h / (h + 1), True, True),
        (lambda h: jnp.clip(h, 1, 2), False, True),
        (jax.nn.sigmoid, False, True),
        (jax.nn.softplus, False, True),
        (jnp.cos, False, True),
        (lambda h: h + 1, False, True),
        (lambda h: 1 / (2 + h), False, True),
        (lambda h: (h >= 0).astype(jnp.float32), False, None),
        (jnp.log, False, False),
        (lax.rsqrt, False, False),
        (lambda h: h / h, False, False),
        (lambda h: 1 / h, False, False),
        (lambda h: h**-2, False, False),
        (lambda h: 0.0**h, False, True),
    ],
)
def test_values_of_dead_channels(f, is_zero, is_finite):
    def num_groups(read):
        apply = lambda p, x: read(f(x @ p["a"]), p["b"])  # noqa: E731
        return len(trace_channels(apply, params, X).groups)

    params = {"a": jnp.ones((3, 8)), "b": jnp.ones((8, 2))}
    assert num_groups(lambda h, b: jnp.cumsum(h, 1) @ b) == is_zero
    assert num_groups(lambda h, b: h @ b) == (is_finite is not False)
    assert num_groups(lambda h, b: h.sum(1)) == (is_finite is True)


def window(h, size, reducer=lax.add, start=0.0):
    return lax.reduce_window(h, start, reducer, size, (1,) * h.ndim, "SAME")


# Whether all dead channels have one value, which a sum over all can count.
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("f", "is_shared"),
    [
        (lambda h: jnp.pad(h, ((0, 1), (0, 0))), True),
        (lambda h: jnp.pad(h, ((0, 1), (0, 0)), constant_values=1.0), True),
        (lambda h: jnp.concatenate([h, jnp.sin(h)], axis=0), True),
        (lambda h: jnp.concatenate([h, jnp.cos(h)], axis=0), True),
        (lambda h: jnp.concatenate([h, jnp.sin(h)], axis=1), True),
        (lambda h: jnp.concatenate([h, jnp.cos(h)], axis=1), False),
        (lambda h: jnp.stack([h, jnp.cos(h)]), True),
        (lambda h: h.reshape(2, 2, 8), True),
        (lambda h: jnp.cos(h).reshape(2, 2, 8), True),
        (lambda h: jnp.where(h > 0, 1 + h, h), True),
        (lambda h: jnp.where(h > 0, h, 1 + h), True),
        (lambda h: window(h, (2, 1)), True),
        (lambda h: window(jnp.cos(h), (2, 1)), False),
        (lambda h: window(h, (1, 3)), False),
        (lambda h: window(h, (2, 1), lax.max, -jnp.inf), True),
        (lambda h: jnp.cos(window(h, (2, 1), lax.max, -jnp.inf)), True),
        (lambda h: jnp.einsum("nh,mk->nhmk", h, X), True),
        (lambda h: jnp.einsum("nh,nk->hk", h, X), True),
        (lambda h: jnp.einsum("nh,nk->hk", jnp.cos(h), X), True),
        (lambda h: jnp.einsum("nh,mh->hnm", jnp.cos(h), h), True),
        (lambda h: h.prod(0), True),
        (lambda h: h.max(0), True),
        (lambda h: jnp.cos(h).max(0), True),
        (lambda h: (h + 0.5).astype(jnp.int32), True),
        (lambda h: (h + 0.5).astype(bool), True),
    ],
)
def test_values_of_dead_channels_behind_other_operations(f, is_shared):
    def apply(p, x):
        return jnp.cos(f(x @ p["a"]).astype(jnp.float32).sum()) + (x @ p["b"]).sum(1)

    trace = assert_exact(apply, draw({"a": (3, 8), "b": (3, 4)}), X, densities=(0.5,))
    names = {group.name for group in trace.groups}
    assert names == ({"a", "b"} if is_shared else {"b"}), trace.explain("a")


@pytest.mark.parametrize(
    "f",
    [
        lambda p, x: (x.sum(1, keepdims=True) - per_channel(p["s"], x)) / p["t"],
        lambda p, x: jnp.log(x.sum(1, keepdims=True) + per_channel(p["s"], x)),
        lambda p, x: jnp.exp(-jnp.square(x.sum(1, keepdims=True) / p["t"])),
    ],
    ids=["quotient", "logarithm", "radial"],
)
def test_values_that_masking_may_make_infinite_are_not_read(f):
    params = {"s": jnp.ones(8), "t": jnp.ones((1, 8)), "b": jnp.ones((8, 2))}
    trace = trace_channels(lambda p, x: f(p, x) @ p["b"], params, X)
    assert not trace.groups


# How values are rounded depends on their type, and decides what is zero.
@pytest.mark.parametrize(
    "f",
    [
        lambda h: h.astype(jnp.bfloat16) + 256 + 1 - 1 - 256,
        lambda h: h.astype(jnp.float16) + 2048 + 1 - 1 - 2048,
        lambda h: 2 * lax.div((h >= 0).astype(jnp.int32), 2) - 1,
        lambda h: ((h >= 0).astype(jnp.int8) * 2) ** 7 // 2 + 64,
        lambda h: (h - 1).astype(jnp.uint8).astype(jnp.float32) + 1,
        lambda h: jnp.float16(1) / (h.astype(jnp.float16) + 1e-8),
        lambda h: lax.rem((h >= 0).astype(jnp.int32) * 7, 4) - 3,
        lambda h: lax.shift_left((h >= 0).astype(jnp.int32), 1) - 2,
        lambda h: (~(h > 0)).astype(jnp.float32) - 1,
    ],
    ids="bfloat16 float16 division power unsigned tiny rest shift not".split(),
)
def test_values_are_rounded_as_their_type_is(f):
    def apply(p, x):
        return f(x @ p["a"]).astype(jnp.float32).sum(1) + (x @ p["b"]).sum(1)

    assert_exact(apply, draw({"a": (3, 8), "b": (3, 4)}), X, densities=(0.5,))


def square_norm(v):
    return jnp.square(v).sum(0, keepdims=True)


# Zero divided by a number that is not known exactly, but is not zero: it is zero, which
# a running sum reads.
DIVISORS = {
    "weight norm": lambda p, x: x @ (p["a"] / jnp.sqrt(square_norm(p["a"]) + 1e-12)),
    "softplus": lambda p, x: x @ p["a"] / jax.nn.softplus(p["s"])[None],
    "softplus of inputs": lambda p, x: x @ p["a"] / jax.nn.softplus(x @ p["c"]),
    "exp": lambda p, x: x @ p["a"] / (1.5 + jnp.exp(x @ p["c"])),
    "squares": lambda p, x: x @ p["a"] / jnp.sqrt(jnp.square(x @ p["c"]) + 1e-6),
    "constant": lambda p, x: x @ p["a"] / jnp.sqrt(8.0),
    # What these are at removed channels depends on inputs, but is above zero.
    "above": lambda p, x: x @ p["a"] / (jnp.exp(different(x @ p["c"])) + 1e-12),
    "soft": lambda p, x: x @ p["a"] / (jax.nn.softplus(different(x @ p["c"])) + 1e-6),
    "norm": lambda p, x: x @ p["a"] / jnp.sqrt(different(x @ p["c"]) ** 2 + 1e-6),
}


def different(h):
    return h + jnp.arange(8.0)[None]


DIVIDED = {"a": (3, 8), "c": (3, 8), "s": (8,), "b": (8, 2)}


def summed_on_the_way(divide):
    return lambda p, x: jnp.cumsum(divide(p, x), 1) @ p["b"]


@pytest.mark.parametrize("name", DIVISORS)
def test_zero_divided_by_a_rounded_number_is_zero(name):
    # A running sum has a reader whose rows stay, so only what makes channels goes.
    apply = summed_on_the_way(DIVISORS[name])
    trace = assert_exact(apply, draw(DIVIDED), X, densities=(0.5,))
    assert "a" in {group.name for group in trace.groups}, trace.explain("a")


# Divisors that are zero at removed channels in their type, or whose slope is none.
ZERO_DIVISORS = {
    "float16": lambda p, x: (
        (x @ p["a"]).astype(jnp.float16)
        / jnp.sqrt(jnp.square((x @ p["c"]).astype(jnp.float16)) + jnp.float16(1e-12))
    ),
    "steep": lambda p, x: x @ p["a"] / (jnp.square(x @ p["c"]) + 1e-30),
    "without epsilon": lambda p, x: x @ (p["a"] / jnp.sqrt(square_norm(p["a"]))),
    "small": lambda p, x: x @ p["a"] / (jnp.exp(different(x @ p["c"])) + 1e-30),
    "exp alone": lambda p, x: x @ p["a"] / jnp.exp(different(x @ p["c"])),
    "two signs": lambda p, x: (
        x @ p["a"] / (jnp.square(different(x @ p["c"])) + 1e8 + 1.0 + -1e8)
    ),
    "softplus twice": lambda p, x: (
        x @ p["a"] / (jax.nn.softplus(p["s"])[None] - np.log(2))
    ),
}


@pytest.mark.parametrize("name", ZERO_DIVISORS)
def test_divisors_that_may_be_zero_freeze(name):
    apply = summed_on_the_way(ZERO_DIVISORS[name])
    trace = trace_channels(apply, draw(DIVIDED), X)
    assert not {"a", "c"} & {group.name for group in trace.groups}


def test_keys_in_a_cache_are_cut_though_they_were_scaled():
    def apply(p, x):
        def token(keys, at):
            key = (x[:, at] @ p["k"] / jnp.sqrt(8.0))[:, None]
            keys = lax.dynamic_update_slice(keys, key, (0, at, 0))
            query = jax.nn.sigmoid(x[:, at] @ p["q"])
            return keys, jnp.einsum("bd,btd->bt", query, keys)

        empty = jnp.zeros((x.shape[0], x.shape[1], 8))
        return lax.scan(token, empty, jnp.arange(3))[1]

    params = draw({"k": (3, 8), "q": (3, 8)})
    x = draw({"x": (2, 3, 3)}, seed=1)["x"]
    trace = assert_exact(apply, params, x, densities=(0.5,))
    assert [(g.name, g.size) for g in trace.groups] == [("k", 8)], trace.explain()


def test_a_carry_that_starts_above_zero_may_become_zero():
    def apply(p, x):
        def turn(scale, _):
            return jnp.abs(p["a"].sum(0)) * scale, x @ p["c"] / scale[None] @ p["b"]

        return lax.scan(turn, jnp.ones(8), length=3)[1]

    trace = trace_channels(apply, draw({"a": (3, 8), "b": (8, 2), "c": (3, 8)}), X)
    assert "b" not in members_of(trace), trace.explain()


def test_the_parallel_form_of_a_selective_scan():
    def apply(p, x):
        u, gate = jnp.split(x @ p["in"], 2, -1)
        delta, to, out_of = jnp.split(jax.nn.silu(u) @ p["dbc"], [2, 5], -1)
        delta = jax.nn.softplus(delta @ p["delta"] + p["bias"])
        decay = jnp.cumsum(delta[..., None] * -jnp.exp(p["log"])[None], 0)
        steps = (delta * u)[..., None] * to[:, None] / (jnp.exp(decay) + 1e-12)
        states = jnp.cumsum(steps, 0) * jnp.exp(decay)
        y = jnp.einsum("nds,ns->nd", states, out_of) + u * p["skip"]
        return (y * jax.nn.silu(gate)) @ p["out"]

    shapes = {"in": (3, 16), "dbc": (8, 8), "delta": (2, 8), "bias": (1, 8)}
    shapes |= {"log": (8, 3), "skip": (1, 8), "out": (8, 3)}
    trace = assert_exact(apply, draw(shapes), X, densities=(0.5,))
    sizes = {name: size for name, (size, _) in members_of(trace).items()}
    assert sizes == {"dbc": 3, "dbc#2": 2, "in": 8}, trace.explain()
