"""Layers with channel counts passed in, and the policy of batch norm on a mesh.

Everything is NHWC, and traces to ordinary primitives in evaluation. Parameters and
statistics are float32; `Form.dtype` is the type of the activations. Whether layers
train is told by `train` and `eval` of NNX modules, as flax's own layers are told.

Pooling is flax's. Its layers compute something else: `nnx.Conv` has no kernel gradient
in chunks, and `nnx.BatchNorm` does not fold statistics, scale and bias into one
multiplication and one addition.

Batch norm policy. Scale and bias are ordinary parameters: they are exchanged, pruned
and shrunk like kernels. Batch statistics are taken over the images of one device, or,
with `axis_name`, over the images of all devices along that mesh axis. Running
statistics are an exponential moving average that every device keeps of its own batches
and that never crosses a link in training; they are averaged over the mesh when the
network is evaluated. A moving average is linear, so averaging late gives what averaging
in every step would have given. Variances are averaged as mean squares, so that what
devices see may differ; see `base.to_moments`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prunex_jax.mesh import varying
from prunex_jax.models.base import Model
from prunex_jax.models.own import nnx_model
from prunex_jax.models.stream import Projection, like_last

Convolution = Literal["direct", "chunked"]

# Share of the old running statistics that one training step keeps.
STATISTICS_DECAY = 0.9
_EPSILON = 1e-5
# Limits of chunked kernel gradients: activations per chunk, which should stay in a
# core's cache, and chunks per layer, which the compiler lays out one by one.
_CHUNK_BYTES = 2**20
_MAX_CHUNKS = 8
_LAYOUT = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Form:
    """How layers compute what they do."""

    dtype: str = "float32"  # Type of activations, `float32` or `bfloat16`.
    convolution: Convolution = "direct"  # `direct` or `chunked`, see `Conv`.


def image_model(
    name: str,
    make: Callable[[Form, nnx.Rngs], nnx.Module],
    form: Form,
    image_shape: tuple[int, int, int],
) -> Model:
    """Makes a model of a module of these layers, which reads images."""

    def make_in(dtype: str, rngs: nnx.Rngs) -> nnx.Module:
        return make(dataclasses.replace(form, dtype=dtype), rngs)

    return nnx_model(
        name,
        make_in,
        form.dtype,
        jax.ShapeDtypeStruct((1, *image_shape), jnp.float32),
        statistics_decay=STATISTICS_DECAY,
        is_uniform=True,
    )


class Conv(nnx.Module):
    """Convolution with odd square kernels, padded so that stride 1 keeps the size.

    Kernels start from a normal distribution with variance 2 / (kh * kw * c_out), which
    keeps the size of gradients through ReLUs (He initialisation, fan out).

    `chunked` computes the gradient of the kernel, in training, as a sum over chunks of
    the batch where activations exceed 1 MiB. It is the same gradient up to rounding.
    XLA on CPU computes it in one thread from working sets beyond the cache; in chunks
    it takes a third to all of the time, least with large images and few channels. On
    GPUs `direct` leaves the choice to cuDNN.

    References:
      He et al., Delving Deep into Rectifiers, 2015, arXiv:1502.01852.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        size: int,
        form: Form,
        *,
        rngs: nnx.Rngs,
        stride: int = 1,
        has_bias: bool = False,
    ):
        draw = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.kernel = nnx.Param(draw(rngs.params(), (size, size, c_in, c_out)))
        self.bias = nnx.Param(jnp.zeros(c_out)) if has_bias else None
        self.stride, self.form = stride, form
        self.deterministic = False  # In evaluation, as `eval` of NNX says.

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c_in] to dtype[n, h', w', c_out]."""
        dtype = self.form.dtype
        kernel = self.kernel[...].astype(dtype)
        x = x.astype(dtype)
        is_chunked = self.form.convolution == "chunked" and not self.deterministic
        if is_chunked and kernel.shape[0] > 1:
            y = _chunked_conv(*_alike(x, kernel), self.stride)
        else:
            y = convolved(x, kernel, self.stride)
        if self.bias is not None:
            y = y + like_last(self.bias[...].astype(dtype), y)
        return y


class BatchNorm(nnx.Module):
    """Normalises channels, then scales and shifts them.

    The scale starts at one everywhere, also at the end of residual branches, where
    zero is a common choice: with zero scales all channels of such a branch would score
    alike and their kernels would receive no gradient, so that early pruning would
    choose channels by chance.

    Statistics are taken in one pass over the data, in float32, and folded with scale
    and bias into one multiplication and one addition.

    Attributes, as of `nnx.BatchNorm`:
      use_running_average: Whether it normalises by running statistics, in evaluation,
        and not by those of the batch.
      axis_name: Mesh axis whose devices share batch statistics, or None.
    """

    def __init__(self, channels: int, form: Form):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.mean = nnx.BatchStat(jnp.zeros(channels))
        self.var = nnx.BatchStat(jnp.ones(channels))
        self.dtype = form.dtype
        self.use_running_average = False
        self.axis_name: str | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c] to dtype[n, h, w, c].

        Collectives:
          In training with `axis_name`: one mean over it of float32[2, c].
        """
        x = x.astype(jnp.float32)
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            mean, var = moments(x, (0, 1, 2), self.axis_name)
            self.mean[...] = _running(self.mean[...], mean)
            self.var[...] = _running(self.var[...], var)
        y = _normalised(x, mean, var, self.scale[...], self.bias[...])
        return y.astype(self.dtype)


