"""Patterns that people reported of other tools: right, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prunex_jax.channels import trace_channels
from prunex_jax.shrink import certify, make_cut
from tests.helpers.channel_checks import assert_exact, draw, members_of

X = draw({"x": (2, 4, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 4, 4, 3)}, seed=2)["x"]


def conv(x, kernel, groups=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


def standardised(x, axes):
    x = x - x.mean(axes, keepdims=True)
    return x / jnp.sqrt(jnp.square(x).mean(axes, keepdims=True) + 1e-5)


def in_groups(h):
    return h.reshape(*h.shape[:-1], 2, 4)


def group_norm(p, x):
    h = standardised(in_groups(conv(x, p["a"])), (1, 2, 4))
    return jax.nn.relu(h.reshape(2, 4, 4, 8) * p["s"]) @ p["b"]


def instance_norm(p, x):
    return jax.nn.relu(standardised(conv(x, p["a"]), (1, 2)) * p["s"]) @ p["b"]


def spatial_group_enhance(p, x):
    h = in_groups(conv(x, p["a"]))
    similar = (h * h.mean((1, 2), keepdims=True)).sum(-1, keepdims=True)
    gate = jax.nn.sigmoid(standardised(similar, (1, 2)) + p["t"])
    return (h * gate).reshape(2, 4, 4, 8) @ p["b"]


def channel_shuffle(p, x):
    h = in_groups(jax.nn.relu(conv(x, p["a"]))).swapaxes(3, 4)
    return h.reshape(2, 4, 4, 8) @ p["b"]


def pixel_shuffle_of_torch(p, x):
    h = conv(x, p["a"]).reshape(2, 4, 4, 2, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    return jax.nn.relu(h.reshape(2, 8, 8, 2)) @ p["c"]


def pixel_shuffle_of_tensorflow(p, x):
    h = conv(x, p["a"]).reshape(2, 4, 4, 2, 2, 2).transpose(0, 1, 3, 2, 4, 5)
    return jax.nn.relu(h.reshape(2, 8, 8, 2)) @ p["c"]


def one_channel_beside_others(p, x):
    parts = [conv(x, p["a"]), conv(x, p["one"])]
    return jax.nn.relu(jnp.concatenate(parts, -1)) @ p["nine"]


def the_same_twice(p, x):
    h = jax.nn.relu(conv(x, p["a"]))
    return jnp.concatenate([h, h], -1) @ p["twice"]


def resized(h, size):
    return jax.image.resize(h, (h.shape[0], size, size, h.shape[3]), "bilinear")


def conv_gru(p, x):
    def turn(h, _):
        h = resized(h, 4)
        gates = jax.nn.sigmoid(conv(jnp.concatenate([x, h], -1), p["gates"]))
        update, reset = jnp.split(gates, 2, -1)
        new = jnp.tanh(conv(jnp.concatenate([x, reset * h], -1), p["new"]))
        h = (1 - update) * h + update * new
        return resized(h, 2), h.mean((1, 2)) @ p["c"]

    return lax.scan(turn, jnp.zeros((2, 2, 2, 2)), length=2)[1]


SHAPES = {"a": (3, 3, 3, 8), "b": (8, 2), "c": (2, 2), "s": (1, 1, 1, 8)}
SHAPES |= {"one": (3, 3, 3, 1), "nine": (9, 2), "t": (1, 1, 1, 2, 1)}
SHAPES |= {"twice": (16, 2), "gates": (3, 3, 5, 4), "new": (3, 3, 5, 2)}


# Function, the parameters that it has, and its groups.
CASES = [
    (group_norm, "asb", {"a": 4}),
    (instance_norm, "asb", {"a": 8}),
    (spatial_group_enhance, "atb", {"a": 4}),
    (channel_shuffle, "ab", {"a": 8}),
    (pixel_shuffle_of_torch, "ac", {"a": 2}),
    (pixel_shuffle_of_tensorflow, "ac", {"a": 2}),
    (one_channel_beside_others, ("a", "one", "nine"), {"a": 8}),
    (the_same_twice, ("a", "twice"), {"a": 8}),
    (conv_gru, ("gates", "new", "c"), {"c": 2}),
]


@pytest.mark.parametrize(("apply", "names", "groups"), CASES)
def test_image_networks(apply, names, groups):
    params = draw({name: SHAPES[name] for name in names})
    trace = assert_exact(apply, params, IMAGES, densities=(0.5,))
    sizes = {name: size for name, (size, _) in members_of(trace).items()}
    assert sizes == groups, trace.explain()


def test_attention_across_neighbouring_channels_is_refused():
    def apply(p, x):
        h = conv(x, p["a"])
        pooled = h.mean((1, 2))[..., None]
        gate = lax.conv_general_dilated(
            pooled, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return (h * jax.nn.sigmoid(gate)[:, None, None, :, 0]) @ p["b"]

    shapes = {"a": SHAPES["a"], "b": SHAPES["b"], "k": (3, 1, 1)}
    trace = trace_channels(apply, draw(shapes), IMAGES)
    assert not trace.groups
    text = trace.explain("a")
    assert "conv_general_dilated: convolves along it, so neighbours mix" in text


@pytest.mark.parametrize("is_moved", [False, True])
def test_fused_attention_of_three_heads_and_features(is_moved):
    def apply(p, x):
        qkv = (x @ p["i"] @ p["qkv"]).reshape(2, 4, 3, 2, 4)
        if is_moved:
            q, k, v = jnp.moveaxis(qkv, 2, 0)
        else:
            q, k, v = (part[:, :, 0] for part in jnp.split(qkv, 3, axis=2))
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) / jnp.sqrt(4.0)
        mixed = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores), v)
        return mixed.reshape(2, 4, 8) @ p["o"]

    params = draw({"i": (3, 4), "qkv": (4, 24), "o": (8, 3)})
    trace = assert_exact(apply, params, X, densities=(0.5,))
    assert trace.prunable_share() == 1.0
    sizes = {name: size for name, (size, _) in members_of(trace).items()}
    assert sizes == {"i": 4, "qkv": 4}


@pytest.mark.parametrize("is_training", [False, True])
def test_batch_norm_of_equinox_with_moving_averages(is_training):
    eqx = pytest.importorskip("equinox")
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="ema")
    weights, rest = eqx.partition(norm, eqx.is_inexact_array)
    running, indices = eqx.partition(state, eqx.is_array)

    def apply(p, s, x):
        layer = eqx.combine(p["norm"], rest)
        layer = eqx.nn.inference_mode(layer, not is_training)
        form = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        h, _ = jax.vmap(layer, **form)(x @ p["a"], eqx.combine(s, indices))
        return jax.nn.relu(h) @ p["b"]

    params = {**draw({"a": (3, 8), "b": (8, 2)}), "norm": weights}
    trace = trace_channels(apply, params, X[0], statistics=running)
    if not is_training:
        assert [(g.name, g.size) for g in trace.groups] == [("a", 8)]
    else:  # the running variance may be below zero, for all that is known
        assert "sqrt at " in trace.explain("a")
        assert "may be given zero or less of them" in trace.explain("a")


def cut_some(apply, params, x, kept):
    """Removes channels of every group of a function, and compares with the masked."""
    trace = trace_channels(apply, params, x)
    masks = {g.name: np.arange(g.size) < kept for g in trace.groups}
    cut = make_cut(trace, masks, params)
    small, function = cut.take(params), cut.function(apply)
    assert certify(apply, function, cut.mask(params), small, [x], cut.take).is_equal
    return function, small


@pytest.mark.parametrize("apply", [the_same_twice, instance_norm])
def test_cuts_of_what_was_cut(apply):
    names = ("a", "twice") if apply is the_same_twice else "asb"
    params = draw({name: SHAPES[name] for name in names})
    for kept in (7, 6, 5, 4, 3, 2):
        apply, params = cut_some(apply, params, IMAGES, kept)
        assert params["a"].shape[-1] == kept
