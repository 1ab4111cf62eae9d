"""Random networks of supported operations: masked always equals shrunk.

They run in double precision.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from prunex_jax.channels import trace_channels
from tests.helpers.channel_checks import DENSITIES, assert_exact, draw, primitives_of

# More of them: PRUNEX_RANDOM_NETWORKS=1000 pytest tests/channels/test_random.py
NUM_NETWORKS = int(os.environ.get("PRUNEX_RANDOM_NETWORKS", "20"))
FIRST_SEED = int(os.environ.get("PRUNEX_RANDOM_FIRST", "0"))
NUM_QUICK = 6  # the others are slow ones
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] if index >= NUM_QUICK else [])
    for index, seed in enumerate(range(FIRST_SEED, FIRST_SEED + NUM_NETWORKS))
]
SIDE = 4
EXACT_STEP = jax.custom_jvp(jnp.sin)
EXACT_STEP.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * ts[0] * jnp.cos(xs[0])))
ACTIVATIONS = [
    jax.nn.relu,
    jax.nn.elu,
    jax.nn.softplus,
    jax.nn.sigmoid,
    jax.nn.gelu,
    jax.nn.hard_swish,
    jnp.tanh,
    jnp.cos,
    lambda x: jnp.square(jnp.tanh(x)),
    lambda x: jnp.where(x > 0.1, x, 0.5 - x),
    lambda x: jnp.clip(x, -1.0, 0.7),
    lambda x: x / (1.5 + jnp.abs(x)),
    lambda x: jax.checkpoint(jax.jit(jnp.sin))(x),
    lambda x: EXACT_STEP(x),
    lambda x: jnp.cumsum(x, axis=-1) / 4,
    lambda x: jnp.cumsum(x, axis=1) / 4,
    lambda x: jnp.sort(x, axis=-1),
    lambda x: jnp.sort(x, axis=1),
    lambda x: x - x.max(-1, keepdims=True),
    lambda x: lax.cond(x.sum() > 0.1, jnp.sin, jnp.cos, x),  # norms sum up to 0
    lambda x: jax.vmap(lambda row: row * jnp.tanh(row.sum()))(x),
]


def wide(v):
    return v[None, None, None]


def conv(x, kernel, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def split_axis(x, sizes):
    return x.reshape(*x.shape[:3], *sizes)


def join_axes(x):
    return x.reshape(*x.shape[:3], -1)


class Drawer:
    """Draws the steps of a network; a step maps (params, values) to one more value.

    Values are images; `widths` are their channels.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.shapes = {"stem": (3, 3, 2, self.width())}
        self.steps = [lambda p, values: conv(values[0], p["stem"])]
        self.widths = [2, self.shapes["stem"][-1]]
        self.names = []

    def width(self):
        return int(self.choose([2, 3, 4, 5, 6, 8, 8, 12]))

    def choose(self, options):
        return options[self.rng.integers(len(options))]

    def add(self, step, width):
        self.steps.append(step)
        self.widths.append(width)

    def parameter(self, *shape):
        # Now and then one that is there already: tied weights.
        alike = [name for name, other in self.shapes.items() if other == shape]
        if alike and self.rng.random() < 0.3:
            return self.choose(alike)
        name = f"p{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def value(self, factor=1):
        """A value whose width is a multiple, if there is one; mostly a late one."""
        fit = [i for i in range(1, len(self.widths)) if self.widths[i] % factor == 0]
        if not fit:
            return None
        return fit[-1] if self.rng.random() < 0.4 else self.choose(fit)

    def divisor(self, width):
        return self.choose([g for g in range(1, width + 1) if width % g == 0])

    # Convolutions and products.

    def convolution(self):
        i, width, side = self.value(), self.width(), self.choose([1, 3])
        name = self.parameter(side, side, self.widths[i], width)
        self.add(lambda p, v: conv(v[i], p[name]), width)

    def convolution_in_groups(self):
        i = self.value()
        groups, times = self.divisor(self.widths[i]), self.choose([1, 1, 2, 3])
        width = groups * times
        name = self.parameter(3, 3, self.widths[i] // groups, width)
        self.add(lambda p, v: conv(v[i], p[name], groups), width)

    def depthwise(self):
        i, times = self.value(), self.choose([1, 1, 2])
        width = self.widths[i]
        name = self.parameter(3, 3, 1, width * times)
        self.add(lambda p, v: conv(v[i], p[name], width), width * times)

    def scaled_kernel(self):
        """Weights that are divided by their norms."""
        i, width = self.value(), self.width()
        name = self.parameter(self.widths[i], width)

        def step(p, v):
            kernel = p[name]
            size = jnp.square(kernel).sum(0, keepdims=True)
            return v[i] @ (kernel * lax.rsqrt(size + 0.1))

        self.add(step, width)

    def shortcut(self):
        i, j = self.value(), self.value()
        name = self.parameter(1, 1, self.widths[i], self.widths[j])
        self.add(lambda p, v: conv(v[i], p[name]) + v[j], self.widths[j])

    def gate(self):
        i, j = self.value(), self.value()
        name = self.parameter(self.widths[j], self.widths[i])

        def step(p, v):
            gate = jax.nn.sigmoid(v[j].mean((1, 2)) @ p[name])
            return v[i] * gate[:, None, None, :]

        self.add(step, self.widths[i])

    def experts(self):
        i, width = self.value(), self.width()
        name = self.parameter(3, self.widths[i], width)

        def step(p, v):
            each = jax.vmap(lambda kernel: jnp.tanh(v[i] @ kernel))(p[name])
            return each.sum(0)

        self.add(step, width)

    def outer(self):
        i, j = self.value(), self.value()
        width = self.widths[i] * self.widths[j]
        if width > 40:
            return False
        self.add(
            lambda p, v: join_axes(v[i][..., :, None] * jnp.tanh(v[j])[..., None, :]),
            width,
        )

    # One value.

    def activation(self):
        i, f = self.value(), self.choose(ACTIVATIONS)
        self.add(lambda p, v: f(v[i]), self.widths[i])

    def affine(self):
        i = self.value()
        scale, bias = (self.parameter(self.widths[i]) for _ in range(2))
        self.add(lambda p, v: v[i] * wide(p[scale]) + wide(p[bias]), self.widths[i])

    def constant(self):
        i = self.value()
        width = self.widths[i]
        numbers = self.rng.normal(size=width).astype(np.float32)
        f = self.choose(
            [
                lambda x: x * wide(jnp.asarray(numbers)),
                lambda x: x + wide(numbers),
                lambda x: x * lax.broadcasted_iota(jnp.float32, x.shape, 3) / width,
                lambda x: jnp.where(wide(numbers > 0), x, 0.3),
                lambda x: jnp.where(wide(jnp.arange(width) % 2 == 0), jnp.sin(x), x),
                lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
            ]
        )
        self.add(lambda p, v: f(v[i]), width)

    def looked_up(self):
        """Positions by number: a permutation, a choice, or some more than once."""
        i = self.value()
        width = self.widths[i]
        count = self.choose([width, self.width()])
        chosen = self.rng.permutation(width)
        if count != width:
            chosen = self.rng.integers(width, size=count)
        self.add(lambda p, v: v[i][..., jnp.asarray(chosen)], count)

    def part(self):
        i = self.value(2)
        if i is None or self.widths[i] < 4:
            return False
        start = int(self.rng.integers(0, 3))
        size = self.widths[i] - 2
        f = self.choose(
            [
                lambda x: x[..., start : start + size],
                lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=3),
                lambda x: jnp.roll(x, start, axis=3)[..., :size],
                lambda x: x[..., ::2],
            ]
        )
        shape = jax.eval_shape(f, jnp.zeros((1, 1, 1, self.widths[i]))).shape
        self.add(lambda p, v: f(v[i]), shape[-1])

    def space(self):
        i = self.value()
        f = self.choose(
            [
                lambda x: lax.reduce_window(
                    x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"
                ),
                lambda x: x.transpose(0, 2, 1, 3),
                lambda x: x[:, ::-1],
                lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))),
                lambda x: x.reshape(x.shape[0], -1, x.shape[3]).reshape(x.shape),
                lambda x: x.at[:, 0].set(jnp.sin(x[:, 1])),
                lambda x: lax.map(jnp.sin, x),
            ]
        )
        self.add(lambda p, v: f(v[i]), self.widths[i])

    # Channels apart and together.

    def concatenation(self):
        i, j = self.value(), self.value()
        self.add(
            lambda p, v: jnp.concatenate([v[i], v[j]], axis=3),
            self.widths[i] + self.widths[j],
        )

    def halves(self):
        i = self.value(2)
        if i is None:
            return False

        def step(p, v):
            left, right = jnp.split(v[i], 2, axis=3)
            return left * jax.nn.sigmoid(right)

        self.add(step, self.widths[i] // 2)

    def shuffle(self):
        i = self.value()
        width, groups = self.widths[i], self.divisor(self.widths[i])

        def step(p, v):
            parts = split_axis(v[i], (groups, width // groups))
            return join_axes(parts.swapaxes(3, 4))

        self.add(step, width)

    def heads(self):
        """An axis taken apart into two, of which something is done to either."""
        i = self.value()
        width = self.widths[i]
        count = self.divisor(width)
        size = width // count
        kind = self.choose(["first", "second", "both", "kernel", "sizes"])
        shape = {
            "first": (count, 1),
            "second": (1, size),
            "both": (count, size),
            "kernel": (size, size),
            "sizes": (count, count),
        }[kind]
        name = self.parameter(*shape)

        def step(p, v):
            parts = split_axis(v[i], (count, size))
            if kind == "kernel":
                parts = jnp.tanh(parts @ p[name])
            elif kind == "sizes":
                sizes = jnp.square(parts).mean(-1) @ p[name]
                parts = parts * jax.nn.sigmoid(sizes)[..., None]
            else:
                parts = parts * wide(p[name])
            return join_axes(parts)

        self.add(step, width)

    def padded_shortcut(self):
        i, j = self.value(), self.value()
        if self.widths[i] > self.widths[j]:
            i, j = j, i
        number, missing = self.choose([0.0, 0.5]), self.widths[j] - self.widths[i]
        low = int(self.rng.integers(missing + 1))

        def step(p, v):
            around = ((0, 0), (0, 0), (0, 0), (low, missing - low))
            return v[j] - jnp.pad(v[i], around, constant_values=number)

        self.add(step, self.widths[j])

    def padding(self):
        i, number = self.value(), self.choose([0.0, 0.5])
        more = int(self.rng.integers(1, 4))

        def step(p, v):
            around = ((0, 0), (0, 0), (0, 0), (more, 0))
            return jnp.pad(v[i], around, constant_values=number)

        self.add(step, self.widths[i] + more)

    def mirror(self):
        i = self.value()
        self.add(lambda p, v: v[i] + v[i][..., ::-1], self.widths[i])

    # Norms.

    def rms_norm(self):
        i = self.value()

        def step(p, v):
            size = jnp.square(v[i]).mean(3, keepdims=True)
            return v[i] * lax.rsqrt(size + 0.1)

        self.add(step, self.widths[i])

    def group_norm(self):
        """With one group, it is a layer norm without weights."""
        i = self.value()
        width, groups = self.widths[i], self.divisor(self.widths[i])

        def step(p, v):
            parts = split_axis(v[i], (groups, width // groups))
            parts = parts - parts.mean((1, 2, 4), keepdims=True)
            var = jnp.square(parts).mean((1, 2, 4), keepdims=True)
            return join_axes(parts * lax.rsqrt(var + 0.1))

        self.add(step, width)

    def layer_norm(self):
        i = self.value()
        scale, bias = (self.parameter(self.widths[i]) for _ in range(2))

        def step(p, v):
            x = jax.nn.standardize(v[i], axis=-1, epsilon=0.1)
            return x * wide(p[scale]) + wide(p[bias])

        self.add(step, self.widths[i])

    def standardised_kernel(self):
        i, width = self.value(), self.width()
        name = self.parameter(3, 3, self.widths[i], width)

        def step(p, v):
            kernel = jax.nn.standardize(p[name], axis=(0, 1, 2), epsilon=0.1)
            return conv(v[i], kernel)

        self.add(step, width)

    def over_channels(self):
        """Channels are compared with all others, or with what all of them come to."""
        i = self.value()
        f = self.choose(
            [
                lambda x: jax.nn.softmax(x, -1),
                lambda x: jax.nn.log_softmax(x, -1),
                lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
                lambda x: x - x.min(-1, keepdims=True),
                lambda x: x / (1 + jnp.abs(x - x.mean(-1, keepdims=True)).max()),
                lambda x: x * jnp.cos(x).prod(-1, keepdims=True),
                lambda x: x - jnp.einsum("nhwc,nhwc->nhw", jnp.cos(x), x)[..., None],
            ]
        )
        self.add(lambda p, v: f(v[i]), self.widths[i])

    def batch_norm(self):
        i = self.value()

        def step(p, v):
            x = v[i] - v[i].mean((0, 1, 2), keepdims=True)
            var = jnp.square(x).mean((0, 1, 2), keepdims=True)
            return x * lax.rsqrt(var + 0.1)

        self.add(step, self.widths[i])

    # Loops and attention.

    def loop(self):
        i = self.value()
        name = self.parameter(1, 1, self.widths[i], self.widths[i])
        self.add(lambda p, v: jnp.tanh(conv(v[i], p[name])) * v[i], self.widths[i])

    def scanned_layers(self):
        i = self.value()
        width, hidden = self.widths[i], self.width()
        up, down = self.parameter(3, width, hidden), self.parameter(3, hidden, width)

        def step(p, v):
            layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)  # noqa: E731
            return lax.scan(layer, v[i], (p[up], p[down]))[0]

        self.add(step, width)

    def recurrence(self):
        i, width = self.value(), self.width()
        rows, state = (
            self.parameter(self.widths[i], width),
            self.parameter(width, width),
        )
        is_reversed = bool(self.rng.integers(2))

        def step(p, v):
            def turn(h, row):
                h = jnp.tanh(row @ p[rows] + h @ p[state])
                return h, h

            start = jnp.zeros((*v[i].shape[:1], SIDE, width))
            _, out = lax.scan(turn, start, v[i].swapaxes(0, 1), reverse=is_reversed)
            return out.swapaxes(0, 1)

        self.add(step, width)

    def attention(self):
        i = self.value()
        width = self.widths[i]
        heads, shared = self.choose([(1, 1), (2, 2), (2, 1), (4, 2)])
        size, value_size = self.choose([2, 3]), self.choose([2, 3])
        q = self.parameter(width, heads * size)
        k = self.parameter(width, shared * size)
        u = self.parameter(width, shared * value_size)
        out = self.parameter(heads * value_size, width)

        def step(p, v):
            x = v[i].reshape(v[i].shape[0], -1, width)
            n, s, _ = x.shape
            query = (x @ p[q]).reshape(n, s, heads, size)
            key = (x @ p[k]).reshape(n, s, shared, size)
            value = (x @ p[u]).reshape(n, s, shared, value_size)
            key, value = (jnp.repeat(y, heads // shared, axis=2) for y in (key, value))
            scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / size
            mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value)
            return v[i] + (mixed.reshape(n, s, -1) @ p[out]).reshape(v[i].shape)

        self.add(step, width)

    def build(self, num_steps):
        kinds = [
            *[self.convolution] * 3,
            *[self.activation] * 4,
            *[self.shortcut, self.affine, self.concatenation] * 2,
            *[self.heads, self.constant, self.looked_up] * 2,
            self.attention,
            self.batch_norm,
            self.convolution_in_groups,
            self.depthwise,
            self.experts,
            self.gate,
            self.group_norm,
            self.halves,
            self.layer_norm,
            self.loop,
            self.mirror,
            self.outer,
            self.over_channels,
            self.padded_shortcut,
            self.padding,
            self.part,
            self.recurrence,
            self.rms_norm,
            self.scaled_kernel,
            self.scanned_layers,
            self.shuffle,
            self.space,
            self.standardised_kernel,
        ]
        for _ in range(num_steps):
            kind = self.choose(kinds)
            if kind() is not False:
                self.names.append(kind.__name__)
        last = len(self.widths) - 1
        width = self.widths[last]
        is_flat = width <= 16 and bool(self.rng.integers(2))
        dense = self.parameter(width * SIDE * SIDE if is_flat else width, 2)
        summed = self.value()

        def apply(p, x):
            values = [x]
            for step in self.steps:
                values.append(step(p, values))
            y = values[last]
            y = y.reshape(x.shape[0], -1) if is_flat else y.mean((1, 2))
            y = y @ p[dense]
            if summed % 4 == 0:  # reads channels without weights
                y = y + values[summed].mean((1, 2, 3))[:, None]
            return y

        return apply, dict(self.shapes), self.names


def random_network(seed):
    drawer = Drawer(seed)
    return drawer.build(num_steps=int(drawer.rng.integers(2, 10)))


IMAGES = draw({"x": (2, SIDE, SIDE, 2)}, seed=3)["x"]


def doubled(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_masked_equals_shrunk(seed):
    apply, shapes, names = random_network(seed)
    settings = {"densities": (DENSITIES[seed % len(DENSITIES)],), "seed": seed}
    try:
        # Some are so ill-conditioned that float32 does not tell right from wrong.
        with jax.enable_x64(True):
            trees = doubled((draw(shapes, seed), IMAGES))
            assert_exact(apply, *trees, tolerances=(1e-10, 1e-8), **settings)
    except Exception as error:
        error.add_note(f"network {seed}: {', '.join(names)}")
        raise


@pytest.mark.slow
def test_random_networks_are_various_and_most_of_their_channels_can_be_removed():
    shares, primitives = [], set()
    for seed in range(60):
        apply, shapes, _ = random_network(seed)
        params = draw(shapes)
        shares.append(trace_channels(apply, params, IMAGES).prunable_share())
        primitives |= primitives_of(jax.make_jaxpr(apply)(params, IMAGES))
    assert np.mean(shares) > 0.5, "too much is frozen for the comparison to mean much"
    assert {"scan", "gather", "sort", "custom_jvp_call"} <= primitives
