"""Kinds of networks that people prune: all that can go is found, and goes exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prunex_jax.channels import trace_channels
from tests.helpers.channel_checks import assert_exact, draw, members_of

X = draw({"x": (2, 5, 3)}, seed=1)["x"]
IMAGES = draw({"x": (2, 4, 4, 3)}, seed=2)["x"]
NODES = draw({"x": (4, 3)}, seed=3)["x"]
SENDERS = jnp.array([0, 1, 2, 3, 3, 2, 1, 0])
# Nothing is sent to the last node.
RECEIVERS = jnp.array([1, 2, 0, 0, 1, 0, 0, 2])

# name -> (function, shapes, inputs, sizes of groups by name, options, what stays).
CASES = {}


def case(name, apply, shapes, inputs, groups, stays=(), **options):
    CASES[name] = (apply, shapes, inputs, groups, stays, options)


def conv(x, kernel, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=layout
    )


def conv_along(x, kernel, dilation=1, groups=1, padding="SAME"):
    return lax.conv_general_dilated(
        x,
        kernel,
        (1,),
        padding,
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )


def layer_norm(h, scale):
    h = h - h.mean(-1, keepdims=True)
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6) * scale


# State space models: the inner width, the rank of the step size, and the states.


def scanned(decay, drive):
    def turn(h, row):
        h = row[0] * h + row[1]
        return h, h

    rows = [x.swapaxes(0, 1) for x in (decay, drive)]
    return lax.scan(turn, jnp.zeros_like(drive[:, 0]), rows)[1].swapaxes(0, 1)


def scanned_by_halves(decay, drive):
    def joined(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(joined, (decay, drive), axis=1)[1]


def written_in_turn(decay, drive):
    def turn(i, carry):
        h, out = carry
        h = decay[:, i] * h + drive[:, i]
        return h, lax.dynamic_update_slice_in_dim(out, h[:, None], i, 1)

    start = jnp.zeros_like(drive[:, 0]), jnp.zeros_like(drive)
    return lax.fori_loop(0, decay.shape[1], turn, start)[1]


def mamba(run):
    def apply(p, x):
        u, z = jnp.split(x @ p["in"], 2, -1)
        u = conv_along(u, p["conv"], groups=6, padding=[(2, 0)])
        u = jax.nn.silu(u)
        step, b, c = jnp.split(u @ p["select"], [2, 6], -1)
        step = jax.nn.softplus(step @ p["step"] + p["bias"])[..., None]
        decay = jnp.exp(-step * jnp.exp(p["log"]))
        states = run(decay, step * b[:, :, None] * u[..., None])
        y = (states * c[:, :, None]).sum(-1) + u * p["skip"]
        return (y * jax.nn.silu(z)) @ p["out"]

    return apply


MAMBA = {
    **{"in": (3, 12), "conv": (3, 1, 6), "select": (6, 10), "step": (2, 6)},
    **{"bias": (1, 1, 6), "log": (1, 1, 6, 4), "skip": (1, 1, 6), "out": (6, 3)},
}
for run in (scanned, scanned_by_halves, written_in_turn):
    sizes = {"in": 6, "select": 4, "select#2": 2}
    case(f"mamba {run.__name__}", mamba(run), MAMBA, (X,), sizes)


def decays(logs):
    """float[batch, heads, queries, keys], of sums over what lies between."""
    sums = jnp.cumsum(logs.transpose(0, 2, 1), -1)
    between = sums[..., :, None] - sums[..., None, :]
    return jnp.exp(jnp.where(np.tril(np.ones((1, 1, 5, 5), bool)), between, -jnp.inf))


def mamba_of_heads(p, x):
    z, u, b, c, step = jnp.split(x @ p["in"], [6, 12, 16, 20], -1)
    xbc = jnp.concatenate([u, b, c], -1)
    xbc = jax.nn.silu(conv_along(xbc, p["conv"], groups=14, padding=[(2, 0)]))
    u, b, c = jnp.split(xbc, [6, 10], -1)
    step = jax.nn.softplus(step + p["bias"])
    u, mask = u.reshape(2, 5, 2, 3), decays(-jnp.exp(p["log"]) * step)
    y = jnp.einsum("bln,bsn,bhls,bshp->blhp", c, b, mask, u * step[..., None])
    y = (y + u * p["skip"]).reshape(2, 5, 6) * jax.nn.silu(z)
    scale = lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
    return (y * scale * p["norm"]) @ p["out"]


case(
    "mamba of heads",
    mamba_of_heads,
    {
        **{"in": (3, 22), "conv": (3, 1, 14), "bias": (1, 1, 2), "log": (1, 1, 2)},
        **{"skip": (1, 1, 2, 1), "norm": (1, 1, 6), "out": (6, 3)},
    },
    (X,),
    {"in": 2, "in#2": 3, "in#3": 4},
    factors="all",
)


# Spectra along tokens, and along features as well.


def spectral(axes):
    def apply(p, x):
        h = x @ p["in"]
        h = layer_norm(h + jnp.fft.fftn(h, axes=axes).real, p["norm"])
        return (h + jax.nn.gelu(h @ p["up"]) @ p["down"]) @ p["out"]

    return apply


SPECTRAL = {
    "in": (3, 6),
    "norm": (1, 1, 6),
    "up": (6, 8),
    "down": (8, 6),
    "out": (6, 2),
}
case("spectra of tokens", spectral((1,)), SPECTRAL, (X,), {"in": 6, "up": 8})
case(
    "spectra of features",
    spectral((1, 2)),
    SPECTRAL,
    (X,),
    {"up": 8},
    [("in", "fft: mixes positions along it")],
)


# Vocoders: weight norm, transposed convolutions, residual sums of several widths.


def vocoder(epsilon):
    def kernel(p, name):
        v = p[f"{name}_v"]
        size = jnp.sqrt(jnp.square(v).sum((0, 1), keepdims=True) + epsilon)
        return p[f"{name}_g"] * v / size

    def apply(p, x):
        leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.1)
        layout = ("NWC", "WIO", "NWC")
        h = leaky(conv_along(x, kernel(p, "pre")))
        h = lax.conv_transpose(
            h, kernel(p, "up"), (2,), "SAME", dimension_numbers=layout
        )
        total = 0.0
        for dilation in (1, 3):
            wide = conv_along(leaky(h), kernel(p, f"wide{dilation}"), dilation)
            total = total + h + conv_along(leaky(wide), kernel(p, f"back{dilation}"))
        return jnp.tanh(conv_along(leaky(total / 2), p["post"]))

    return apply


def normed(name, *shape):
    return {f"{name}_v": shape, f"{name}_g": (1, 1, shape[-1])}


VOCODER = {
    **normed("pre", 3, 3, 8),
    **normed("up", 4, 8, 6),
    **normed("wide1", 3, 6, 5),
    **normed("back1", 3, 5, 6),
    **normed("wide3", 3, 6, 5),
    **normed("back3", 3, 5, 6),
    "post": (3, 6, 1),
}
case(
    "vocoder",
    vocoder(1e-6),
    VOCODER,
    (X,),
    {"pre_v": 8, "up_v": 6, "wide1_v": 5, "wide3_v": 5},
)
case(
    "vocoder without epsilon",
    vocoder(0.0),
    VOCODER,
    (X,),
    {},
    [("up_v", "may be given zero or less of them; add such as 1e-12")],
)


# Detection: levels that are added up, heads that are shared, anchors in the channels.


def repeated(h):
    return jnp.repeat(jnp.repeat(h, 2, 1), 2, 2)


def resized(h):
    batch, rows, columns, width = h.shape
    return jax.image.resize(h, (batch, 2 * rows, 2 * columns, width), "nearest")


def detector(enlarged):
    def apply(p, x):
        fine = jax.nn.relu(conv(x, p["fine"]))
        middle = jax.nn.relu(conv(fine, p["middle"], 2))
        coarse = conv(jax.nn.relu(conv(middle, p["coarse"], 2)), p["from_coarse"])
        middle = conv(middle, p["from_middle"]) + enlarged(coarse)
        fine = conv(fine, p["from_fine"]) + enlarged(middle)
        boxes, classes = [], []
        for level, h in enumerate((fine, middle, coarse)):
            h = conv(h, p["smooth"])
            box = jax.nn.relu(conv(h, p["box"]) * p["scale"][level])
            boxes.append(conv(box, p["to_boxes"]).reshape(2, -1, 4))
            to_classes = conv(jax.nn.relu(conv(h, p["class"])), p["to_classes"])
            classes.append(to_classes.reshape(2, -1, 3))
        return jnp.concatenate(boxes, 1), jnp.concatenate(classes, 1)

    return apply


DETECTOR = {
    **{"fine": (3, 3, 3, 4), "middle": (3, 3, 4, 6), "coarse": (3, 3, 6, 8)},
    **{"from_fine": (1, 1, 4, 5), "from_middle": (1, 1, 6, 5)},
    **{"from_coarse": (1, 1, 8, 5), "smooth": (3, 3, 5, 5), "scale": (3, 1, 1, 1, 1)},
    **{"box": (3, 3, 5, 7), "class": (3, 3, 5, 7)},
    **{"to_boxes": (1, 1, 7, 8), "to_classes": (1, 1, 7, 6)},
}
for enlarged in (repeated, resized):
    sizes = {"fine": 4, "middle": 6, "coarse": 8, "from_coarse": 5, "smooth": 5}
    case(
        f"detector {enlarged.__name__}",
        detector(enlarged),
        DETECTOR,
        (IMAGES,),
        sizes | {"box": 7, "class": 7},
        [("to_boxes", "none of which can be cut")],
    )


def parts_of_parts(p, x):
    """Halves that go different ways, all of which are joined; then pools of pools."""
    parts = jnp.split(jax.nn.silu(conv(x, p["stem"])), 2, -1)
    for name in "ab":
        wide = jax.nn.silu(conv(parts[-1], p[f"{name}_up"]))
        parts.append(parts[-1] + conv(wide, p[f"{name}_down"]))
    pools = [jax.nn.silu(conv(jnp.concatenate(parts, -1), p["join"]))]
    for _ in range(2):
        window = (1, 3, 3, 1), (1, 1, 1, 1), "SAME"
        pools.append(lax.reduce_window(pools[-1], -jnp.inf, lax.max, *window))
    bins = conv(jnp.concatenate(pools, -1), p["bins"]).reshape(2, 16, 4, 5)
    return jax.nn.softmax(bins) @ jnp.arange(5.0)


case(
    "parts of parts",
    parts_of_parts,
    {
        **{"stem": (3, 3, 3, 8), "a_up": (3, 3, 4, 6), "a_down": (3, 3, 6, 4)},
        **{"b_up": (3, 3, 4, 6), "b_down": (3, 3, 6, 4), "join": (1, 1, 16, 6)},
        "bins": (1, 1, 18, 20),
    },
    (IMAGES,),
    {"stem": 4, "stem#2": 4, "a_up": 6, "b_up": 6, "join": 6},
)


# Recurrent networks, whose gates are made at once, in both directions.


def lstm(p, name, x, is_reversed):
    def turn(carry, row):
        h, state = carry
        gates = row @ p[f"{name}_x"] + h @ p[f"{name}_h"] + p[f"{name}_b"]
        i, f, g, o = jnp.split(gates, 4, -1)
        state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(state)
        return (h, state), h

    start = jnp.zeros((2, p[f"{name}_h"].shape[0]))
    return lax.scan(turn, (start, start), x, reverse=is_reversed)[1]


def gru(p, name, x, is_reversed):
    def turn(h, row):
        given = jnp.split(row @ p[f"{name}_x"] + p[f"{name}_b"], 3, -1)
        kept = jnp.split(h @ p[f"{name}_h"], 3, -1)
        reset, update = (
            jax.nn.sigmoid(a + b) for a, b in zip(given[:2], kept[:2], strict=True)
        )
        h = (1 - update) * jnp.tanh(given[2] + reset * kept[2]) + update * h
        return h, h

    start = jnp.zeros((2, p[f"{name}_h"].shape[0]))
    return lax.scan(turn, start, x, reverse=is_reversed)[1]


def in_both_directions(cell):
    def apply(p, x):
        x = x.swapaxes(0, 1)
        both = [cell(p, "there", x, False), cell(p, "back", x, True)]
        return cell(p, "top", jnp.concatenate(both, -1), False) @ p["out"]

    return apply


def recurrent(gates):
    shapes = {"out": (5, 2)}
    for name, inputs, size in (("there", 3, 6), ("back", 3, 4), ("top", 10, 5)):
        wide = gates * size
        shapes |= {f"{name}_x": (inputs, wide), f"{name}_h": (size, wide)}
        shapes[f"{name}_b"] = (1, wide)
    return shapes


for cell, gates in ((lstm, 4), (gru, 3)):
    case(
        f"{cell.__name__} in both directions",
        in_both_directions(cell),
        recurrent(gates),
        (X,),
        {"there_b": 6, "back_b": 4, "top_b": 5},
    )


# Graphs.


def messages(reduce):
    def apply(p, x, senders, receivers):
        h = x @ p["in"]
        for name in "ab":
            sent = reduce(jax.nn.relu(h[senders] @ p[f"{name}_sent"]), receivers, 4)
            seen = jnp.concatenate([h, sent], -1)
            h = h + jax.nn.relu(seen @ p[f"{name}_seen"])
        return h.mean(0) @ p["out"]

    return apply


def largest_or_zero(values, receivers, count):
    largest = jax.ops.segment_max(values, receivers, count)
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def largest_above_zero(values, receivers, count):
    return jnp.maximum(jax.ops.segment_max(values, receivers, count), 0.0)


GRAPH = {
    **{"in": (3, 6), "a_sent": (6, 5), "b_sent": (6, 7)},
    **{"a_seen": (11, 6), "b_seen": (13, 6), "out": (6, 2)},
}
for reduce in (jax.ops.segment_sum, largest_or_zero, largest_above_zero):
    case(
        f"messages by {reduce.__name__}",
        messages(reduce),
        GRAPH,
        (NODES, SENDERS, RECEIVERS),
        {"in": 6, "a_sent": 5, "b_sent": 7},
    )
case(
    "messages by segment_max",
    messages(jax.ops.segment_max),
    GRAPH,
    (NODES, SENDERS, RECEIVERS),
    {},
    [("in", "may leave a segment infinite that nothing is written to")],
)


def graph_attention(epsilon):
    def apply(p, x, senders, receivers):
        h = (x @ p["in"]).reshape(4, 2, 4)
        source, target = ((h * p[name]).sum(-1) for name in ("source", "target"))
        scores = jax.nn.leaky_relu(source[senders] + target[receivers])
        top = jax.ops.segment_max(scores, receivers, 4) if not epsilon else 0 * source
        terms = jnp.exp(scores - top[receivers])
        total = jax.ops.segment_sum(terms, receivers, 4) + epsilon
        shares = (terms / total[receivers])[..., None]
        out = jax.ops.segment_sum(shares * h[senders], receivers, 4)
        return jax.nn.elu(out.reshape(4, 8)) @ p["out"]

    return apply


ATTENTION = {"in": (3, 8), "source": (1, 2, 4), "target": (1, 2, 4), "out": (8, 2)}
case(
    "graph attention",
    graph_attention(1e-9),
    ATTENTION,
    (NODES, SENDERS, RECEIVERS),
    {"in": 2, "in#2": 4},
    factors="all",
)
case(
    "graph attention less its maximum",
    graph_attention(0.0),
    ATTENTION,
    (NODES, SENDERS, RECEIVERS),
    {"in": 4},
    [("source", "may leave a segment infinite that nothing is written to")],
    factors="all",
)


# Mixtures of experts: by weights, by places, and in turn.


def gated(h, up, gate, product):
    return jax.nn.gelu(product(h, up)) * product(h, gate)


def weighted(p, h, chosen, weights):
    gates = (jax.nn.one_hot(chosen, 3) * weights[..., None]).sum(1)
    product = functools.partial(jnp.einsum, "td,edh->teh")
    inner = gated(h, p["up"], p["gate"], product)
    return jnp.einsum("teh,ehd,te->td", inner, p["down"], gates)


def placed(p, h, chosen, weights):
    gates = (jax.nn.one_hot(chosen, 3) * weights[..., None]).sum(1)
    place = jnp.cumsum(gates > 0, 0) * (gates > 0) - 1
    places = jax.nn.one_hot(place, 4)
    product = functools.partial(jnp.einsum, "ecd,edh->ech")
    rows = jnp.einsum("tec,td->ecd", places, h)
    out = product(gated(rows, p["up"], p["gate"], product), p["down"])
    return jnp.einsum("tec,te,ecd->td", places, gates, out)


def ragged(p, h, chosen, weights):
    order = jnp.argsort(chosen[:, 0])
    sizes = jnp.bincount(chosen[:, 0], length=3)
    product = lambda rows, kernels: lax.ragged_dot(rows, kernels, sizes)  # noqa: E731
    out = product(gated(h[order], p["up"], p["gate"], product), p["down"])
    return jnp.zeros_like(h).at[order].set(out) * weights[:, :1]


def mixture(experts):
    def apply(p, x):
        h = (x @ p["in"]).reshape(10, 6)
        weights, chosen = lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
        weights = weights / weights.sum(-1, keepdims=True)
        return (h + experts(p, h, chosen, weights)) @ p["out"]

    return apply


MIXTURE = {
    **{"in": (3, 6), "router": (6, 3), "up": (3, 6, 8), "gate": (3, 6, 8)},
    **{"down": (3, 8, 6), "out": (6, 2)},
}
ROUTER = ("router", "top_k: orders positions along it")
for experts in (weighted, placed):
    sizes = {"in": 6, "up": 3, "up#2": 8}
    name = f"experts {experts.__name__}"
    case(name, mixture(experts), MIXTURE, (X,), sizes, [ROUTER])
case(
    "experts ragged",
    mixture(ragged),
    MIXTURE,
    (X,),
    {"in": 6, "up": 8},
    [ROUTER, ("up", "ragged_dot_general: counts positions along it")],
)


# Blocks that are computed again.


def again(policy):
    def block(p, h):
        normal = layer_norm(h, p["norm"])
        q, k, v = ((normal @ p[name]).reshape(2, 5, 2, 3) for name in "qkv")
        shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2)
        h = h + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(2, 5, 6) @ p["o"]
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"]

    def apply(p, x):
        h = x @ p["in"]
        for name in ("one", "two"):
            h = jax.checkpoint(block, policy=policy)(p[name], h)
        return h @ p["out"]

    return apply


BLOCK = {name: (6, 6) for name in "qkvo"}
BLOCK |= {"norm": (1, 1, 6), "up": (6, 8), "down": (8, 6)}
POLICIES = {"all of it": None, "but products": jax.checkpoint_policies.dots_saveable}
for kept, policy in POLICIES.items():
    sizes = {"q": 2, "q#2": 3, "v": 3, "up": 8}
    sizes = {f"{b}/{name}": n for b in ("one", "two") for name, n in sizes.items()}
    case(
        f"again {kept}",
        again(policy),
        {"in": (3, 6), "one": BLOCK, "two": BLOCK, "out": (6, 2)},
        (X,),
        {"in": 6} | sizes,
        factors="all",
    )


@pytest.mark.parametrize("name", CASES)
def test_what_can_go_is_found(name):
    apply, shapes, inputs, groups, stays, options = CASES[name]
    with jax.numpy_rank_promotion("allow"):
        trace = trace_channels(apply, draw(shapes), *inputs, **options)
    assert {n: size for n, (size, _) in members_of(trace).items()} == groups
    for path, reason in stays:
        assert reason in trace.explain(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][3]])
def test_what_goes_changes_nothing(name):
    apply, shapes, inputs, _, _, options = CASES[name]
    with jax.numpy_rank_promotion("allow"):
        assert_exact(apply, draw(shapes), *inputs, densities=(0.5,), **options)