def dense(
    c_in: int, c_out: int, *, gain: float, rngs: nnx.Rngs, dtype: str = "float32"
) -> Projection:
    """An affine map of the last axis.

    Its kernel starts from a normal distribution with variance `gain` / c_in: 2 in front
    of a ReLU, 1/3 for logits, which then start small.
    """
    draw = nnx.initializers.variance_scaling(gain, "fan_in", "normal")
    return Projection((c_in,), (c_out,), rngs=rngs, dtype=dtype, draw=draw)


@functools.partial(jax.jit, inline=True)
def relu(x: jax.Array) -> jax.Array:
    """`jax.nn.relu`, traced once per shape and not once per call."""
    return jax.nn.relu(x)


def mean_over_space(x: jax.Array) -> jax.Array:
    """Averages float[n, h, w, c] over height and width, to float32[n, c]."""
    return x.astype(jnp.float32).mean((1, 2))


def convolved(
    x: jax.Array, kernel: jax.Array, stride: int, groups: int = 1
) -> jax.Array:
    """A convolution with an odd square kernel that keeps the size at stride 1."""
    side = kernel.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((side, side), (side, side)),
        dimension_numbers=_LAYOUT,
        feature_group_count=groups,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chunked_conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return convolved(x, kernel, stride)


def _chunked_forward(
    x: jax.Array, kernel: jax.Array, stride: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolved(x, kernel, stride), (x, kernel)


def _chunked_backward(
    stride: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    (to_x,) = jax.vjp(lambda x: convolved(x, kernel, stride), x)[1](gradient)
    chunk_size = -(-x.shape[0] // _num_chunks(x, gradient))
    pieces = []
    for start in range(0, x.shape[0], chunk_size):
        part, part_gradient = (a[start : start + chunk_size] for a in (x, gradient))
        pull = jax.vjp(lambda k, part=part: convolved(part, k, stride), kernel)[1]
        pieces.append(pull(part_gradient)[0])
    to_kernel = functools.reduce(jnp.add, pieces)
    return to_x, to_kernel


def _num_chunks(x: jax.Array, gradient: jax.Array) -> int:
    largest = max(x.size, gradient.size) * x.dtype.itemsize
    return max(1, min(-(-largest // _CHUNK_BYTES), _MAX_CHUNKS, x.shape[0]))


_chunked_conv.defvjp(_chunked_forward, _chunked_backward)


def _alike(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Marks both as varying over the mesh axes that either varies over.

    Where the kernel is the same on all devices, its gradient contains a sum over the
    mesh. Casting it outside of the custom derivative sums once, and not per chunk.
    """
    axes = [varying.axes_of(jax.typeof(a)) for a in (x, kernel)]
    missing = [tuple(sorted((axes[0] | axes[1]) - own)) for own in axes]
    return varying.cast(x, missing[0]), varying.cast(kernel, missing[1])


def moments(
    x: jax.Array, axes: tuple[int, ...], axis_name: str | None
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over some axes, and over a mesh axis too if one is named.

    Collectives:
      With `axis_name`: one mean over it of float32[2, *what is left].
    """
    mean, mean_square = x.mean(axes), (x * x).mean(axes)
    if axis_name is not None:
        # Equal batches on every device: the mean of means is the mean.
        mean, mean_square = lax.pmean(jnp.stack([mean, mean_square]), axis_name)
    return mean, jnp.maximum(mean_square - mean * mean, 0.0)


# Traced once per shape and not once per layer; the program is the same.
@functools.partial(jax.jit, inline=True)
def _normalised(
    x: jax.Array, mean: jax.Array, var: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    factor = scale * lax.rsqrt(var + _EPSILON)
    return x * like_last(factor, x) + like_last(bias - mean * factor, x)


def _running(old: jax.Array, new: jax.Array) -> jax.Array:
    return STATISTICS_DECAY * old + (1.0 - STATISTICS_DECAY) * new
