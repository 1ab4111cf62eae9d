"""Flax Linen networks of other packages: flaxmodels and transformers."""

from typing import Any

from .case import PUBLISHED, TINY, Case, images, tokens
from .frameworks import from_linen


def _flaxmodels_resnet(depth: int, size: str, side: int, **training: bool) -> Case:
    from flaxmodels.resnet.resnet import BasicBlock, Bottleneck, ResNet

    module = ResNet(
        output="logits",
        pretrained=None,
        normalize=False,
        architecture=f"resnet{depth}",
        num_classes=1000 if size == PUBLISHED else 4,
        block=BasicBlock if depth == 18 else Bottleneck,
    )
    shape = (1, 224, 224, 3) if size == PUBLISHED else (2, side, side, 3)
    train = training.get("is_training", False)
    return from_linen(module, images(*shape), is_training=train, train=train)


def resnet18(size: str) -> Case:
    return _flaxmodels_resnet(18, size, 64)


def resnet50(size: str) -> Case:
    return _flaxmodels_resnet(50, size, 64)


def resnet152(size: str) -> Case:
    return _flaxmodels_resnet(152, size, 64)


def vgg16(size: str) -> Case:
    from flaxmodels.vgg.vgg import VGG

    is_tiny = size == TINY
    # The package allows its head for images of 224 x 224 only.
    module = VGG(
        output="logits", pretrained=None, normalize=False, include_head=not is_tiny
    )
    shape = (2, 32, 32, 3) if is_tiny else (1, 224, 224, 3)
    return from_linen(module, images(*shape), train=False)


def _transformers(
    name: str, module: str, config: Any, *inputs: Any, **call: Any
) -> Case:
    import importlib

    package = f"transformers.models.{name}.modeling_flax_{name}"
    make = getattr(importlib.import_module(package), module)
    case = from_linen(make(config), *inputs, **call)
    return Case(
        lambda *arguments: case.apply(*arguments)[0],
        case.params,
        case.inputs,
        case.statistics,
    )


def hf_resnet50(size: str) -> Case:
    from transformers import ResNetConfig

    tiny = {"embedding_size": 8, "hidden_sizes": [16, 24, 32, 40], "num_labels": 4}
    config = ResNetConfig(**(tiny if size == TINY else {"num_labels": 1000}))
    shape = (2, 64, 64, 3) if size == TINY else (1, 224, 224, 3)
    return _transformers(
        "resnet",
        "FlaxResNetForImageClassificationModule",
        config,
        images(*shape),
        return_dict=False,
    )


def hf_regnet(size: str) -> Case:
    from transformers import RegNetConfig

    tiny = {
        "embedding_size": 8,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 2, 2, 1],
        "groups_width": 4,
        "num_labels": 4,
    }
    config = RegNetConfig(**(tiny if size == TINY else {"num_labels": 1000}))
    shape = (2, 64, 64, 3) if size == TINY else (1, 224, 224, 3)
    return _transformers(
        "regnet",
        "FlaxRegNetForImageClassificationModule",
        config,
        images(*shape),
        return_dict=False,
    )


_TINY_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}


def hf_vit(size: str) -> Case:
    from transformers import ViTConfig

    config = (
        ViTConfig(num_labels=4, **_TINY_VIT)
        if size == TINY
        else ViTConfig(num_labels=1000)
    )
    side = config.image_size
    return _transformers(
        "vit",
        "FlaxViTForImageClassificationModule",
        config,
        images(2, side, side, 3),
        return_dict=False,
    )


def hf_beit(size: str) -> Case:
    from transformers import BeitConfig

    settings = {
        "use_relative_position_bias": True,
        "use_absolute_position_embeddings": True,
    }
    tiny = {**_TINY_VIT, "num_labels": 4}
    config = BeitConfig(**settings, **(tiny if size == TINY else {"num_labels": 1000}))
    side = config.image_size
    return _transformers(
        "beit",
        "FlaxBeitForImageClassificationModule",
        config,
        images(2, side, side, 3),
        return_dict=False,
    )


def _causal(name: str, module: str, config: Any, size: str) -> Case:
    import jax.numpy as jnp

    length = 6 if size == TINY else 128
    ids = tokens(2, length, vocabulary=config.vocab_size)
    ones = jnp.ones_like(ids)
    places = jnp.broadcast_to(jnp.arange(length), ids.shape)
    return _transformers(name, module, config, ids, ones, places, return_dict=False)


def hf_gpt2(size: str) -> Case:
    from transformers import GPT2Config

    tiny = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
    config = GPT2Config(**(tiny if size == TINY else {}))
    return _causal("gpt2", "FlaxGPT2LMHeadModule", config, size)


def hf_gptj(size: str) -> Case:
    from transformers import GPTJConfig

    tiny = {
        "vocab_size": 40,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 8,
        "rotary_dim": 4,
    }
    config = GPTJConfig(**(tiny if size == TINY else {}))
    return _causal("gptj", "FlaxGPTJForCausalLMModule", config, size)


_TINY_LLAMA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}


def hf_llama(size: str) -> Case:
    from transformers import LlamaConfig

    config = LlamaConfig(**(_TINY_LLAMA if size == TINY else {}))
    return _causal("llama", "FlaxLlamaForCausalLMModule", config, size)


def hf_mistral(size: str) -> Case:
    from transformers import MistralConfig

    config = MistralConfig(**(_TINY_LLAMA if size == TINY else {}))
    return _causal("mistral", "FlaxMistralForCausalLMModule", config, size)


def hf_gemma(size: str) -> Case:
    from transformers import GemmaConfig

    tiny = {**_TINY_LLAMA, "num_key_value_heads": 1, "head_dim": 4}
    config = GemmaConfig(**(tiny if size == TINY else {}))
    return _causal("gemma", "FlaxGemmaForCausalLMModule", config, size)


def hf_bert(size: str) -> Case:
    import jax.numpy as jnp
    from transformers import BertConfig

    tiny = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
    }
    config = BertConfig(**(tiny if size == TINY else {}))
    ids = tokens(2, 6, vocabulary=config.vocab_size)
    ones = jnp.ones_like(ids)
    places = jnp.broadcast_to(jnp.arange(6), ids.shape)
    heads = jnp.ones((config.num_hidden_layers, config.num_attention_heads))
    return _transformers(
        "bert",
        "FlaxBertForMaskedLMModule",
        config,
        ids,
        ones,
        0 * ids,
        places,
        heads,
        return_dict=False,
    )
