"""VGG networks with batch norm, and with every width explicit.

Plain stacks of 3x3 convolutions between maxima, the flattened last map, and one or
three dense layers.
"""

import dataclasses

import jax
from flax import nnx

from prunex_jax.models.base import Model
from prunex_jax.models.layers import BatchNorm, Conv, Form, dense, image_model, relu
from prunex_jax.models.resnet import Stem, scaled

_STAGE_WIDTHS = (64, 128, 256, 512, 512)


@dataclasses.dataclass(frozen=True)
class VggSpec:
    """Widths of a VGG network.

    Attributes:
      stages: Widths of the 3x3 convolutions of each stage; a stage ends by taking 2x2
        maxima.
      hidden: Widths of the dense layers between the flattened map and the classifier.
    """

    stages: tuple[tuple[int, ...], ...]
    hidden: tuple[int, ...]

    @property
    def smallest_side(self) -> int:
        """Height and width that images must at least have: every stage halves them."""
        return 2 ** len(self.stages)


def make_vgg_spec(
    head: Stem, *, stage_convs: tuple[int, ...], scale: float = 1.0
) -> VggSpec:
    """Writes down the widths of a VGG network.

    Args:
      head: `cifar` for one dense layer, `imagenet` for three with two of width 4096.
      stage_convs: Number of convolutions in each of the five stages.
      scale: Multiplies every width; see `resnet.scaled`.
    Example:
      >>> make_vgg_spec('cifar', stage_convs=(1, 1, 1, 1, 2), scale=0.125)
      VggSpec(stages=((8,), (16,), (32,), (64,), (64, 64)), hidden=())
    """
    stages = tuple(
        (scaled(width, scale),) * count
        for width, count in zip(_STAGE_WIDTHS, stage_convs, strict=True)
    )
    return VggSpec(stages, (scaled(4096, scale),) * (2 if head == "imagenet" else 0))


def make_vgg(
    name: str,
    spec: VggSpec,
    form: Form,
    image_shape: tuple[int, int, int],
    num_classes: int,
) -> Model:
    """Builds the network of a specification; arguments as of `resnet.make_resnet`.

    Example:
      >>> model = make_vgg('tiny', VggSpec(((8,),), ()), Form(), (4, 4, 1), 10)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['classifier']['kernel'].shape
      (32, 10)
    """

    def make(form: Form, rngs: nnx.Rngs) -> nnx.Module:
        return Vgg(spec, form, image_shape, num_classes, rngs)

    return image_model(name, make, form, image_shape)


class _Layer(nnx.Module):
    """A 3x3 convolution with batch norm and ReLU."""

    def __init__(self, c_in: int, c_out: int, form: Form, rngs: nnx.Rngs):
        # Batch norm cancels the bias; it is there so that weights can be exchanged
        # with other implementations, which have it.
        self.conv = Conv(c_in, c_out, 3, form, has_bias=True, rngs=rngs)
        self.norm = BatchNorm(c_out, form)

    def __call__(self, x: jax.Array) -> jax.Array:
        return relu(self.norm(self.conv(x)))


class Vgg(nnx.Module):
    """Convolutions and maxima, a flattened map, and dense layers.

    References:
      Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image
      Recognition, 2014, arXiv:1409.1556.
    Differs from:
      The paper: batch norm behind every convolution, and no dropout, so that training
      draws no random numbers inside the network.
    """

    def __init__(
        self,
        spec: VggSpec,
        form: Form,
        image_shape: tuple[int, int, int],
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        widths = [width for stage in spec.stages for width in stage]
        self.ends = tuple(
            is_last
            for stage in spec.stages
            for is_last in (*(False,) * (len(stage) - 1), True)
        )
        self.features = nnx.List(
            [
                _Layer(c_in, c_out, form, rngs)
                for c_in, c_out in zip((channels, *widths), widths, strict=False)
            ]
        )
        side = spec.smallest_side
        flat = (height // side) * (width // side) * widths[-1]
        self.hidden = nnx.List(
            [
                dense(c_in, c_out, gain=2.0, rngs=rngs, dtype=form.dtype)
                for c_in, c_out in zip((flat, *spec.hidden), spec.hidden, strict=False)
            ]
        )
        last = spec.hidden[-1] if spec.hidden else flat
        self.classifier = dense(last, num_classes, gain=1 / 3, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps float[n, h, w, c_in] to logits, float32[n, num_classes]."""
        x = images
        for layer, ends in zip(self.features, self.ends, strict=True):
            x = layer(x)
            if ends:
                x = nnx.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for hidden in self.hidden:
            x = relu(hidden(x))
        return self.classifier(x)
