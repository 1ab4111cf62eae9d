"""The networks of this package as PyTorch modules, with the same parameters.

Modules are named as the parts of ours, so that parameters find their places by path.
Widths come from the specifications in `models`. Importing it needs torch.

Differs from:
  Running variances: PyTorch's follow the unbiased variance of a batch, ours the biased
  one, which batches are normalised with in both. For n values per channel they lie
  apart by a factor of n / (n - 1).
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.models import BlockSpec, Model, ResNetSpec, VggSpec
from prunex_jax.models.layers import STATISTICS_DECAY

# Our names of leaves -> those of PyTorch.
_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
# Axes of a kernel in PyTorch's order, by number of axes: HWIO -> OIHW, IO -> OI.
_AXES = {4: (3, 2, 0, 1), 2: (1, 0)}


def make_torch_model(model: Model) -> nn.Module:
    """Builds the same network in PyTorch, with parameters that are yet to be loaded.

    Returns:
      A module from float32[n, c, h, w] to logits, float32[n, num_classes].
    """
    spec = model.spec
    if isinstance(spec, ResNetSpec):
        return _ResNet(spec, model.image_shape[-1], model.num_classes)
    assert isinstance(spec, VggSpec), f"no PyTorch form of {type(spec).__name__}"
    return _Vgg(spec, model.image_shape, model.num_classes)


def load_params(module: nn.Module, params: PyTree, statistics: PyTree) -> None:
    """Fills a network with parameters and running statistics of ours.

    Raises:
      RuntimeError: Names or shapes are not those of the module.
    """
    leaves = flatten_by_path(params) | flatten_by_path(statistics)
    module.load_state_dict(
        {torch_name(path): torch_value(leaf) for path, leaf in leaves.items()}
    )


def torch_name(path: str) -> str:
    """Name of a leaf of our parameters in the module's `state_dict`."""
    *parts, leaf = path.split("/")
    return ".".join([*parts, _LEAVES[leaf]])


def torch_value(leaf: Any) -> torch.Tensor:
    """A leaf of ours, float32, as a tensor with the axes in PyTorch's order."""
    value = np.asarray(leaf)
    if value.ndim in _AXES:
        value = value.transpose(_AXES[value.ndim])
    return torch.from_numpy(value.copy())


def _conv(
    c_in: int, c_out: int, size: int, stride: int = 1, has_bias: bool = False
) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, size, stride, padding=size // 2, bias=has_bias)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=1 - STATISTICS_DECAY)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x, inplace=True)


class _ConvNorm(nn.Module):
    """A convolution with batch norm: a shortcut, a layer of VGG, or a small stem."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        self.norm = _norm(conv.out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class _Block(nn.Module):
    """Two or three convolutions beside a shortcut; the first 3x3 has the stride."""

    def __init__(self, c_in: int, spec: BlockSpec):
        super().__init__()
        widths = (c_in, *spec.inner, spec.out)
        sizes = (3, 3) if len(spec.inner) == 1 else (1, 3, 1)
        self.depth = len(sizes)
        for index, size in enumerate(sizes):
            stride = spec.stride if index == sizes.index(3) else 1
            conv = _conv(widths[index], widths[index + 1], size, stride)
            self.add_module(f"conv{index + 1}", conv)
            self.add_module(f"norm{index + 1}", _norm(widths[index + 1]))
        self.shortcut: nn.Module = nn.Identity()
        if spec.has_projection:
            self.shortcut = _ConvNorm(_conv(c_in, spec.out, 1, spec.stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for index in range(1, self.depth + 1):
            y = getattr(self, f"conv{index}")(y)
            y = getattr(self, f"norm{index}")(y)
            if index < self.depth:
                y = _relu(y)
        return _relu(y + self.shortcut(x))


class _ResNet(nn.Module):
    """As `models.resnet.ResNet`."""

    def __init__(self, spec: ResNetSpec, c_in: int, num_classes: int):
        super().__init__()
        self.is_large = spec.stem == "imagenet"
        size, stride = (7, 2) if self.is_large else (3, 1)
        self.stem = _ConvNorm(_conv(c_in, spec.stem_width, size, stride))
        streams = (spec.stem_width, *(block.out for block in spec.blocks))
        self.blocks = nn.Sequential(*map(_Block, streams[:-1], spec.blocks))
        self.classifier = nn.Linear(streams[-1], num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _relu(self.stem(x))
        if self.is_large:
            x = functional.max_pool2d(x, 3, 2, padding=1)
        return self.classifier(self.blocks(x).mean((2, 3)))


class _Vgg(nn.Module):
    """As `models.vgg.Vgg`."""

    def __init__(
        self, spec: VggSpec, image_shape: tuple[int, int, int], num_classes: int
    ):
        super().__init__()
        height, width, channels = image_shape
        widths = [width for stage in spec.stages for width in stage]
        self.depths = [len(stage) for stage in spec.stages]
        self.features = nn.ModuleList(
            _ConvNorm(_conv(c_in, c_out, 3, has_bias=True))
            for c_in, c_out in zip((channels, *widths), widths, strict=False)
        )
        side = spec.smallest_side
        flat = (height // side) * (width // side) * widths[-1]
        self.hidden = nn.ModuleList(
            nn.Linear(c_in, c_out)
            for c_in, c_out in zip((flat, *spec.hidden), spec.hidden, strict=False)
        )
        self.classifier = nn.Linear((flat, *spec.hidden)[-1], num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = iter(self.features)
        for depth in self.depths:
            for _ in range(depth):
                x = _relu(next(layers)(x))
            x = functional.max_pool2d(x, 2)
        # Flattened in our order of axes, so that kernels behind it are the same.
        x = x.permute(0, 2, 3, 1).flatten(1)
        for dense in self.hidden:
            x = _relu(dense(x))
        return self.classifier(x)
