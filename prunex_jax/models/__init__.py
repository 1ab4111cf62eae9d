"""Networks by name: the table of models, and the functions that build them.

In: the settings `model.*` and the shape of an image, or the length of a text. Out: a
`Model`, pure functions over plain trees; `base` has it, and `own` makes one of what
users bring and of ours alike, which are NNX modules. For images, `resnet` and `vgg` are
made of the parts in `layers`, `vit` and `convnext` of those in `stream`; for text `gpt`
and `bert` of those in `transformer`. `generation` writes text; `weights` reads trained
networks of others. Models know nothing of channels, methods or meshes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import check_defaults, check_settings
from prunex_jax.models.base import Functions, Model, from_moments, is_own, to_moments
from prunex_jax.models.convnext import make_convnext, make_convnext_spec
from prunex_jax.models.generation import generate
from prunex_jax.models.language import MASKED_TOKEN, NEXT_TOKEN, make_language_model
from prunex_jax.models.layers import Convolution, Form
from prunex_jax.models.own import functions_of, own_model, split_variables
from prunex_jax.models.resnet import (
    BlockSpec,
    ResNetSpec,
    Stem,
    make_resnet,
    make_resnet_spec,
)
from prunex_jax.models.settings import ModelConfig
from prunex_jax.models.vgg import VggSpec, make_vgg, make_vgg_spec
from prunex_jax.models.vit import VITS, make_vit

__all__ = [
    "MASKED_TOKEN",
    "MODELS",
    "NEXT_TOKEN",
    "BlockSpec",
    "Form",
    "Functions",
    "Model",
    "ResNetSpec",
    "VggSpec",
    "as_on_gpus",
    "check_norm_scope",
    "check_sections",
    "from_moments",
    "functions_of",
    "generate",
    "is_own",
    "make_language_model",
    "make_model",
    "make_resnet",
    "make_vgg",
    "own_model",
    "split_variables",
    "to_moments",
]

# Images up to this side get the small stem when the stem is chosen by size.
_LARGEST_SMALL_SIDE = 64

_cifar = functools.partial(make_resnet_spec, stage_widths=(16, 32, 64))
_basic = functools.partial(make_resnet_spec, stage_widths=(64, 128, 256, 512))
_bottleneck = functools.partial(_basic, expansion=4)

# Builders of specifications, called with the stem and `scale`.
MODELS: dict[str, Callable[..., ResNetSpec | VggSpec]] = {
    "resnet20": functools.partial(_cifar, stage_blocks=(3, 3, 3)),
    "resnet32": functools.partial(_cifar, stage_blocks=(5, 5, 5)),
    "resnet56": functools.partial(_cifar, stage_blocks=(9, 9, 9)),
    "resnet110": functools.partial(_cifar, stage_blocks=(18, 18, 18)),
    "resnet18": functools.partial(_basic, stage_blocks=(2, 2, 2, 2)),
    "resnet34": functools.partial(_basic, stage_blocks=(3, 4, 6, 3)),
    "resnet50": functools.partial(_bottleneck, stage_blocks=(3, 4, 6, 3)),
    "resnet101": functools.partial(_bottleneck, stage_blocks=(3, 4, 23, 3)),
    "resnet152": functools.partial(_bottleneck, stage_blocks=(3, 8, 36, 3)),
    "wide_resnet50_2": functools.partial(
        _bottleneck, stage_blocks=(3, 4, 6, 3), inner_factor=2
    ),
    "vgg16": functools.partial(make_vgg_spec, stage_convs=(2, 2, 3, 3, 3)),
    "vgg19": functools.partial(make_vgg_spec, stage_convs=(2, 2, 4, 4, 4)),
}
CONVNEXT = "convnext_t"
# Sections of settings, and the networks that heed them.
_SECTIONS = {
    "gpt": NEXT_TOKEN,
    "bert": MASKED_TOKEN,
    "vit": tuple(VITS),
    "convnext": (CONVNEXT,),
}


def make_model(
    config: ModelConfig, image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    """Builds the network that the settings name.

    Asks jax for its platform when `config.convolution` is `auto`, so devices must be
    set up before.

    Args:
      config: Name, stem, width factor, activation type. `width` multiplies every width
        but the number of classes; results are rounded and at least one.
      image_shape: Height, width and channels of one image.
      num_classes: Number of logits.
    Returns:
      The model; no arrays are made.
    Raises:
      UserError: A setting is unknown or out of range, or the network cannot take
        images of this size.
    Example:
      >>> model = make_model(ModelConfig(name='resnet18', width=0.5), (32, 32, 3), 10)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> params['stem']['conv']['kernel'].shape
      (3, 3, 3, 32)
    """
    names = (*MODELS, *VITS, CONVNEXT)
    if config.name not in names:
        raise UserError(
            f"config.model.name={config.name!r} is not known"
            f"{suggest(config.name, names)}; choose one of {', '.join(names)}, or "
            "write package.module:object for a network of your own"
        )
    check_settings(config, "config.model")
    if len(image_shape) != 3 or min(*image_shape, num_classes) < 1:
        raise UserError(
            f"image_shape={image_shape} and num_classes={num_classes} must be "
            "(height, width, channels) and a count, all positive"
        )
    _check_has_effect(config)
    model = _model_of(config, image_shape, num_classes)
    check_norm_scope(config, model, config.name)
    return model


def _model_of(
    config: ModelConfig, image_shape: tuple[int, int, int], num_classes: int
) -> Model:
    name, dtype = config.name, config.compute_dtype
    if name in VITS:
        return make_vit(config, image_shape, num_classes)
    stem = _stem(config.stem, image_shape)
    convolution = _convolution(config.convolution)
    if name == CONVNEXT:
        convnext = make_convnext_spec(config, stem, convolution)
        _check_side(name, convnext.smallest_side, image_shape)
        return make_convnext(name, convnext, dtype, image_shape, num_classes)
    spec, form = MODELS[name](stem, scale=config.width), Form(dtype, convolution)
    if isinstance(spec, ResNetSpec):
        return make_resnet(name, spec, form, image_shape, num_classes)
    _check_side(name, spec.smallest_side, image_shape)
    return make_vgg(name, spec, form, image_shape, num_classes)


def check_norm_scope(config: ModelConfig, model: Model, what: str) -> None:
    """Refuses statistics of batches over a host of a network that has none of batches.

    Raises:
      UserError: `norm_scope` is set, and training does nothing over a mesh axis.
    Example:
      >>> model = own_model((lambda key: {}, lambda params, x: x), jax.numpy.ones(1))
      >>> check_norm_scope(ModelConfig(norm_scope='host'), model, 'this network')
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: config.model.norm_scope='host' has no effect\
 on this network; leave it at 'device'
    """
    if config.norm_scope != "device" and not _reads_axis(model):
        check_defaults("model", config, ("norm_scope",), what)


def _reads_axis(model: Model) -> bool:
    key = jax.random.key(0) if model.is_random else None
    train = functools.partial(model.apply_train, axis_name="nowhere", key=key)
    arrays = jax.eval_shape(model.init, jax.random.key(0))
    try:
        jax.eval_shape(train, *arrays, model.example(2))
    except NameError:  # jax: there is no axis of this name.
        return True
    return False


def as_on_gpus(config: ModelConfig) -> ModelConfig:
    """The settings whose network is, here, the one that GPUs would get.

    Example:
      >>> as_on_gpus(ModelConfig(name='resnet20')).convolution
      'direct'
    """
    if config.convolution == "auto" and config.name in (*MODELS, CONVNEXT):
        return dataclasses.replace(config, convolution="direct")
    return config


def check_sections(config: ModelConfig) -> None:
    """Refuses settings of another network than the one that is named.

    Raises:
      UserError: One is not at its default.
    Example:
      >>> check_sections(ModelConfig(name='gpt'))
    """
    others = [part for part, names in _SECTIONS.items() if config.name not in names]
    check_defaults("model", config, others, config.name)


def _check_has_effect(config: ModelConfig) -> None:
    """Refuses settings that are of other networks."""
    check_sections(config)
    others = {"recompute": tuple(MODELS), "stem": VITS, "convolution": VITS}
    none = [part for part, names in others.items() if config.name in names]
    check_defaults("model", config, none, config.name)


def _check_side(
    name: str, smallest_side: int, image_shape: tuple[int, int, int]
) -> None:
    if min(image_shape[:2]) < smallest_side:
        raise UserError(
            f"config.model.name={name!r} takes images of at least "
            f"{smallest_side}x{smallest_side} and these have "
            f"{image_shape[0]}x{image_shape[1]}; set config.data.image_size="
            f"{smallest_side}, or choose a resnet"
        )


def _stem(stem: str, image_shape: tuple[int, int, int]) -> Stem:
    if stem == "auto":
        stem = "cifar" if max(image_shape[:2]) <= _LARGEST_SMALL_SIDE else "imagenet"
    return cast(Stem, stem)


def _convolution(convolution: str) -> Convolution:
    if convolution == "auto":
        convolution = "chunked" if jax.default_backend() == "cpu" else "direct"
    return cast(Convolution, convolution)
