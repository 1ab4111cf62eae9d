"""Equinox networks of other packages: jaxonmodels and equimo."""

import functools
import importlib
import sys
from typing import Any
from unittest import mock

import jax

from .case import PUBLISHED, TINY, Case, images
from .frameworks import from_equinox, key_of


def _jaxonmodels(module: str) -> Any:
    # It imports torch for reading weights, which nothing here does.
    stand_in = {} if "torch" in sys.modules else {"torch": mock.MagicMock()}
    with mock.patch.dict(sys.modules, stand_in):
        return importlib.import_module(f"jaxonmodels.models.{module}")


def _with_key(module: Any, *arguments: Any) -> Any:
    return module(*arguments, key_of(1))


def _with_named_key(module: Any, *arguments: Any) -> Any:
    return module(*arguments, key=key_of(1), inference=True)


def _jaxon_resnet(
    block: str, layers: list[int], size: str, training: bool = False, **settings: int
) -> Case:
    import equinox as eqx

    resnet = _jaxonmodels("resnet")

    settings = {"groups": 1, "width_per_group": 64, **settings}
    make = functools.partial(
        eqx.nn.make_with_state(resnet.ResNet),
        getattr(resnet, block),
        layers,
        1000 if size == PUBLISHED else 4,
        False,
        replace_stride_with_dilation=None,
        key=jax.random.key(0),
        **settings,
    )
    shape = (1, 3, 224, 224) if size == PUBLISHED else (2, 3, 64, 64)
    return from_equinox(make, images(*shape), has_state=True, is_training=training)


def resnet18(size: str) -> Case:
    return _jaxon_resnet("BasicBlock", [2, 2, 2, 2], size)


def resnext50(size: str) -> Case:
    layers = [3, 4, 6, 3] if size == PUBLISHED else [1, 1, 1, 1]
    return _jaxon_resnet("Bottleneck", layers, size, groups=32, width_per_group=4)


def wide_resnet50_2(size: str) -> Case:
    layers = [3, 4, 6, 3] if size == PUBLISHED else [1, 1, 1, 1]
    return _jaxon_resnet("Bottleneck", layers, size, width_per_group=128)


def alexnet(size: str) -> Case:
    AlexNet = _jaxonmodels("alexnet").AlexNet

    make = functools.partial(
        AlexNet, n_classes=1000 if size == PUBLISHED else 4, key=jax.random.key(0)
    )
    return from_equinox(make, images(2, 3, 224, 224))


def efficientnet_b0(size: str) -> Case:
    efficientnet = _jaxonmodels("efficientnet")

    if size == PUBLISHED:
        make = functools.partial(efficientnet._efficientnet_b0, jax.random.key(0))
    else:
        block = efficientnet.MBConvConfig
        width = {"width_mult": 0.5, "depth_mult": 1.0}
        settings = [
            block(1, 3, 1, 16, 16, 1, **width),
            block(6, 3, 2, 16, 24, 2, **width),
            block(6, 5, 2, 24, 40, 2, **width),
        ]
        make = functools.partial(
            efficientnet._efficientnet, settings, 0.2, 32, 4, jax.random.key(0), None
        )
    shape = (1, 3, 224, 224) if size == PUBLISHED else (2, 3, 32, 32)
    return from_equinox(make, images(*shape), has_state=True, call=_with_key)


def efficientnet_v2_s(size: str) -> Case:
    efficientnet = _jaxonmodels("efficientnet")

    if size == PUBLISHED:
        make = functools.partial(efficientnet._efficientnet_v2_s, jax.random.key(0))
    else:
        fused, block = efficientnet.FusedMBConvConfig, efficientnet.MBConvConfig
        settings = [
            fused(1, 3, 1, 8, 8, 1),
            fused(4, 3, 2, 8, 16, 2),
            block(4, 3, 2, 16, 24, 2),
        ]
        make = functools.partial(
            efficientnet._efficientnet, settings, 0.2, 32, 4, jax.random.key(0), None
        )
    shape = (1, 3, 224, 224) if size == PUBLISHED else (2, 3, 32, 32)
    return from_equinox(make, images(*shape), has_state=True, call=_with_key)


