"""Tracing: which channels can be removed, exactly, and why the others stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_checks import assert_exact, draw, members_of
from jax import lax

from prunex_jax.channels import trace_channels
from prunex_jax.channels.labels import Traced
from prunex_jax.config import ModelConfig
from prunex_jax.errors import UserError
from prunex_jax.models import make_model

X = draw({"x": (4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 6, 6, 3)}, seed=2)["x"]


def conv(x, kernel, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=layout
    )


def per_channel(v, x):
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def norm(p, s, x):
    scale = p["scale"] * lax.rsqrt(s["var"] + 1e-5)
    shift = p["bias"] - s["mean"] * scale
    return x * per_channel(scale, x) + per_channel(shift, x)


# Functions that work for any width, their parameters, and the groups to be found:
# name -> (size, members as (path, axis, positions per channel)).
CASES = {}


def case(shapes, groups, x=X):
    def register(apply):
        CASES[apply.__name__] = (apply, shapes, groups, x)
        return apply

    return register


@case(
    {"a": (3, 8), "bias": (8,), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("bias", 0, 1), ("b", 0, 1)])},
)
def dense(p, x):
    return jax.nn.sigmoid(x @ p["a"] + per_channel(p["bias"], x)) @ p["b"]


@case(
    {"a": (3, 3, 3, 8), "b": (3, 3, 8, 5), "c": (3, 3, 5, 8), "d": (8, 2)},
    {
        "a": (8, [("a", 3, 1), ("b", 2, 1), ("c", 3, 1), ("d", 0, 1)]),
        "b": (5, [("b", 3, 1), ("c", 2, 1)]),
    },
    IMAGES,
)
def shortcut(p, x):
    x = jax.nn.relu(conv(x, p["a"]))
    x = x + conv(jax.nn.elu(conv(x, p["b"])), p["c"])
    return x.mean((1, 2)) @ p["d"]


@case(
    {"a": (3, 3, 3, 8), "b": (1, 1, 3, 4), "c": (12, 2)},
    {
        "a": (8, [("a", 3, 1), ("c", 0, 1)]),
        "b": (4, [("b", 3, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def concatenation(p, x):
    both = jnp.concatenate([conv(x, p["a"]), jnp.exp(conv(x, p["b"]))], axis=-1)
    return both.max((1, 2)) @ p["c"]


@case(
    {"a": (3, 3, 3, 6), "b": (54, 2)},
    {"a": (6, [("a", 3, 1), ("b", 0, 9)])},
    IMAGES,
)
def flatten(p, x):
    return jnp.cos(conv(x, p["a"], 2)).reshape(x.shape[0], -1) @ p["b"]


@case({"a": (3, 12), "b": (6, 2)}, {"a": (6, [("a", 1, 2), ("b", 0, 1)])})
def gated_halves(p, x):
    left, right = jnp.split(x @ p["a"], 2, axis=1)
    return (left * jax.nn.sigmoid(right)) @ p["b"]


@case(
    {"a": (3, 4), "b": (3, 6), "c": (4, 2), "d": (6, 2)},
    {
        "a": (4, [("a", 1, 1), ("c", 0, 1)]),
        "b": (6, [("b", 1, 1), ("d", 0, 1)]),
    },
)
def slices(p, x):
    both = jnp.concatenate([x @ p["a"], x @ p["b"]], axis=1)
    cut = p["a"].shape[1]
    return jnp.cos(both[:, :cut]) @ p["c"] + jnp.tanh(both[:, cut:]) @ p["d"]


@case({"a": (3, 3, 3, 8), "b": (8, 2)}, {"a": (8, [("a", 3, 1), ("b", 0, 1)])}, IMAGES)
def transposes(p, x):
    kernel = p["a"].transpose(3, 2, 0, 1)
    x = lax.conv(x.transpose(0, 3, 1, 2), kernel, (1, 1), "SAME")
    return jnp.einsum("nchw,ck->nk", jnp.cosh(x), p["b"])


# Channels that the padded shortcut does not reach form a group of their own.
@case(
    {"a": (3, 5), "b": (5, 9), "c": (9, 2)},
    {
        "a": (5, [("a", 1, 1), ("b", 0, 1), ("b", 1, 1), ("c", 0, 1)]),
        "b": (4, [("b", 1, 1), ("c", 0, 1)]),
    },
)
def padded_shortcut(p, x):
    x = x @ p["a"]
    y = x @ p["b"]
    return (y + jnp.pad(x, ((0, 0), (0, y.shape[1] - x.shape[1])))) @ p["c"]


# Sums of squares skip zeros, and the divisor is a number of the program.
@case(
    {"a": (3, 8), "scale": (8,), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("scale", 0, 1), ("b", 0, 1)])},
)
def rms_norm(p, x):
    x = x @ p["a"]
    size = jnp.sum(x * x, axis=1, keepdims=True) / 8
    return x * lax.rsqrt(size + 1e-3) * per_channel(p["scale"], x) @ p["b"]


@case({"a": (3, 8)}, {"a": (8, [("a", 1, 1)])})
def tied_autoencoder(p, x):
    return jnp.cos(x @ p["a"]) @ p["a"].T


@case(
    {"a": (3, 6), "w": (6, 6), "b": (6, 2)},
    {"a": (6, [("a", 1, 1), ("w", 0, 1), ("w", 1, 1), ("b", 0, 1)])},
)
def recurrence(p, x):
    h = x @ p["a"]
    for _ in range(3):
        h = jnp.tanh(h @ p["w"] + x @ p["a"])
    return h @ p["b"]


@case(
    {"a": (3, 7), "b": (7, 2)},
    {
        "a": (3, [("a", 1, 2), ("b", 0, 2)]),
        "a#2": (1, [("a", 1, 1), ("b", 0, 1)]),
    },
)
def mirrored(p, x):
    h = x @ p["a"]
    return (h + h[:, ::-1]) @ p["b"]


@case(
    {"scale": (8,), "a": (3, 3, 3, 8), "bias": (8,), "b": (8, 2)},
    {"a": (8, [("a", 3, 1), ("scale", 0, 1), ("bias", 0, 1), ("b", 0, 1)])},
    IMAGES,
)
def batch_norm_in_training(p, x):
    x = conv(x, p["a"])
    mean = x.mean((0, 1, 2), keepdims=True)
    var = jnp.square(x).mean((0, 1, 2), keepdims=True) - jnp.square(mean)
    x = (x - mean) / jnp.sqrt(var + 1e-5)
    x = x * per_channel(p["scale"], x) + per_channel(p["bias"], x)
    return jax.nn.softplus(x).mean((1, 2)) @ p["b"]


@case(
    {"a": (3, 3, 3, 8), "in": (8, 4), "out": (4, 8), "b": (8, 2)},
    {
        "a": (8, [("a", 3, 1), ("in", 0, 1), ("out", 1, 1), ("b", 0, 1)]),
        "in": (4, [("in", 1, 1), ("out", 0, 1)]),
    },
    IMAGES,
)
def squeeze_and_excite(p, x):
    x = conv(x, p["a"])
    gate = jax.nn.sigmoid(jnp.maximum(x.mean((1, 2)) @ p["in"], 0.1) @ p["out"])
    return (x * gate[:, None, None, :]).sum((1, 2)) @ p["b"]


@case(
    {"a": (3, 8), "b": (8, 5), "c": (5, 2)},
    {
        "a": (8, [("a", 1, 1), ("b", 0, 1)]),
        "b": (5, [("b", 1, 1), ("c", 0, 1)]),
    },
)
def programs_in_programs(p, x):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    block = jax.checkpoint(jax.jit(lambda p, x: jax.nn.gelu(product(x, p["a"]))))
    return jax.nn.softplus(block(p, x) @ p["b"]) @ p["c"]


@case(
    {"a": (3, 8), "b": (3, 8), "c": (8, 4, 2)},
    {"a": (8, [("a", 1, 1), ("b", 1, 1), ("c", 0, 1)])},
)
def batched_product(p, x):
    pair = jnp.einsum("nh,mh->hnm", x @ p["a"], jnp.cos(x @ p["b"]))
    return jnp.einsum("hnm,hmk->nk", pair, p["c"])


@case(
    {"a": (3, 8), "bias": (8,), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("bias", 0, 1), ("b", 0, 1)])},
)
def guarded_singularities(p, x):
    h = x @ p["a"] + per_channel(p["bias"], x)
    h = jnp.where(h > 0, jnp.log(jnp.where(h > 0, h, 1.0)), 0.0)
    return (h / (1 + jnp.abs(h)) + jnp.log(jnp.exp(h) + 1)) @ p["b"]


@case(
    {"a": (3, 8), "b": (3, 8), "c": (2, 8, 2)},
    {"a": (8, [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)])},
)
def stacked_branches(p, x):
    both = jnp.stack([x @ p["a"], x @ p["b"]], axis=1)
    return jnp.tensordot(jnp.sin(both), p["c"], 2)


@case(
    {"a": (3, 3, 3, 4), "b": (8, 5), "c": (5, 2)},
    {
        "a": (4, [("a", 3, 1), ("b", 0, 2)]),
        "b": (5, [("b", 1, 1), ("c", 0, 1)]),
    },
    IMAGES,
)
def repeats(p, x):
    h = jnp.tile(conv(x, p["a"]), (1, 1, 1, 2)).mean((1, 2))
    rows = jnp.unstack(jnp.repeat(h @ p["b"], 2, axis=0), axis=0)
    return jnp.stack(rows) @ p["c"]


@case(
    {"a": (3, 8), "b": (8, 2)},
    {"a": (8, [("a", 1, 1), ("b", 0, 1)])},
)
def half_precision(p, x):
    h = jax.nn.relu((x @ p["a"]).astype(jnp.bfloat16)).astype(jnp.float32)
    return h @ p["b"] + h.sum(1, keepdims=True)


@pytest.mark.parametrize("name", CASES)
def test_masked_equals_cut_and_groups_are_as_large_as_they_can_be(name):
    apply, shapes, groups, x = CASES[name]
    trace = assert_exact(apply, draw(shapes), x)
    assert members_of(trace) == groups


def test_running_statistics_are_cut_with_their_channels():
    def apply(p, s, x):
        return (
            jax.nn.relu(norm(p["norm"], s["norm"], conv(x, p["a"]))).mean((1, 2))
            @ p["b"]
        )

    params = draw(
        {"a": (3, 3, 3, 8), "norm": {"scale": (8,), "bias": (8,)}, "b": (8, 2)}
    )
    statistics = draw({"norm": {"mean": (8,), "var": (8,)}, "steps": ()})
    trace = assert_exact(apply, params, IMAGES, statistics=statistics)
    (group,) = trace.groups
    assert [(m.path, m.axis) for m in group.statistics] == [
        ("norm/var", 0),
        ("norm/mean", 0),
    ]


# What f does to a dead channel decides how f(h) may be read: summed if f(0) = 0, with
# weights if f(0) is finite.
@pytest.mark.parametrize(
    ("f", "may_be_summed", "may_be_weighted"),
    [
        (jax.nn.relu, True, True),
        (jax.nn.leaky_relu, True, True),
        (jax.nn.elu, True, True),
        (jax.nn.gelu, True, True),
        (functools.partial(jax.nn.gelu, approximate=False), True, True),
        (jax.nn.silu, True, True),
        (jax.nn.relu6, True, True),
        (jax.nn.hard_swish, True, True),
        (jnp.sqrt, True, True),
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
        (lambda h: (h >= 0).astype(jnp.float32), False, True),
        (jnp.log, False, False),
        (lax.rsqrt, False, False),
        (lambda h: h / h, False, False),
        (lambda h: 1 / h, False, False),
        (lambda h: h**-2, False, False),
        (lambda h: 0.0**h, False, True),
    ],
)
def test_values_of_dead_channels(f, may_be_summed, may_be_weighted):
    params = {"a": jnp.ones((3, 8)), "b": jnp.ones((8, 2))}
    summed = trace_channels(lambda p, x: f(x @ p["a"]).sum(1), params, X).groups
    weighted = trace_channels(lambda p, x: f(x @ p["a"]) @ p["b"], params, X).groups
    assert (len(summed), len(weighted)) == (may_be_summed, may_be_weighted)


def window(h, size, reducer=lax.add, start=0.0):
    return lax.reduce_window(h, start, reducer, size, (1,) * h.ndim, "SAME")


@pytest.mark.parametrize(
    ("f", "may_be_summed"),
    [
        (lambda h: jnp.pad(h, ((0, 1), (0, 0))), True),
        (lambda h: jnp.pad(h, ((0, 1), (0, 0)), constant_values=1.0), False),
        (lambda h: jnp.concatenate([h, jnp.sin(h)], axis=0), True),
        (lambda h: jnp.concatenate([h, jnp.cos(h)], axis=0), False),
        (lambda h: jnp.concatenate([h, jnp.sin(h)], axis=1), True),
        (lambda h: jnp.concatenate([h, jnp.cos(h)], axis=1), False),
        (lambda h: jnp.stack([h, jnp.cos(h)]), False),
        (lambda h: h.reshape(2, 2, 8), True),
        (lambda h: jnp.cos(h).reshape(2, 2, 8), False),
        (lambda h: jnp.where(h > 0, 1 + h, h), True),
        (lambda h: jnp.where(h > 0, h, 1 + h), False),
        (lambda h: window(h, (2, 1)), True),
        (lambda h: window(jnp.cos(h), (2, 1)), False),
        (lambda h: window(h, (1, 3)), False),
        (lambda h: window(h, (2, 1), lax.max, -jnp.inf), True),
        (lambda h: jnp.cos(window(h, (2, 1), lax.max, -jnp.inf)), False),
        (lambda h: jnp.einsum("nh,mk->nhmk", h, X), True),
        (lambda h: jnp.einsum("nh,nk->hk", h, X), True),
        (lambda h: jnp.einsum("nh,nk->hk", jnp.cos(h), X), False),
        (lambda h: jnp.einsum("nh,mh->hnm", jnp.cos(h), h), True),
        (lambda h: h.prod(0), True),
        (lambda h: h.max(0), True),
        (lambda h: jnp.cos(h).max(0), False),
        (lambda h: (h + 0.5).astype(jnp.int32), True),
        (lambda h: (h + 0.5).astype(bool), False),
    ],
)
def test_values_of_dead_channels_behind_other_operations(f, may_be_summed):
    params = {"a": jnp.ones((3, 8))}
    trace = trace_channels(lambda p, x: f(x @ p["a"]).sum(), params, X)
    assert len(trace.groups) == may_be_summed, trace.explain("a")


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
    assert "may not be finite" in trace.explain("b")


def test_means_over_channels_freeze_what_is_subtracted_from():
    def apply(p, x):
        h = x @ p["a"]
        h = h - h.mean(1, keepdims=True)
        return h / jnp.sqrt(jnp.square(h).mean(1, keepdims=True) + 1e-5) @ p["b"]

    trace = trace_channels(apply, draw({"a": (3, 8), "b": (8, 2)}), X)
    assert not trace.groups
    assert "reduce_sum: reads removed channels that may not be exactly zero" in (
        trace.explain("a")
    )


UNKNOWN = {
    "cumsum": lambda h: jnp.cumsum(h, axis=1),
    "sort": lambda h: jnp.sort(h, axis=1),
    "top_k": lambda h: lax.top_k(h, 3)[0],
    "fft": lambda h: jnp.fft.fft(h).real,
    "argmax": lambda h: h * (jnp.argmax(h, 1) == 2)[:, None],
    "gather": lambda h: h[:, jnp.array([2, 0, 1])],
    "reduce_max": lambda h: h.max(1, keepdims=True),
    "reduce_window_sum": lambda h: lax.reduce_window(
        h, 0.0, lax.add, (1, 2), (1, 1), "VALID"
    ),
    "while": lambda h: lax.while_loop(lambda h: h.sum() < 9.0, lambda h: h + 1.0, h),
    "cond": lambda h: lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h),
    "scan": lambda h: lax.fori_loop(0, 3, lambda i, h: jnp.sin(h), h),
    "mul": lambda h: h * np.arange(8.0)[None],
    "add": lambda h: h + jax.random.normal(jax.random.key(0), h.shape),
    "reshape": lambda h: h.reshape(4, 2, 4).max(2),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_mixes_channels_freezes_them_and_says_so(name):
    f = UNKNOWN[name]

    def apply(p, x):
        return f(x @ p["a"]) @ p["b"] + jnp.tanh(x @ p["c"]) @ p["d"]

    width = jax.eval_shape(f, jax.ShapeDtypeStruct((4, 8), jnp.float32)).shape[1]
    params = draw({"a": (3, 8), "b": (width, 2), "c": (3, 5), "d": (5, 2)})
    trace = assert_exact(apply, params, X, densities=[0.5])
    assert members_of(trace) == {"c": (5, [("c", 1, 1), ("d", 0, 1)])}
    reason = trace.explain("a").splitlines()[1]
    assert reason.startswith(f"a axis 1 (8): stays; {name}: ")
    assert f"at {__file__}:" in reason


def test_a_channel_read_alone_stays_and_the_others_go():
    def apply(p, x):
        h = jnp.tanh(x @ p["a"])
        return h @ p["b"] + h[:, 3][:, None]

    trace = trace_channels(apply, draw({"a": (3, 8), "b": (8, 2)}), X)
    (group,) = trace.groups
    assert group.members[0].positions.ravel().tolist() == [0, 1, 2, 4, 5, 6, 7]
    lines = trace.explain("a").splitlines()
    assert lines[1] == "a axis 1 (8), positions 0-2 and 4-7: group a, 7 channels"
    assert lines[2].startswith("a axis 1 (8), positions 3: stays; slice: leaves one ")
    assert "; together with b axis 0" in lines[2]


@pytest.mark.parametrize(("wide", "narrow"), [("a", "b"), ("b", "a")])
def test_where_two_channel_axes_merge_the_longer_one_is_kept(wide, narrow):
    def apply(p, x):
        outer = jnp.einsum("nh,nk->nhk", x @ p["a"], x @ p["b"])
        return outer.reshape(x.shape[0], -1) @ p["c"]

    shapes = {wide: (3, 5), narrow: (3, 4), "c": (20, 2)}
    trace = assert_exact(apply, draw(shapes), X)
    assert members_of(trace) == {wide: (5, [(wide, 1, 1), ("c", 0, 4)])}
    assert "merges it with another channel axis" in trace.explain(narrow)


def test_kernels_may_be_flattened():
    def apply(p, x):
        flat = p["a"].reshape(-1, p["a"].shape[3])
        flat = flat / (0.1 + jnp.abs(flat).sum(0, keepdims=True))
        h = jax.nn.relu(conv(conv(x, p["in"]), flat.reshape(p["a"].shape)))
        return h.mean((1, 2)) @ p["b"]

    shapes = {"in": (3, 3, 3, 4), "a": (3, 3, 4, 8), "b": (8, 2)}
    assert members_of(assert_exact(apply, draw(shapes), IMAGES)) == {
        "a": (4, [("a", 2, 1), ("in", 3, 1)]),
        "a#2": (8, [("a", 3, 1), ("b", 0, 1)]),
    }


def test_convolutions_in_groups_stay():
    def apply(p, x):
        h = conv(x, p["a"])
        layout = ("NHWC", "HWIO", "NHWC")
        h = lax.conv_general_dilated(
            h, p["b"], (1, 1), "SAME", dimension_numbers=layout, feature_group_count=8
        )
        return h.sum((1, 2)) @ p["c"]

    shapes = {"a": (3, 3, 3, 8), "b": (3, 3, 1, 8), "c": (8, 2)}
    trace = trace_channels(apply, draw(shapes), IMAGES)
    assert not trace.groups
    assert "convolves channels or images in groups" in trace.explain("a")


def test_parameters_that_are_results_or_unused_or_tiny_stay():
    def apply(p, x):
        return x @ p["a"] @ p["b"], p["c"], p["one"] * p["number"] * p["count"]

    shapes = {"a": (3, 4), "b": (4, 2), "c": (5, 4), "unused": (4, 0), "one": (4, 1)}
    params = {**draw(shapes), "number": 2.5, "count": jnp.arange(4)[:, None]}
    trace = assert_exact(apply, params, X)
    assert members_of(trace) == {"a": (4, [("a", 1, 1), ("b", 0, 1)])}
    assert trace.explain("c").splitlines() == [
        "c axis 0 (5): stays; is an output of the function",
        "c axis 1 (4): stays; is an output of the function",
    ]
    assert trace.explain("unused").splitlines() == [
        "unused axis 0 (4): stays; is not used",
        "unused axis 1 (0): is empty",
    ]
    assert "one axis 1 (1): stays; has length 1" in trace.explain("one")
    assert trace.explain("number") == "number: stays; is a single number"
    with pytest.raises(UserError, match="no parameter 'd'; there are a, b, c"):
        trace.explain("d")


def test_explain_names_every_axis_of_every_parameter_once():
    def apply(p, x):
        both = jnp.concatenate([x @ p["a"], jnp.cumsum(x @ p["b"], 1), x], axis=1)
        return both @ p["c"]

    params = draw({"a": (3, 6), "b": (3, 4), "c": (13, 2)})
    lines = trace_channels(apply, params, X).explain().splitlines()
    heads = [line.split(":")[0] for line in lines]
    assert heads == [
        "a axis 0 (3)",
        "a axis 1 (6)",
        "b axis 0 (3)",
        "b axis 1 (4)",
        "c axis 0 (13), positions 0-5",
        "c axis 0 (13), positions 6-12",
        "c axis 1 (2)",
    ]
    assert "fixed size (of input 0)" in lines[0]
    assert "group a, 6 channels" in lines[4]
    assert "fixed size (of a result of cumsum)" in lines[5]


def test_sources_are_lines_of_this_file_even_where_jax_remembers_others():
    def first(p, x):
        return jnp.cumsum(x @ p["a"], axis=1)

    def second(p, x):
        h = x @ p["a"]
        return jnp.cumsum(h, axis=1)

    params = draw({"a": (3, 11)})
    for apply, offset in ((first, 1), (second, 2)):
        line = apply.__code__.co_firstlineno + offset
        reason = trace_channels(apply, params, X).explain("a")
        assert f"at {__file__}:{line}" in reason


def test_prunable_share_counts_entries_once():
    params = draw({"a": (3, 8), "b": (8, 2), "c": (8, 8), "d": (5,)})
    trace = trace_channels(lambda p, x: x @ p["a"] @ p["c"] @ p["b"], params, X)
    assert trace.prunable_share() == pytest.approx((24 + 16 + 64) / (24 + 16 + 64 + 5))


def cumsum_along(ctx, x: Traced) -> list[Traced]:
    """A rule as a user may write it: other axes than the summed one pass."""
    axis = ctx.eqn.params["axis"]
    ctx.freeze(x.labels[axis], "sums along it")
    labels = [
        np.zeros_like(own) if i == axis else own for i, own in enumerate(x.labels)
    ]
    return [Traced(tuple(labels), x.dead)]


def test_rules_can_be_added():
    def apply(p, x):
        return jnp.cumsum(x @ p["a"], axis=0) @ p["b"]

    params = draw({"a": (3, 8), "b": (8, 2)})
    assert not trace_channels(apply, params, X).groups
    trace = assert_exact(apply, params, X, rules={"cumsum": cumsum_along})
    assert members_of(trace) == {"a": (8, [("a", 1, 1), ("b", 0, 1)])}


def harmless(ctx, x, *rest):
    return [Traced(x.labels, x.dead)]


def summing_whatever(ctx, x):
    return [Traced(x.labels[:-1], x.dead[:-1])]


@pytest.mark.parametrize(
    ("f", "wrong"),
    [
        (lambda h: jnp.sort(h, axis=1), {"sort": harmless}),
        (lambda h: h - jnp.exp(h).sum(1)[:, None], {"reduce_sum": summing_whatever}),
    ],
)
def test_a_wrong_rule_is_noticed_by_comparing_masked_with_cut(f, wrong):
    params = draw({"a": (3, 8), "b": (8, 2)})
    with pytest.raises(AssertionError, match="masked and cut differ"):
        assert_exact(lambda p, x: f(x @ p["a"]) @ p["b"], params, X, rules=wrong)


def test_a_rule_with_wrong_shapes_is_refused():
    with pytest.raises(UserError, match="the rule for transpose returned shapes"):
        trace_channels(
            lambda p, x: p["a"].T, draw({"a": (3, 8)}), X, rules={"transpose": harmless}
        )


def test_two_leaves_of_one_path_are_refused():
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}}
    with pytest.raises(UserError, match="two leaves of the parameters have the same"):
        trace_channels(lambda p, x: p["a/b"], params, X)


def model_trace(name, side=32, num_classes=10, **settings):
    model = make_model(ModelConfig(name=name, **settings), (side, side, 3), num_classes)
    params, statistics = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    return trace_channels(model.apply, params, images, statistics=statistics)


BOTTLENECK_STREAMS = [64, 256, 512, 1024, 2048]


@pytest.mark.parametrize(
    ("name", "side", "streams", "inner"),
    [
        ("resnet20", 32, [16, 32, 64], [16] * 3 + [32] * 3 + [64] * 3),
        (
            "resnet18",
            224,
            [64, 128, 256, 512],
            [64] * 2 + [128] * 2 + [256] * 2 + [512] * 2,
        ),
        (
            "resnet50",
            224,
            BOTTLENECK_STREAMS,
            [64] * 6 + [128] * 8 + [256] * 12 + [512] * 6,
        ),
        (
            "wide_resnet50_2",
            32,
            BOTTLENECK_STREAMS,
            [128] * 6 + [256] * 8 + [512] * 12 + [1024] * 6,
        ),
    ],
)
def test_residual_networks(name, side, streams, inner):
    trace = model_trace(name, side)
    kernels = {
        g.name: [m for m in g.members if "kernel" in m.path] for g in trace.groups
    }
    # An inner group is made by one kernel and read by one; all others are streams.
    is_inner = {name: len(members) == 2 for name, members in kernels.items()}
    found = {
        kind: sorted(g.size for g in trace.groups if is_inner[g.name] is kind)
        for kind in (True, False)
    }
    if name in ("resnet50", "wide_resnet50_2"):  # the stem is read by two kernels
        assert len(kernels["stem/conv"]) == 3
    assert found == {True: sorted(inner), False: sorted(streams)}
    assert_only_images_kernels_and_classes_stay(trace)


def assert_only_images_kernels_and_classes_stay(trace):
    first = (
        "stem/conv/kernel"
        if "stem/conv/kernel" in trace.shapes
        else ("features/0/conv/kernel")
    )
    stays = {
        (path, axis)
        for path, shape in trace.shapes.items()
        if len(shape) == 4
        for axis in (0, 1)
    } | {(first, 2), ("classifier/kernel", 1), ("classifier/bias", 0)}
    assert {(m.path, m.axis) for f in trace.frozen for m in f.members} == stays
    channels = sum(s.positions.size for g in trace.groups for s in g.members)
    frozen = sum(s.positions.size for f in trace.frozen for s in f.members)
    assert channels + frozen == sum(sum(shape) for shape in trace.shapes.values())


def test_members_of_a_resnet20_stream():
    groups = members_of(model_trace("resnet20"))
    assert groups["blocks/0/conv1"] == (
        16,
        [
            ("blocks/0/conv1/kernel", 3, 1),
            ("blocks/0/norm1/scale", 0, 1),
            ("blocks/0/norm1/bias", 0, 1),
            ("blocks/0/conv2/kernel", 2, 1),
        ],
    )
    size, members = groups["stem/conv"]
    readers = [path for path, axis, _ in members if axis == 2]
    writers = [path for path, axis, _ in members if axis == 3]
    assert size == 16
    assert readers == [
        *(f"blocks/{i}/conv1/kernel" for i in range(4)),
        "blocks/3/shortcut/conv/kernel",
    ]
    assert writers == [
        "stem/conv/kernel",
        *(f"blocks/{i}/conv2/kernel" for i in range(3)),
    ]


@pytest.mark.parametrize(
    ("side", "hidden", "rows"), [(32, [], 1), (224, [4096, 4096], 49)]
)
def test_vgg16(side, hidden, rows):
    trace = model_trace("vgg16", side)
    convs = [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert [g.size for g in trace.groups] == convs + hidden
    reader = "hidden/0/kernel" if hidden else "classifier/kernel"
    assert members_of(trace)["features/12/conv"][1][-1] == (reader, 0, rows)
    assert_only_images_kernels_and_classes_stay(trace)


@pytest.mark.parametrize(
    "name", ["resnet32", "resnet34", "resnet101", "resnet152", "vgg19"]
)
def test_other_models_are_prunable_almost_everywhere(name):
    assert model_trace(name, width=0.25).prunable_share() > 0.99
