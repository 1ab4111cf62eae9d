"""Haiku's own networks, `haiku.nets`, and its layers for sequences."""

from typing import Any

from .case import TINY, Case, images
from .frameworks import from_haiku

_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}


def _resnet(depth: int, size: str, is_training: bool = False, **settings: Any) -> Case:
    import haiku as hk

    is_basic = depth == 18
    widths = (64, 128, 256, 512) if is_basic else (256, 512, 1024, 2048)
    stem, classes, shape = 64, 1000, (1, 224, 224, 3)
    if size == TINY:
        widths = tuple(width // 8 for width in widths)
        stem, classes, shape = 8, 4, (4, 64, 64, 3)

    def forward(is_training: bool, x: Any) -> Any:
        network = hk.nets.ResNet(
            _BLOCKS[depth],
            classes,
            bottleneck=not is_basic,
            channels_per_group=widths,
            use_projection=(not is_basic, True, True, True),
            initial_conv_config={"output_channels": stem},
            **settings,
        )
        return network(x, is_training)

    return from_haiku(forward, images(*shape), is_training=is_training)


def resnet18(size: str) -> Case:
    return _resnet(18, size)


def resnet18_training(size: str) -> Case:
    return _resnet(18, size, is_training=True)


def resnet50_v2(size: str) -> Case:
    return _resnet(50, size, resnet_v2=True)


def resnet152(size: str) -> Case:
    return _resnet(152, size)


def mobilenet_v1(size: str) -> Case:
    import haiku as hk

    published = (64, 128, 128, 256, 256, *(512,) * 6, 1024, 1024)
    is_tiny = size == TINY
    widths = tuple(width // 8 for width in published) if is_tiny else published
    shape = (4, 64, 64, 3) if is_tiny else (1, 224, 224, 3)

    def forward(is_training: bool, x: Any) -> Any:
        network = hk.nets.MobileNetV1(
            channels=widths, num_classes=4 if is_tiny else 1000
        )
        return network(x, is_training)

    return from_haiku(forward, images(*shape))
