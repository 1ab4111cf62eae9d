"""Settings of networks: which one, how large, and in which precision."""

import dataclasses
from typing import Literal

from prunex_jax.base.settings import setting


@dataclasses.dataclass(frozen=True)
class GptConfig:
    """Models `gpt` and `gpt2`; `model.width` multiplies all widths."""

    # Blocks of attention and unit.
    layers: int = setting(4, at_least=1, at_most=10_000)
    # Of the stream.
    width: int = setting(128, at_least=1)
    # Query heads, and key heads, of which each serves as many query heads.
    heads: int = setting(4, at_least=1)
    key_heads: int = setting(4, at_least=1)
    # Features of a head; an even number for gpt.
    head_width: int = setting(32, at_least=2)
    # Of the unit; 0 is 8/3 of the stream in multiples of 32 for gpt, and 4 times the
    # stream for gpt2.
    hidden: int = setting(0, at_least=0)
    # Learned positions of gpt2; 0 has as many as a sequence has tokens.
    positions: int = setting(0, at_least=0)
    # Of the angles of rotary positions of gpt.
    rotary_base: float = setting(10_000.0, above=1)
    # Added to mean squares in norms; 0 is 1e-6 for gpt, and 1e-5 for gpt2.
    norm_epsilon: float = setting(0.0, at_least=0)
    # Logits by a matrix of their own, or by the embedding of tokens (tied); auto is own
    # for gpt, and tied for gpt2.
    head: Literal["auto", "own", "tied"] = "auto"
    # Share of activations that training drops.
    dropout: float = setting(0.0, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Model `bert`; `model.width` multiplies all widths."""

    # Blocks of attention and unit.
    layers: int = setting(4, at_least=1, at_most=10_000)
    # Of the stream.
    width: int = setting(128, at_least=1)
    # Attention heads.
    heads: int = setting(4, at_least=1)
    # Features of a head.
    head_width: int = setting(32, at_least=1)
    # Of the unit; 0 is 4 times the stream.
    hidden: int = setting(0, at_least=0)
    # Learned positions; 0 has as many as a sequence has tokens.
    positions: int = setting(0, at_least=0)
    # Kinds of sentences that have an embedding, as trained weights have 2, of which the
    # first is used; 0 has none.
    kinds: int = setting(0, at_least=0)
    # Added to variances in norms.
    norm_epsilon: float = setting(1e-12, above=0)
    # Share of activations that training drops.
    dropout: float = setting(0.0, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class VitConfig:
    """Form of models `vit_ti`, `vit_s` and `vit_b`.

    Widths are those of the name where they are 0, and `model.width` multiplies them.
    """

    # Side of a patch in pixels, which divides the sides of images.
    patch: int = setting(16, at_least=1)
    # What is classified: a class token, or the mean over all tokens, without one.
    pooling: Literal["token", "mean"] = "token"
    # layer | rms (root mean square; has no mean over channels).
    norm: Literal["layer", "rms"] = "layer"
    # Stochastic depth: share of the examples for which the last block is left out in
    # training; the share grows evenly from 0 at the first.
    drop_path: float = setting(0.0, at_least=0, below=1)
    # Blocks of attention and MLP.
    layers: int = setting(0, at_least=0)
    # Of the stream.
    width: int = setting(0, at_least=0)
    # Heads of attention, and features of a head.
    heads: int = setting(0, at_least=0)
    head_width: int = setting(0, at_least=0)
    # Of the MLP.
    hidden: int = setting(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class ConvNextConfig:
    """Form of model `convnext_t`."""

    # Stochastic depth, as of `vit`.
    drop_path: float = setting(0.1, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which network is trained."""

    # resnet20 | resnet32 | resnet56 | resnet110 | resnet18 | resnet34 | resnet50 |
    # resnet101 | resnet152 | wide_resnet50_2 | vgg16 | vgg19 | vit_ti | vit_s | vit_b |
    # convnext_t; of text gpt (as Llama) | gpt2 | bert; or package.module:object for a
    # network of your own, as `models.own_model` takes it.
    name: str = "resnet20"
    # Trained weights to start from: a folder made by `prunex-jax export`, a run folder,
    # or safetensors of torchvision, timm or Hugging Face; empty draws them at random.
    weights: str = ""
    # cifar (3x3 stem) | imagenet (7x7 stem, max pool) | auto (by image size); of
    # convnext_t, patches of 2 or of 4 pixels.
    stem: Literal["auto", "cifar", "imagenet"] = "auto"
    # Multiplies every width.
    width: float = setting(1.0, above=0)
    # Batch statistics over the examples of one device, or of all devices of a host.
    norm_scope: Literal["device", "host"] = "device"
    # float32 | bfloat16 for activations.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # float32 | bfloat16 for parameters between steps, rounded stochastically. What the
    # optimizer and the method remember, the consensus among it, stays float32.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # none | blocks: what lies inside of a block is not kept for the backward pass but
    # computed again, which takes less memory and more time. Of gpt, gpt2, bert, vit and
    # convnext.
    recompute: Literal["none", "blocks"] = "none"
    # chunked (kernel gradients in chunks of the batch, depthwise convolutions as sums
    # of shifted maps; faster on CPUs) | direct | auto (chunked on CPUs, else direct).
    convolution: Literal["auto", "direct", "chunked"] = "auto"
    gpt: GptConfig = GptConfig()
    bert: BertConfig = BertConfig()
    vit: VitConfig = VitConfig()
    convnext: ConvNextConfig = ConvNextConfig()
