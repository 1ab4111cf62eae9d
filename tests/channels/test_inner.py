"""Which groups are inside of a block: those of which no shortcut adds anything up."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from prunex_jax.channels import trace_channels
from tests.channels.test_models import model_trace
from tests.helpers.channel_checks import draw
from tests.helpers.networks import CASES

X = draw({"x": (4, 3)}, seed=1)["x"]


def outer_of(trace):
    """Names of the groups that are not inside of a block."""
    return [group.name for group in trace.groups if not group.is_inner]


@pytest.mark.parametrize(
    ("name", "side", "outer", "num_inner"),
    [
        ("resnet20", 32, ["stem/conv", "blocks/3/conv2", "blocks/6/conv2"], 9),
        # The stem is made by one kernel, and only read by the first block.
        ("resnet50", 64, [f"blocks/{i}/conv3" for i in (0, 3, 7, 13)], 33),
        ("vgg16", 32, [], 13),
    ],
)
def test_of_our_models(name, side, outer, num_inner):
    trace = model_trace(name, side)
    assert outer_of(trace) == outer
    assert sum(group.is_inner for group in trace.groups) == num_inner
    for group in trace.groups if name != "resnet50" else ():
        paths = [m.path for m in group.members if m.axis == 3]
        assert group.is_inner == (len(paths) == 1), "one convolution makes it"


@pytest.mark.parametrize(
    ("case", "outer"),
    [
        # A stream, and inside of its blocks heads, features and a gated mlp.
        ("grouped_query_attention", ["embed"]),
        ("stacked_layers", ["in"]),  # the same in a loop
        ("lstm", ["bias"]),  # what comes in is added to what was kept
        ("depthwise_with_and_without_multiplier", []),
        ("embeddings", []),  # where a token stands is fixed
    ],
)
@pytest.mark.parametrize("factors", ["one", "all"])
def test_of_parts_of_networks(case, outer, factors):
    apply, shapes, _, inputs = CASES[case]
    trace = trace_channels(apply, draw(shapes, seed=0), *inputs, factors=factors)
    assert outer_of(trace) == outer


def batch_norm(p, x):
    return (x - p["mean"][None]) * (p["scale"] * lax.rsqrt(p["var"] ** 2 + 1))[None]


def prelu(p, x):
    return jnp.maximum(x, 0) + p["scale"][None] * jnp.minimum(x, 0)


@jax.custom_jvp
def product(x, y):
    return x * y


@product.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return x * y, dx + dy  # which the function does not add up


def recurrence(p, h, x):
    def step(state, _):
        return jnp.tanh(h + state @ p["b"]), None

    return lax.scan(step, jnp.zeros_like(h), length=3)[0]


FUNCTIONS = {
    "a norm and a bias": (lambda p, h, x: batch_norm(p, h) + p["var"][None], []),
    "two slopes of one input": (lambda p, h, x: prelu(p, h), []),
    "a turn of features": (lambda p, h, x: h * 0.6 + jnp.roll(h, 4, 1) * 0.8, []),
    "a sum of weights": (
        lambda p, h, x: jnp.tanh(h @ (p["b"] + p["c"])) @ p["b2"],
        [],
    ),
    "a gate": (lambda p, h, x: h * (x @ p["a2"]), []),
    "a product with its derivative": (lambda p, h, x: product(h, x @ p["a2"]), []),
    "a sum of two": (lambda p, h, x: h + x @ p["a2"], ["a"]),
    "a difference of two": (lambda p, h, x: h - x @ p["a2"], ["a"]),
    "a sum behind a norm": (lambda p, h, x: batch_norm(p, h) + x @ p["a2"], ["a"]),
    "a sum in a branch": (
        lambda p, h, x: lax.cond(True, lambda: h + x @ p["a2"], lambda: h),
        ["a"],
    ),
    "a state that starts at zero": (recurrence, ["a"]),
    "a block": (lambda p, h, x: h + jnp.tanh(h @ p["b"]) @ p["c"], ["a"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_a_shortcut(name):
    function, outer = FUNCTIONS[name]
    vectors = dict.fromkeys(("mean", "var", "scale"), (8,))
    squares = dict.fromkeys(("b", "c", "b2"), (8, 8))
    params = draw({"a": (3, 8), "a2": (3, 8), "out": (8, 2), **vectors, **squares}, 0)

    def apply(p, x):
        return jnp.tanh(function(p, x @ p["a"], x)) @ p["out"]

    trace = trace_channels(apply, params, X)
    assert "a" in {group.name for group in trace.groups}
    assert outer_of(trace) == outer
