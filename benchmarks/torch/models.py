"""The networks of this package as PyTorch modules, with the same parameters.

Modules are named as the parts of ours, so that parameters find their places by path.
Widths come from the shapes of the parameters. Importing it needs torch.

Differs from:
  Running variances: PyTorch's follow the unbiased variance of a batch, ours the biased
  one, which batches are normalised with in both. For n values per channel they lie
  apart by a factor of n / (n - 1).
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path, shapes_by_path
from prunex_jax.models import MODELS, Model, VggSpec
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
# Weights of a language model. Heads and their features are one axis in PyTorch: behind
# the stream, but in front of it where heads are read.
_INTO_HEADS = ("query", "key", "value")
_OUT_OF_HEADS = "out"
_EMBEDDING = "embedding"

# As in `models.gpt`.
_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0
# Parameters of a language model, and of each of its blocks.
_GPT = ("embedding", "norm/scale", "head")
_GPT_BLOCK = (
    *("attention_norm/scale", "unit_norm/scale"),
    *(f"attention/{name}" for name in (*_INTO_HEADS, _OUT_OF_HEADS)),
    *(f"unit/{name}" for name in ("gate", "up", "down")),
)

# Path of a parameter -> its shape.
Shapes = Mapping[str, tuple[int, ...]]
# Cosines and sines of the angles by which positions turn pairs of features.
Turns = tuple[torch.Tensor, torch.Tensor]


def make_torch_model(model: Model) -> nn.Module:
    """Builds the same network in PyTorch, with parameters that are yet to be loaded.

    Returns:
      A module from float32[n, c, h, w] to logits, float32[n, num_classes]; a language
      model from int64[n, length] to float32[n, length, tokens].
    Raises:
      UserError: The network has no PyTorch form.
    """
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    shapes = shapes_by_path(params)
    if "stem/conv/kernel" in shapes:
        return _ResNet(shapes)
    if "features/0/conv/kernel" in shapes:
        return _Vgg(shapes)
    num_blocks = sum(path.endswith("/unit/gate") for path in shapes)
    blocks = {f"blocks/{n}/{each}" for n in range(num_blocks) for each in _GPT_BLOCK}
    if shapes.keys() != {*_GPT, *blocks}:
        raise UserError(
            "rows with runtime torch train residual networks, VGGs and gpt, and this "
            "network is none of them; give the row runtime jax"
        )
    return _Gpt(shapes, num_blocks)


def load_params(module: nn.Module, params: PyTree, statistics: PyTree) -> None:
    """Fills a network with parameters and running statistics of ours.

    Raises:
      RuntimeError: Names or shapes are not those of the module.
    """
    leaves = flatten_by_path(params) | flatten_by_path(statistics)
    module.load_state_dict(
        {torch_name(path): torch_value(path, leaf) for path, leaf in leaves.items()}
    )


def torch_name(path: str) -> str:
    """Name of a leaf of our parameters in the module's `state_dict`."""
    *parts, leaf = path.split("/")
    # Weights of a language model have no module of their own in ours.
    return ".".join([*parts, _LEAVES.get(leaf, f"{leaf}.weight")])


def torch_value(path: str, leaf: Any) -> torch.Tensor:
    """A leaf of ours, float32, as a tensor with the axes in PyTorch's order."""
    value, name = np.asarray(leaf), path.split("/")[-1]
    if name in _INTO_HEADS:
        value = value.reshape(value.shape[0], -1)
    if name == _OUT_OF_HEADS:
        value = value.reshape(-1, value.shape[-1])
    if name != _EMBEDDING and value.ndim in _AXES:
        value = value.transpose(_AXES[value.ndim])
    return torch.from_numpy(value.copy())


def _count(shapes: Shapes, prefix: str) -> int:
    """How many parts of a list have parameters."""
    depth = prefix.count("/")
    return len({path.split("/")[depth] for path in shapes if path.startswith(prefix)})


def _vgg_depths(num_convs: int) -> tuple[int, ...]:
    """How many convolutions each stage of a VGG has, of so many."""
    specs = [MODELS[name]("cifar") for name in ("vgg16", "vgg19")]
    depths = [tuple(map(len, s.stages)) for s in specs if isinstance(s, VggSpec)]
    return {sum(each): each for each in depths}[num_convs]


