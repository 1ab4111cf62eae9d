"""Networks in Haiku, as that community writes them."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from .case import TINY, Case, images, tokens
from .frameworks import from_haiku


def vgg16(size: str) -> Case:
    plan = (64, 64, 0, 128, 128, 0, *(256,) * 3, 0, *(512,) * 3, 0, *(512,) * 3, 0)
    side, inner, classes = 224, 4096, 1000
    if size == TINY:
        plan, side, inner, classes = (8, 8, 0, 12, 12, 0, 16, 0), 16, 20, 4

    def forward(is_training: bool, x: jax.Array) -> jax.Array:
        for width in plan:
            if width:
                x = jax.nn.relu(hk.Conv2D(width, 3)(x))
            else:
                x = hk.MaxPool(2, 2, "VALID")(x)
        return hk.nets.MLP([inner, inner, classes])(hk.Flatten()(x))

    return from_haiku(forward, images(2, side, side, 3))


def densenet(size: str) -> Case:
    growth, plan, side, classes = 32, (6, 12, 24, 16), 224, 1000
    if size == TINY:
        growth, plan, side, classes = 4, (2, 2), 16, 4

    def forward(is_training: bool, x: jax.Array) -> jax.Array:
        def normed(x: jax.Array) -> jax.Array:
            return jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))

        x = hk.Conv2D(2 * growth, 3, stride=2, with_bias=False)(x)
        for i, count in enumerate(plan):
            for _ in range(count):
                y = hk.Conv2D(4 * growth, 1, with_bias=False)(normed(x))
                y = hk.Conv2D(growth, 3, with_bias=False)(normed(y))
                x = jnp.concatenate([x, y], axis=-1)
            if i < len(plan) - 1:
                x = hk.Conv2D(x.shape[-1] // 2, 1, with_bias=False)(normed(x))
                x = hk.AvgPool(2, 2, "VALID")(x)
        return hk.Linear(classes)(normed(x).mean((1, 2)))

    return from_haiku(forward, images(2, side, side, 3))


def unet(size: str) -> Case:
    widths = (6, 8, 12) if size == TINY else (64, 128, 256, 512, 1024)
    side = 16 if size == TINY else 256

    def forward(is_training: bool, x: jax.Array) -> jax.Array:
        def twice(x: jax.Array, width: int) -> jax.Array:
            for _ in range(2):
                x = hk.InstanceNorm(True, True)(hk.Conv2D(width, 3)(x))
                x = jax.nn.leaky_relu(x)
            return x

        skips = []
        for width in widths[:-1]:
            x = twice(x, width)
            skips.append(x)
            x = hk.MaxPool(2, 2, "SAME")(x)
        x = twice(x, widths[-1])
        for width in reversed(widths[:-1]):
            x = hk.Conv2DTranspose(width, 2, stride=2)(x)
            x = twice(jnp.concatenate([x, skips.pop()], axis=-1), width)
        return hk.Conv2D(2, 1)(x)

    return from_haiku(forward, images(2, side, side, 3))


def inception_v3_blocks(size: str) -> Case:
    """Factorised kernels, and a path of averages, concatenated."""
    width, classes, count, side = (64, 1000, 3, 224) if size != TINY else (6, 4, 2, 16)

    def forward(is_training: bool, x: jax.Array) -> jax.Array:
        def conv(x: jax.Array, width: int, kernel: Any, stride: int = 1) -> jax.Array:
            x = hk.Conv2D(width, kernel, stride, with_bias=False)(x)
            return jax.nn.relu(hk.BatchNorm(True, True, 0.99)(x, is_training))

        x = conv(x, width, 3, 2)
        for _ in range(count):
            a = conv(x, width, 1)
            b = conv(conv(conv(x, width // 2, 1), width, (1, 7)), width, (7, 1))
            c = conv(conv(x, width // 2, 1), width, 3)
            d = conv(hk.AvgPool((3, 3, 1), 1, "SAME")(x), width // 2, 1)
            x = jnp.concatenate([a, b, c, d], axis=-1)
        return hk.Linear(classes)(x.mean((1, 2)))

    return from_haiku(forward, images(2, side, side, 3))


def _transformer_block(heads: int, width: int, inner: int, x: jax.Array) -> jax.Array:
    init = hk.initializers.VarianceScaling(1.0)
    norm = lambda x: hk.LayerNorm(-1, True, True)(x)  # noqa: E731
    mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
    attention = hk.MultiHeadAttention(heads, width // heads, w_init=init)
    y = norm(x)
    x = x + attention(y, y, y, mask=mask)
    y = jax.nn.gelu(hk.Linear(inner)(norm(x)))
    return x + hk.Linear(width)(y)


def _gpt(size: str, is_stacked: bool) -> Case:
    vocabulary, width, heads, inner, depth, length = 50257, 768, 12, 3072, 12, 64
    if size == TINY:
        vocabulary, width, heads, inner, depth, length = 24, 16, 2, 20, 2, 7

    def forward(is_training: bool, ids: jax.Array) -> jax.Array:
        x = hk.Embed(vocabulary, width)(ids)
        init = hk.initializers.TruncatedNormal(0.02)
        x = x + hk.get_parameter("places", [length, width], init=init)
        if is_stacked:
            block = lambda x: _transformer_block(heads, width, inner, x)  # noqa: E731
            x = hk.experimental.layer_stack(depth)(block)(x)
        else:
            for _ in range(depth):
                x = _transformer_block(heads, width, inner, x)
        return hk.Linear(vocabulary)(hk.LayerNorm(-1, True, True)(x))

    return from_haiku(forward, tokens(2, length, vocabulary=vocabulary))


def gpt(size: str) -> Case:
    """Haiku's example of a transformer, around `hk.MultiHeadAttention`."""
    return _gpt(size, False)


def gpt_stacked(size: str) -> Case:
    """The same with `hk.experimental.layer_stack`."""
    return _gpt(size, True)


def lstm(size: str) -> Case:
    """`hk.deep_rnn_with_skip_connections` of two LSTMs, `hk.dynamic_unroll`."""
    vocabulary, width, inner, length = 10000, 650, 650, 35
    if size == TINY:
        vocabulary, width, inner, length = 20, 10, 12, 6

    def forward(is_training: bool, ids: jax.Array) -> jax.Array:
        x = hk.Embed(vocabulary, width)(ids)
        core = hk.deep_rnn_with_skip_connections([hk.LSTM(inner), hk.GRU(inner)])
        start = core.initial_state(ids.shape[0])
        y, _ = hk.dynamic_unroll(core, x, start, time_major=False)
        return hk.BatchApply(hk.Linear(vocabulary))(y)

    return from_haiku(forward, tokens(2, length, vocabulary=vocabulary))


def conv_lstm(size: str) -> Case:
    """A recurrent network whose state is an image with channels."""
    width, side, length = (64, 64, 10) if size != TINY else (8, 6, 3)

    def forward(is_training: bool, x: jax.Array) -> jax.Array:
        core = hk.Conv2DLSTM((side, side), width, 3)
        y, _ = hk.dynamic_unroll(
            core, x, core.initial_state(x.shape[0]), time_major=False
        )
        return hk.Conv2D(1, 1)(y[:, -1])

    return from_haiku(forward, images(2, length, side, side, 1))
