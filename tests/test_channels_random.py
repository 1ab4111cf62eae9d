"""Random networks of supported operations: masked always equals cut."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from channel_checks import DENSITIES, assert_exact, draw
from jax import lax

# More of them: PRUNEX_RANDOM_NETWORKS=1000 pytest tests/test_channels_random.py
NUM_NETWORKS = int(os.environ.get("PRUNEX_RANDOM_NETWORKS", "60"))
SIDE = 4
ACTIVATIONS = [
    jax.nn.relu,
    jax.nn.elu,
    jax.nn.softplus,
    jax.nn.sigmoid,
    jnp.tanh,
    jnp.cos,
    jnp.square,
    lambda x: jnp.where(x > 0.1, x, 0.5 - x),
    lambda x: jnp.clip(x, -1.0, 0.7),
    lambda x: x / (1.5 + jnp.abs(x)),
    lambda x: jax.checkpoint(jax.jit(jnp.sin))(x),
    lambda x: jnp.cumsum(x, axis=-1) / 4,
    lambda x: jnp.sort(x, axis=-1),
    lambda x: x - x.max(-1, keepdims=True),
]


class Drawer:
    """Draws the steps of a network; a step maps (params, values) to one more value.

    Widths are read off arrays, never remembered, so that cut parameters fit.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.shapes = {"stem": (3, 3, 2, self.width())}
        self.steps = [lambda p, values: conv(values[0], p["stem"])]
        self.widths = [2, self.shapes["stem"][-1]]

    def width(self):
        return int(self.rng.integers(2, 9))

    def choose(self, options):
        return options[self.rng.integers(len(options))]

    def add(self, step, width):
        self.steps.append(step)
        self.widths.append(width)

    def parameter(self, shape):
        # Now and then one that is there already: tied weights.
        alike = [name for name, other in self.shapes.items() if other == shape]
        if alike and self.rng.random() < 0.3:
            return self.choose(alike)
        name = f"p{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def value(self):
        return int(self.rng.integers(1, len(self.widths)))

    def convolution(self):
        i, width, side = self.value(), self.width(), self.choose([1, 3])
        name = self.parameter((side, side, self.widths[i], width))
        self.add(lambda p, v: conv(v[i], p[name]), width)

    def shortcut(self):
        i, j = self.value(), self.value()
        name = self.parameter((1, 1, self.widths[i], self.widths[j]))
        self.add(lambda p, v: conv(v[i], p[name]) + v[j], self.widths[j])

    def loop(self):
        i = self.value()
        name = self.parameter((1, 1, self.widths[i], self.widths[i]))
        self.add(lambda p, v: jnp.tanh(conv(v[i], p[name])) * v[i], self.widths[i])

    def activation(self):
        i, f = self.value(), self.choose(ACTIVATIONS)
        self.add(lambda p, v: f(v[i]), self.widths[i])

    def affine(self):
        i = self.value()
        scale, bias = (self.parameter((self.widths[i],)) for _ in range(2))
        self.add(
            lambda p, v: v[i] * p[scale][None, None, None] + p[bias][None, None, None],
            self.widths[i],
        )

    def concatenation(self):
        i, j = self.value(), self.value()
        self.add(
            lambda p, v: jnp.concatenate([v[i], v[j]], axis=3),
            self.widths[i] + self.widths[j],
        )

    def halves(self):
        i = self.value()
        if self.widths[i] % 2:
            return

        def step(p, v):
            left, right = jnp.split(v[i], 2, axis=3)
            return left * jax.nn.sigmoid(right)

        self.add(step, self.widths[i] // 2)

    def gate(self):
        i, j = self.value(), self.value()
        name = self.parameter((self.widths[j], self.widths[i]))

        def step(p, v):
            gate = jax.nn.sigmoid(v[j].mean((1, 2)) @ p[name])
            return v[i] * gate[:, None, None, :]

        self.add(step, self.widths[i])

    def rms_norm(self):
        i = self.value()
        divisor = self.widths[i]

        def step(p, v):
            size = jnp.sum(v[i] * v[i], axis=3, keepdims=True) / divisor
            return v[i] * lax.rsqrt(size + 0.1)

        self.add(step, self.widths[i])

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
            ]
        )
        self.add(lambda p, v: f(v[i]), self.widths[i])

    def padded_shortcut(self):
        i, j = self.value(), self.value()
        if self.widths[i] > self.widths[j]:
            i, j = j, i
        number = self.choose([0.0, 0.5])

        def step(p, v):
            missing = v[j].shape[3] - v[i].shape[3]
            around = ((0, 0), (0, 0), (0, 0), (0, missing))
            return v[j] - jnp.pad(v[i], around, constant_values=number)

        self.add(step, self.widths[j])

    def mirror(self):
        i = self.value()
        self.add(lambda p, v: v[i] + v[i][..., ::-1], self.widths[i])

    def build(self, num_steps):
        kinds = [
            *[self.convolution] * 3,
            *[self.activation] * 3,
            *[self.shortcut, self.affine, self.concatenation] * 2,
            self.loop,
            self.halves,
            self.gate,
            self.rms_norm,
            self.space,
            self.padded_shortcut,
            self.mirror,
        ]
        for _ in range(num_steps):
            self.choose(kinds)()
        last = len(self.widths) - 1
        rows = self.widths[last] * SIDE * SIDE
        dense = self.parameter((rows, 2))
        summed = self.value()

        def apply(p, x):
            values = [x]
            for step in self.steps:
                values.append(step(p, values))
            y = values[last].reshape(x.shape[0], -1) @ p[dense]
            if summed % 4 == 0:  # reads channels without weights
                y = y + values[summed].sum((1, 2, 3))[:, None]
            return y

        return apply, dict(self.shapes)


def conv(x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def random_network(seed):
    drawer = Drawer(seed)
    return drawer.build(num_steps=int(drawer.rng.integers(2, 10)))


IMAGES = draw({"x": (2, SIDE, SIDE, 2)}, seed=3)["x"]


@pytest.mark.parametrize("seed", range(NUM_NETWORKS))
def test_masked_equals_cut(seed):
    apply, shapes = random_network(seed)
    density = DENSITIES[seed % len(DENSITIES)]
    assert_exact(apply, draw(shapes, seed), IMAGES, densities=(density,), seed=seed)


def test_most_channels_of_random_networks_can_be_removed():
    from prunex_jax.channels import trace_channels

    shares = []
    for seed in range(NUM_NETWORKS):
        apply, shapes = random_network(seed)
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        shares.append(trace_channels(apply, params, IMAGES).prunable_share())
    assert np.mean(shares) > 0.5, "too much is frozen for the comparison to mean much"