def _conv(
    shapes: Shapes, path: str, stride: int = 1, has_bias: bool = False
) -> nn.Conv2d:
    size, _, c_in, c_out = shapes[f"{path}/kernel"]
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

    def __init__(self, shapes: Shapes, number: int):
        super().__init__()
        path = f"blocks/{number}"
        has_projection = f"{path}/shortcut/conv/kernel" in shapes
        # Stages but the first halve the map, where the stream is projected.
        stride = 2 if has_projection and number > 0 else 1
        self.depth = 3 if f"{path}/conv3/kernel" in shapes else 2
        for index in range(1, self.depth + 1):
            has_stride = index == self.depth - 1
            conv = _conv(shapes, f"{path}/conv{index}", stride if has_stride else 1)
            self.add_module(f"conv{index}", conv)
            self.add_module(f"norm{index}", _norm(conv.out_channels))
        self.shortcut: nn.Module = nn.Identity()
        if has_projection:
            self.shortcut = _ConvNorm(_conv(shapes, f"{path}/shortcut/conv", stride))

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

    def __init__(self, shapes: Shapes):
        super().__init__()
        self.is_large = shapes["stem/conv/kernel"][0] == 7
        self.stem = _ConvNorm(_conv(shapes, "stem/conv", 2 if self.is_large else 1))
        numbers = range(_count(shapes, "blocks/"))
        self.blocks = nn.Sequential(*(_Block(shapes, number) for number in numbers))
        self.classifier = nn.Linear(*shapes["classifier/kernel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _relu(self.stem(x))
        if self.is_large:
            x = functional.max_pool2d(x, 3, 2, padding=1)
        return self.classifier(self.blocks(x).mean((2, 3)))


class _Vgg(nn.Module):
    """As `models.vgg.Vgg`."""

    def __init__(self, shapes: Shapes):
        super().__init__()
        num_convs = _count(shapes, "features/")
        self.depths = _vgg_depths(num_convs)
        self.features = nn.ModuleList(
            _ConvNorm(_conv(shapes, f"features/{number}/conv", has_bias=True))
            for number in range(num_convs)
        )
        self.hidden = nn.ModuleList(
            nn.Linear(*shapes[f"hidden/{number}/kernel"])
            for number in range(_count(shapes, "hidden/"))
        )
        self.classifier = nn.Linear(*shapes["classifier/kernel"])

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


class _Attention(nn.Module):
    """As `models.gpt.Attention`."""

    def __init__(self, shapes: Shapes, path: str):
        super().__init__()
        width, self.heads, self.features = shapes[f"{path}/query"]
        self.key_heads = shapes[f"{path}/key"][1]
        keys = self.key_heads * self.features
        self.query = _dense(width, self.heads * self.features)
        self.key, self.value = _dense(width, keys), _dense(width, keys)
        self.out = _dense(self.heads * self.features, width)

    def forward(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        query = _rotated(self._split(self.query(x), self.heads), turns)
        key = _rotated(self._split(self.key(x), self.key_heads), turns)
        value = self._split(self.value(x), self.key_heads)
        served = self.heads // self.key_heads
        key, value = (each.repeat_interleave(served, 1) for each in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """float32[n, heads, length, features]."""
        return x.unflatten(2, (heads, self.features)).transpose(1, 2)


class _GatedUnit(nn.Module):
    """As `models.gpt.GatedUnit`."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = _dense(width, hidden), _dense(width, hidden)
        self.down = _dense(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class _GptBlock(nn.Module):
    """As `models.gpt.Block`."""

    def __init__(self, shapes: Shapes, path: str):
        super().__init__()
        width, hidden = shapes[f"{path}/unit/gate"]
        self.attention_norm, self.unit_norm = _rms_norm(width), _rms_norm(width)
        self.attention = _Attention(shapes, f"{path}/attention")
        self.unit = _GatedUnit(width, hidden)

    def forward(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.unit(self.unit_norm(x))


class _Gpt(nn.Module):
    """As `models.gpt.Gpt`, with the widths that its parameters have."""

    def __init__(self, shapes: Shapes, num_blocks: int):
        super().__init__()
        vocabulary, width = shapes["embedding"]
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            _GptBlock(shapes, f"blocks/{number}") for number in range(num_blocks)
        )
        self.norm = _rms_norm(width)
        self.head = _dense(width, vocabulary)
        self.features = shapes["blocks/0/attention/query"][-1]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, turns = self.embedding(tokens), _turns(tokens.shape[1], self.features)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def _dense(c_in: int, c_out: int) -> nn.Linear:
    return nn.Linear(c_in, c_out, bias=False)


def _rms_norm(width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=_EPSILON)


def _turns(length: int, features: int) -> Turns:
    """Cosines and sines of `models.gpt.rotated`, float32[length, features / 2]."""
    powers = torch.arange(0, features, 2) / features
    angles = torch.arange(length)[:, None] / _ROTARY_BASE ** powers[None]
    return angles.cos(), angles.sin()


def _rotated(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    cosine, sine = turns
    first, second = x.chunk(2, -1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat(turned, -1)
