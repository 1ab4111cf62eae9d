"""Every primitive that the tracer knows, in small networks: exact, and which groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry_2x32

from prunex_jax.channels import RULES
from prunex_jax.channels.numbers import ELEMENTWISE
from tests.helpers import any_width, networks
from tests.helpers.channel_checks import assert_exact, draw, members_of, primitives_of

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]
KEY = jax.random.key(7)

# name -> (function, shapes of parameters, groups to be found, inputs).
CASES = {}


def case(shapes, groups, *inputs):
    """`groups`: name -> (size, members as (path, axis, positions per channel))."""

    def register(apply):
        CASES[apply.__name__] = (apply, shapes, groups, inputs or (X,))
        return apply

    return register


# x -> a -> f -> b, with as many channels as f leaves.
PAIR = {"a": (3, 8), "b": (8, 2)}
ONE = {"a": (8, [("a", 1, 1), ("b", 0, 1)])}


def pair(*inputs):
    """Registers f of `b` and what `a` makes; all of its channels can be removed."""

    def register(f):
        def apply(p, x, *rest):
            return f(x @ p["a"], *rest) @ p["b"]

        apply.__name__ = f.__name__
        return case(PAIR, ONE, *(inputs or (X,)))(apply)

    return register


def conv(x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


# Loops and branches.


@pair()
def while_loop(h):
    halve = lambda carry: (carry[0] + 1, carry[1] * 0.5)  # noqa: E731
    too_long = lambda carry: (carry[0] < 5) & (jnp.sum(carry[1] ** 2) > 0.5)  # noqa: E731
    # Not differentiable backwards, so the end alone is used, and h once more.
    count, _ = lax.while_loop(too_long, halve, (0, lax.stop_gradient(h)))
    return jnp.sin(h) * count


@pair()
def fori_loop(h):
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c) * h, jnp.ones_like(h))


@pair()
def cond(h):
    return lax.cond(h.sum() > 0, jnp.sin, lambda h: jnp.zeros_like(h) + h, h)


@pair(X, jnp.array(2))
def switch(h, which):
    branches = [jnp.sin, lambda h: jnp.ones(h.shape), lambda h: h[:, ::1] ** 2]
    return lax.switch(which, branches, h)


@pair(X, jnp.arange(4))
def switch_in_vmap(h, which):
    branches = [jnp.sin, jnp.cos, jnp.tanh, jnp.square]
    return jax.vmap(lambda i, row: lax.switch(i, branches, row))(which, h)


@pair()
def map_over_rows(h):
    return lax.map(lambda row: row / (1 + jnp.sum(row * row)), h)


# Programs in programs.


@jax.custom_jvp
def steep(x):
    return jnp.sin(x)


steep.defjvp(lambda primals, tangents: (steep(*primals), 3 * tangents[0]))


@jax.custom_vjp
def stepped(x):
    return jnp.round(x)


stepped.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (2 * g,))


@pair()
def custom_derivatives(h):
    return stepped(4 * steep(h))


@pair()
def remat_with_policy(h):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    inner = lambda h: jnp.sin(checkpoint_name(jnp.cos(h), "kept"))  # noqa: E731
    return jax.checkpoint(inner, policy=policy)(h)


@pair()
def composite(h):
    twice = lax.composite(lambda h: jnp.tanh(h) * 2, name="own.twice")
    return h + twice(lax.stop_gradient(h))  # has no derivative


@pair()
def inlined_and_nested_jit(h):
    return jax.jit(jax.jit(jax.nn.gelu, inline=True))(h)


@pytest.mark.skipif(not hasattr(jax, "Inline"), reason="newer jax has it")
@pytest.mark.parametrize("policy", getattr(jax, "Inline", ()))
def test_programs_may_be_inlined_at_any_time(policy):
    def apply(p, x):
        return jax.jit(jnp.sin, inline=policy)(x @ p["a"]) @ p["b"]

    assert members_of(assert_exact(apply, draw(PAIR), X, densities=(0.5,))) == ONE


@pair()
def barrier(h):
    return sum(lax.optimization_barrier((jnp.sin(h), jnp.cos(h))))


@pair()
def moved_to_a_device(h):
    return jnp.sin(jax.device_put(h, jax.devices()[0])) + h


@pair()
def constraint(h):
    mesh = jax.make_mesh((2,), ("host",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("host", None)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return lax.with_sharding_constraint(jnp.sin(h), sharding)


# Constants, counters and random numbers: drawn in full and cut to fit.


@pair()
def counters(h):
    return h * jnp.arange(8.0)[None] + lax.broadcasted_iota(jnp.float32, (4, 8), 1)


@pair()
def constants(h):
    table = np.sin(np.arange(32.0)).reshape(4, 8).astype(np.float32)
    return (h + table) * jnp.linspace(0, 1, 8)[None] + jnp.eye(4, 8)


@pair(X, KEY)
def dropout(h, key):
    kept = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.where(kept, h / 0.5, 0.0)


@pair(X, KEY)
def noise(h, key):
    one, other = jax.random.split(key)
    return h + jax.random.normal(one, h.shape) * jax.random.gumbel(other, h.shape)


@pair(X, jnp.array([3, 5], jnp.uint32))
def noise_of_raw_keys(h, key):
    return h + jax.random.uniform(key, h.shape)


@pair(X, jnp.array([3, 5], jnp.uint32))
def hashes(h, key):
    return h * threefry_2x32(key, jnp.arange(8, dtype=jnp.uint32))[None] / 4e9


@pair()
def masks_of_constants(h):
    number = jnp.arange(8)[None]
    odd = (number % 2 == 1) & (number != 3)
    return jnp.where(odd, h, -h) + (number == jnp.arange(4)[:, None]) * h


# Looking up.


# Channels that are read never and once; the one that is read twice, and the row that is
# cut off, are single and stay.
@case(
    {"a": (3, 8), "b": (8, 2)},
    {
        "a": (2, [("a", 1, 1)]),
        "a#2": (5, [("a", 1, 1), ("b", 0, 1)]),
    },
)
def positions_by_number(p, x):
    h = jnp.sin(x @ p["a"])
    unread = h.sum(1, keepdims=True)
    return h[:, jnp.array([3, 1, 2, 0, 4, 1, 5])] @ p["b"][:7] + unread


@pair()
def mean_over_a_vmapped_axis(h):
    return jax.vmap(lambda row: row - lax.pmean(row, "batch"), axis_name="batch")(h)


@pair()
def range_over_a_vmapped_axis(h):
    def one(row):
        fixed = lax.stop_gradient(row)
        return lax.pmax(fixed, "batch") - lax.pmin(fixed, "batch") + row

    return jax.vmap(one, axis_name="batch")(h)


@pair()
def rows_that_are_not_zero(h):
    rows = jnp.nonzero(jnp.array([1.0, 0.0, 1.0, 2.0]), size=3)[0]
    return h[rows]


@pair(X, jnp.array([1.0, 0.0, 1.0, 2.0]))
def rows_where_an_input_is_not_zero(h, which):
    return h[jnp.nonzero(which, size=3, fill_value=0)[0]]


@pair(X, jnp.array([0.1, 0.7, 0.4]))
def rows_by_search(h, sought):
    return h[jnp.searchsorted(jnp.array([0.0, 0.5, 0.9]), sought)]


@pair()
def channels_by_search(h):
    return h * jnp.searchsorted(jnp.linspace(-1.0, 1.0, 5), h).astype(jnp.float32)


@pair()
def exponents(h):
    return jnp.ldexp(jnp.frexp(h)[0], jnp.frexp(lax.stop_gradient(h))[1] + 1)


@pair()
def permuted(h):
    return h[:, jnp.array([3, 1, 2, 0, 4, 7, 6, 5])][::-1][jnp.array([2, 1, 1, 3])][
        :, jnp.array([3, 1, 2, 0, 4, 7, 6, 5])
    ]


@pair(X, jnp.array(1))
def dynamic_rows(h, start):
    rows = lax.dynamic_slice_in_dim(h, start, 2, axis=0)
    return lax.dynamic_update_slice_in_dim(jnp.sin(h), rows, 0, axis=0)


@pair(X, jnp.array(2))
def row_by_number(h, which):
    return jnp.tanh(h) * h[which][None]


@case(
    {"a": (3, 8), "b": (4, 2), "c": (4, 2)},
    {
        "a": (4, [("a", 1, 1), ("b", 0, 1)]),
        "a#2": (4, [("a", 1, 1), ("c", 0, 1)]),
    },
)
def slice_at_constant_start(p, x):
    h = x @ p["a"]
    last = lax.dynamic_slice_in_dim(h, jnp.array(9), 4, axis=1)  # is moved to 4
    return jnp.sin(last) @ p["b"] + lax.dynamic_slice_in_dim(h, 0, 4, axis=1) @ p["c"]


@case(
    {"k": (3, 8), "o": (8, 2)},
    {"k": (8, [("k", 1, 1), ("o", 0, 1)])},
    X,
    jnp.array(3),
)
def cache(p, x, step):
    rows = jnp.zeros((4, 6, 8))
    rows = lax.dynamic_update_slice(rows, (x @ p["k"])[:, None], (0, step, 0))
    return jnp.cos(rows).mean(1) @ p["o"]


@pair(X, jnp.array([2, 0]))
def scatter_set_and_add(h, where):
    h = h.at[where].set(jnp.sin(h[:2]))
    return h.at[where].add(jnp.cos(h[:2])) * 2


@pair(X, jnp.array([1, 0, 1, 2]))
def segment_sum(h, segments):
    return jax.ops.segment_sum(h, segments, 4)


# Orders, sums and windows.


@pair()
def cumulative_over_rows(h):
    ups = lax.cummax(h, axis=0) + lax.cummin(jnp.sin(h), axis=0)
    return ups + lax.cumprod(h, axis=0) + lax.cumlogsumexp(h, axis=0)


@pair()
def cumulative_over_channels(h):
    return jnp.cumsum(h, axis=1) + lax.cumsum(jnp.sin(h), axis=1, reverse=True)


@pair()
def ordered_rows(h):
    keys, values = lax.sort((h, jnp.cos(h)), dimension=0, num_keys=1)
    return keys + values * jnp.argmax(h, axis=0).astype(jnp.float32)[None]


@pair()
def extremes_of_rows(h):
    top = lax.top_k(h.T, 2)[0].T.sum(0)
    low = h.min(0) * h.max(0) * h.prod(0) + jnp.argmin(h, axis=0)
    some = jnp.any(h > 0.1, axis=0) | jnp.all(h < 0.3, axis=0)
    return jnp.where(some[None], h, jnp.sin(h)) + (top + low)[None]


@case(
    {"a": (3, 3, 3, 8), "b": (8, 2)},
    {"a": (8, [("a", 3, 1), ("b", 0, 1)])},
    IMAGES,
)
def pools(p, x):
    h = conv(x, p["a"])
    window, steps = (1, 3, 3, 1), (1, 2, 2, 1)
    low = lax.reduce_window(h, jnp.inf, lax.min, window, steps, "SAME")
    high = lax.reduce_window(h, -jnp.inf, lax.max, window, steps, "SAME")
    mean = lax.reduce_window(h, 0.0, lax.add, window, steps, "SAME") / 9
    return (low * high + mean).mean((1, 2)) @ p["b"]


@case(
    {"a": (3, 3, 3, 8), "b": (8, 2)},
    {"a": (8, [("a", 3, 1), ("b", 0, 1)])},
    IMAGES,
)
def window_of_some_function(p, x):
    h = jax.nn.sigmoid(conv(x, p["a"]))
    joint = lax.reduce_window(
        lax.stop_gradient(h), 1.0, lax.mul, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"
    )
    return (joint * h[:, 1:, 1:]).mean((1, 2)) @ p["b"]


# Axes.


@pair()
def axes_moved(h):
    h = jnp.expand_dims(h, (0, 3)).transpose(2, 0, 1, 3)[:, ::-1].squeeze((1, 3))
    return lax.rev(jnp.sin(h.T.reshape(2, 2, 8)), (0,)).reshape(4, 8)


@pair()
def rows_apart_and_together(h):
    rows = jnp.unstack(h, axis=0)
    return jnp.tile(jnp.stack([jnp.sin(row) for row in rows]), (2, 1))[2:6]


@pair()
def bits(h):
    whole = lax.bitcast_convert_type(lax.stop_gradient(h), jnp.int32)
    back = lax.bitcast_convert_type(whole & ~1, jnp.float32)
    return h + back


@pair()
def powers(h):
    return h**3 + lax.integer_pow(h + 2, -2) + 2.0**h


@case(
    {"a": (3, 6), "b": (3, 10), "c": (16, 2)},
    {
        "a": (6, [("a", 1, 1), ("b", 1, 1), ("c", 0, 2)]),
        "b": (4, [("b", 1, 1), ("c", 0, 1)]),
    },
)
def padded_both_sides(p, x):
    a = jnp.pad(jnp.cos(x @ p["a"]), ((0, 0), (2, 2)), constant_values=1.5)
    b = x @ p["b"]
    return jnp.concatenate([jnp.sin(a + b), (a * b)[:, 2:8]], axis=1) @ p["c"]


# Operations that mix some axes and leave the others apart.

SEGMENTS = jnp.array([0, 2, 1, 0])


@pair()
def fft_along_rows(h):
    return jnp.fft.fft(h, axis=0).real


@pair()
def real_fft_along_rows(h):
    return jnp.fft.irfft(jnp.fft.rfft(h, axis=0) * jnp.arange(3)[:, None], axis=0)


@case(PAIR, {})
def fft_along_channels(p, x):
    return jnp.fft.fft(x @ p["a"]).real @ p["b"]


@pair()
def segment_max_without_empty_segments(h):
    return jax.ops.segment_max(h, SEGMENTS, 3)


@pair()
def segment_min_without_empty_segments(h):
    return jax.ops.segment_min(h, SEGMENTS, 3)


@pair()
def segment_max_with_an_empty_segment(h):
    largest = jax.ops.segment_max(h, SEGMENTS, 4)
    return jnp.where(jnp.isfinite(largest), largest, 1.0)


@pair(X, SEGMENTS)
def segment_max_by_input_above_zero(h, segments):
    return jnp.maximum(jax.ops.segment_max(jnp.cos(h), segments, 5), 0.5)


@case(PAIR, {})
def infinite_segment_max(p, x):
    """A product of minus infinity and a weight of zero is none."""
    return jax.ops.segment_max(x @ p["a"], SEGMENTS, 4) @ p["b"]


@case(PAIR, {}, X, SEGMENTS)
def segment_min_of_another_one(p, x, segments):
    """What is finite of one is not of the other."""
    h = x @ p["a"]
    largest, least = (
        f(h, segments, 5) for f in (jax.ops.segment_max, jax.ops.segment_min)
    )
    return jnp.where(jnp.isfinite(least), largest * least, 1.0) @ p["b"]


@pair(X, SEGMENTS)
def segment_max_by_input(h, segments):
    return jnp.exp(jax.ops.segment_max(h, segments, 4))


@pair(X, SEGMENTS)
def segment_mean(h, segments):
    count = jax.ops.segment_sum(jnp.ones(4), segments, 4)
    total = jax.ops.segment_sum(h, segments, 4)
    return total / jnp.maximum(count, 1)[:, None]


@pair(X, SEGMENTS)
def largest_above_zero(h, segments):
    return jnp.zeros((4, 8)).at[segments].max(jax.nn.relu(h))


@pair(X, SEGMENTS)
def written_by_product(h, segments):
    h = h.at[segments[1:]].multiply(jnp.cos(h[1:]), unique_indices=True)
    return h.at[segments[1:]].subtract(jnp.sin(h[1:]))


@case(
    PAIR,
    {
        "a": (2, [("a", 1, 2), ("b", 0, 2)]),
        "a#2": (4, [("a", 1, 1), ("b", 0, 1)]),
    },
)
def channels_written_by_product(p, x):
    h = x @ p["a"]
    first = jnp.array([0, 1])
    return h.at[:, first].multiply(h[:, 2:4], unique_indices=True) @ p["b"]


@pair()
def bessel_functions(h):
    return h * jax.scipy.special.i0e(h) + jax.scipy.special.i1e(h)


@pair()
def approximate_top_rows(h):
    return lax.approx_max_k(h, 2, reduction_dimension=0)[0]


@pair()
def reduced_by_program(h):
    return lax.reduce(h, 0.0, lambda a, b: a + b + a * b, (0,))[None]


@case(PAIR, {})
def reduced_by_program_of_other_start(p, x):
    h = lax.reduce(x @ p["a"], 1.0, lambda a, b: a + b + a * b, (0,))
    return h[None] @ p["b"]


@case(PAIR, {})
def reduced_by_steep_program(p, x):
    h = lax.reduce(x @ p["a"], 0.0, lambda a, b: jnp.sqrt(a * a + b * b), (0,))
    return h[None] @ p["b"]


@pair()
def parity(h):
    is_odd = lax.reduce_xor((h > 0).astype(jnp.int32), (0,))
    return h * is_odd[None]


@pair()
def pooled_backwards(h):
    def pooled(h):
        largest = lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")
        return jnp.sin(largest).sum()

    return jax.grad(pooled)(h)


@pair(X, jnp.tril(jnp.ones((4, 4))))
def triangular_solve(h, m):
    return jax.scipy.linalg.solve_triangular(m, h, lower=True)


@pair(X, jnp.ones(4))
def tridiagonal_solve(h, d):
    off = d.at[0].set(0.0)
    return lax.linalg.tridiagonal_solve(off, 4 * d, off[::-1], h)


MATRIX = jnp.eye(4) * 3 + jnp.tril(jnp.ones((4, 4))) / 4


@pair(X, MATRIX)
def solved_for_by_elimination(h, m):
    return jnp.linalg.solve(m, h)


@pair(X, MATRIX @ MATRIX.T)
def solved_for_by_cholesky(h, m):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(m), h)


@pair(X, MATRIX @ MATRIX.T)
def conjugate_gradients(h, m):
    return jax.scipy.sparse.linalg.cg(lambda v: m @ v, h, maxiter=4)[0]


@pair()
def biconjugate_gradients(h):
    return jax.scipy.sparse.linalg.bicgstab(lambda v: MATRIX @ v, h, maxiter=4)[0]


@pair()
def solved_by_hand(h):
    """The right side has no channels, the map has, and dead ones have a solution."""
    return lax.custom_linear_solve(
        lambda v: jnp.exp(h) * v,
        jnp.ones((4, 8)),
        lambda _, b: b / jnp.exp(h),
        symmetric=True,
    )


@pair()
def solved_with_more_results(h):
    x, largest = lax.custom_linear_solve(
        lambda v: MATRIX @ v,
        jnp.cos(h),
        lambda _, b: (jnp.linalg.inv(MATRIX) @ b, b.max(0)),
        lambda _, b: (jnp.linalg.inv(MATRIX.T) @ b, b.max(0)),
        has_aux=True,
    )
    return x * largest[None]


@pair()
def linear_call_with_its_own_transpose(h):
    call = jax.custom_derivatives.linear_call
    return call(jnp.multiply, lambda r, t: 3 * r * t, jnp.arange(8.0)[None], h)


@case(PAIR, {})
def cholesky_of_each_channel(p, x):
    """Refused: nobody knows that a matrix of dead channels is positive definite."""
    h = (x @ p["a"]).T
    matrices = h[:, :, None] * h[:, None] + jnp.eye(4)[None]
    return jnp.linalg.cholesky(matrices).sum((1, 2))[None] @ p["b"]


@case(
    {"up": (3, 3, 8), "down": (3, 8, 6), "out": (6, 2)},
    {
        "up": (8, [("up", 2, 1), ("down", 1, 1)]),
        "down": (6, [("down", 2, 1), ("out", 0, 1)]),
    },
    X,
    jnp.array([1, 1, 2]),
)
def experts(p, x, sizes):
    h = jax.nn.relu(lax.ragged_dot(x, p["up"], sizes))
    return lax.ragged_dot(h, p["down"], sizes) @ p["out"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_masked_equals_shrunk_with_the_expected_groups(name):
    apply, shapes, groups, inputs = CASES[name]
    trace = assert_exact(apply, draw(shapes), *inputs, densities=(0.0, 0.5))
    assert members_of(trace) == groups, trace.explain()


# Rules that no network here meets, and why.
UNMET = {
    "pcast": "is a primitive of other versions of jax",
    "psum_invariant": "is met inside of shard_map, by tests/shrink/test_function.py",
    "pvary": "is met inside of shard_map, by tests/shrink/test_function.py",
    "agreed": "is met inside of shard_map, by tests/train/test_repair.py",
    "differing": "is met inside of shard_map, by tests/train/test_repair.py",
    "scatter_add": "is what other versions of jax call scatter-add",
}
if not hasattr(jax.lax, "tile_p"):
    UNMET |= dict.fromkeys(["stack", "tile", "unstack"], "newer jax has them")


def test_every_rule_is_met_by_some_network():
    """Those of operations without axes are compared in test_values.py."""
    met = set()
    for cases in (CASES, networks.CASES, any_width.CASES):
        for apply, shapes, _, inputs in cases.values():
            met |= primitives_of(jax.make_jaxpr(apply)(draw(shapes), *inputs))
    unmet = set(RULES) - set(ELEMENTWISE) - met
    assert unmet <= set(UNMET), f"no network has {sorted(unmet - set(UNMET))}"
    assert set(UNMET) <= set(RULES)
    assert len(met & set(ELEMENTWISE)) > 30
