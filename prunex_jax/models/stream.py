"""Layers of networks that add to a stream of features: transformers and ConvNeXt.

Parameters are float32; `dtype` is the type of the activations. Norms and softmax are
computed in float32 whatever it is.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

# Standard deviation of initial weights, drawn from a normal distribution that is cut
# off at twice that.
_SPREAD = 0.02
Norm = Literal["layer", "rms"]
_EPSILON = 1e-6


class Projection(nnx.Module):
    """An affine map of the last axes: `kernel`, float32[*inputs, *outputs], and `bias`.

    Args:
      inputs: Sizes of the last axes of what is read.
      outputs: Sizes of the axes in their place.
      rngs: Where weights are drawn from.
      dtype: Of what comes out.
      draw: How; None is as `weights`.

    Example:
      >>> heads = Projection((8,), (2, 4), rngs=nnx.Rngs(0))
      >>> heads(jnp.ones((3, 5, 8))).shape
      (3, 5, 2, 4)
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        dtype: str = "float32",
        draw: nnx.Initializer | None = None,
    ):
        draw = draw or nnx.initializers.truncated_normal(_SPREAD)
        shape = *inputs, *outputs
        self.kernel = nnx.Param(draw(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.num_inputs, self.dtype = len(inputs), dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[..., *inputs] to dtype[..., *outputs]."""
        kernel = self.kernel[...].astype(self.dtype)
        axes = range(x.ndim - self.num_inputs, x.ndim), range(self.num_inputs)
        y = jax.lax.dot_general(x.astype(self.dtype), kernel, (axes, ((), ())))
        return y + like_last(self.bias[...].astype(self.dtype), y)


class LayerNorm(nnx.Module):
    """Takes mean and deviation from the last axis, then scales and shifts it.

    References:
      Ba et al., Layer normalization, 2016, arXiv:1607.06450.
    """

    def __init__(self, width: int, epsilon: float = _EPSILON):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises float[..., width]; the type stays."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        variance = jnp.mean(y * y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(variance + self.epsilon) * like_last(self.scale[...], y)
        return (y + like_last(self.bias[...], y)).astype(x.dtype)


class RmsNorm(nnx.Module):
    """Divides the last axis by its root mean square, and scales it.

    References:
      Zhang and Sennrich, Root mean square layer normalization, 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, epsilon: float = _EPSILON):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises float[..., width]; the type stays."""
        y = x.astype(jnp.float32)
        square = jnp.mean(y * y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(square + self.epsilon) * like_last(self.scale[...], y)
        return y.astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU: `x` times the share of a normal distribution that is below it.

    `jax.nn.gelu` has it too, and jax 0.12 cannot trace that inside of `shard_map`.
    It is computed in float32, and the type stays.

    References:
      Hendrycks and Gimpel, Gaussian error linear units, 2016, arXiv:1606.08415.
    Example:
      >>> [round(x, 4) for x in gelu(jnp.array([-1.0, 0.0, 2.0])).tolist()]
      [-0.1587, 0.0, 1.9545]
    """
    y = x.astype(jnp.float32)
    return (y * (0.5 + 0.5 * _erf(y * 2**-0.5))).astype(x.dtype)


@jax.custom_jvp
def _erf(x: jax.Array) -> jax.Array:
    return jax.lax.erf(x)


@_erf.defjvp
def _erf_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    return _erf(x), 2 * jnp.pi**-0.5 * jnp.exp(-x * x) * tangent


class Mlp(nnx.Module):
    """Two projections with the exact GELU between them."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs, dtype: str):
        self.up = Projection((width,), (hidden,), rngs=rngs, dtype=dtype)
        self.down = Projection((hidden,), (width,), rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[..., width] to dtype[..., width]."""
        return self.down(gelu(self.up(x)))


class Patches(Projection):
    """Projects squares that lie side by side.

    The kernel is float32[size, size, c_in, c_out]. Rows and columns that fill no square
    are left out, as by a convolution that has this kernel and its size as stride.

    Example:
      >>> Patches(4, 3, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 9, 8, 3))).shape
      (2, 2, 2, 8)
    """

    def __init__(
        self,
        size: int,
        c_in: int,
        c_out: int,
        *,
        rngs: nnx.Rngs,
        dtype: str = "float32",
    ):
        super().__init__((size, size, c_in), (c_out,), rngs=rngs, dtype=dtype)
        self.size = size

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c_in] to dtype[n, h // size, w // size, c_out]."""
        n, height, width, channels = x.shape
        size, rows, columns = self.size, height // self.size, width // self.size
        x = x[:, : rows * size, : columns * size]
        squares = x.reshape(n, rows, size, columns, size, channels)
        return super().__call__(squares.transpose(0, 1, 3, 2, 4, 5))


def make_norm(kind: Norm, width: int, epsilon: float = _EPSILON) -> LayerNorm | RmsNorm:
    """The norm of a name, with what it adds to variances or mean squares."""
    make = LayerNorm if kind == "layer" else RmsNorm
    return make(width, epsilon)


def drop_path(rate: float, ndim: int, rngs: nnx.Rngs) -> nnx.Dropout | None:
    """Stochastic depth: drops what a block adds, of each example as a whole.

    A rate of 0 gives None, which draws no numbers. `ndim` counts the axes of what the
    block adds, the examples first.

    References:
      Huang et al., Deep networks with stochastic depth, 2016, arXiv:1603.09382.
    """
    if rate == 0:
        return None
    return nnx.Dropout(rate, broadcast_dims=tuple(range(1, ndim)), rngs=rngs)


def dropped(x: jax.Array, layer: nnx.Dropout | None) -> jax.Array:
    """What a dropout leaves, or stochastic depth; all where there is none."""
    return x if layer is None else layer(x)


def through(
    blocks: Iterable[nnx.Module], x: jax.Array, recomputes: bool = False
) -> jax.Array:
    """What is behind blocks that follow each other.

    With `recomputes`, what lies inside of a block is computed again in the backward
    pass, for which only the stream in front of it is kept.
    """
    run = nnx.remat(_behind) if recomputes else _behind
    for block in blocks:
        x = run(block, x)
    return x


def _behind(block: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return block(x)


def drop_rates(rate: float, count: int) -> tuple[float, ...]:
    """Rates of blocks: from 0 to that of the last, in equal steps.

    Example:
      >>> drop_rates(0.5, 3)
      (0.0, 0.25, 0.5)
    """
    return tuple(rate * index / max(count - 1, 1) for index in range(count))


def weights(rngs: nnx.Rngs, *shape: int) -> nnx.Param[jax.Array]:
    """Draws initial weights, float32[*shape]."""
    return nnx.Param(
        nnx.initializers.truncated_normal(_SPREAD)(rngs.params(), shape, jnp.float32)
    )


def like_last(value: jax.Array, like: jax.Array) -> jax.Array:
    """Spreads an array over the last axes of another."""
    axes = tuple(range(like.ndim - value.ndim, like.ndim))
    return jax.lax.broadcast_in_dim(value, like.shape, axes)