def _swin(size: str, version: str) -> Case:
    swin = _jaxonmodels("swin_transformer")

    if size == PUBLISHED:
        make = functools.partial(
            getattr(swin, f"_swin{version}_t"), jax.random.key(0), True
        )
        return from_equinox(
            make, images(1, 3, 224, 224), has_state=True, call=_with_key
        )
    suffix = "V2" if version else ""
    make = functools.partial(
        swin._swin_transformer,
        key=jax.random.key(0),
        inference=True,
        num_classes=4,
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.2,
        block=getattr(swin, f"SwinTransformerBlock{suffix}"),
        downsample_layer=getattr(swin, f"PatchMerging{suffix}"),
        attn_layer=getattr(swin, f"ShiftedWindowAttention{suffix}"),
    )
    return from_equinox(make, images(2, 3, 32, 32), has_state=True, call=_with_key)


def swin(size: str) -> Case:
    return _swin(size, "")


def swin_v2(size: str) -> Case:
    return _swin(size, "_v2")


def mamba(size: str) -> Case:
    Mamba = _jaxonmodels("mamba").Mamba

    from .case import tokens

    width, layers, vocabulary = (768, 24, 50280) if size == PUBLISHED else (16, 2, 40)
    make = functools.partial(Mamba, width, vocabulary, layers, key=jax.random.key(0))
    return from_equinox(make, tokens(2, 8, vocabulary=vocabulary))


def _equimo(name: str, shape: tuple[int, ...], settings: dict[str, Any]) -> Case:
    import equimo.models

    make = functools.partial(getattr(equimo.models, name), **settings)
    return from_equinox(make, images(*shape), call=_with_named_key)


def equimo_vit(size: str) -> Case:
    tiny = {
        "img_size": 16,
        "patch_size": 4,
        "dim": 16,
        "num_heads": 2,
        "depths": [2],
        "num_classes": 4,
    }
    is_tiny = size == TINY
    shape = (2, 3, 16, 16) if is_tiny else (1, 3, 224, 224)
    return _equimo("vit_tiny_patch16_224", shape, tiny if is_tiny else {})


def equimo_dinov3(size: str) -> Case:
    """Rotary positions, register tokens, layer scales, gated layers."""
    tiny = {
        "img_size": 16,
        "patch_size": 4,
        "dim": 16,
        "num_heads": 2,
        "depths": [2],
        "num_classes": 4,
    }
    is_tiny = size == TINY
    shape = (2, 3, 16, 16) if is_tiny else (1, 3, 224, 224)
    return _equimo(
        "dinov3_vits16plus_pretrain_lvd1689m", shape, tiny if is_tiny else {}
    )


def equimo_convnext(size: str) -> Case:
    tiny = {"depths": [1, 1, 2, 1], "dims": [8, 16, 16, 24], "num_classes": 4}
    is_tiny = size == TINY
    shape = (2, 3, 64, 64) if is_tiny else (1, 3, 224, 224)
    return _equimo("convnext_t", shape, tiny if is_tiny else {})


def equimo_mobilenet_v3(size: str) -> Case:
    tiny = {
        "layers_config": [
            (8, 8, 3, 2, True, "relu"),
            (8, 24, 3, 1, False, "relu"),
            (16, 24, 5, 2, True, "hard_swish"),
            (16, 32, 5, 1, True, "hard_swish"),
        ],
        "last_channels": 96,  # more than the 32 groups of its group norm
        "num_classes": 4,
    }
    is_tiny = size == TINY
    shape = (2, 3, 32, 32) if is_tiny else (1, 3, 224, 224)
    return _equimo("mobilenetv3_small", shape, tiny if is_tiny else {})


def _equimo_default(name: str, size: str) -> Case:
    shape = (1, 3, 224, 224) if size == PUBLISHED else (2, 3, 64, 64)
    return _equimo(name, shape, {} if size == PUBLISHED else {"num_classes": 4})
