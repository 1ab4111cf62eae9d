"""The list of networks: where each comes from, and how much of it must be prunable.

Packages that were looked at, with jax 0.10.2, flax 0.12.8 and Python 3.11:

- dm-haiku 0.0.17: used, `haiku.nets` and its layers.
- equinox 0.13.8: used, its layers; it brings no networks.
- flaxmodels 0.1.3: used, ResNet and VGG.
- transformers 4.57.1: used, the last line with Flax models; 5 has none. Its T5 calls
  `jnp.clip(a_max=...)`, which jax 0.10 no longer has.
- jaxonmodels 0.2.3: used, with a stand-in for torch, which it imports to read weights.
  Its ConvNeXt fails in its own layer norm, its AlexNet has 57 M parameters in any case.
- equimo 1.1.0: used.
- jax-image-models 0.4.0: not used, it wants a mesh with explicit axes around each call.
- eqxvision 0.2.8: not used, it needs `equinox.experimental`, which is gone, and torch.
"""

import dataclasses

from .case import Network

NNX, LINEN, EQUINOX, HAIKU, PLAIN = (
    "Flax NNX",
    "Flax Linen",
    "Equinox",
    "Haiku",
    "plain functions",
)

_OWN_NNX = [
    Network("nnx_resnet18", NNX, "prunex_jax", "nnx_own:resnet18", is_quick=True),
    Network("nnx_resnet50_training", NNX, "prunex_jax", "nnx_own:resnet50_training"),
    Network("nnx_vgg16", NNX, "prunex_jax", "nnx_own:vgg16"),
    *(
        Network(f"nnx_{name}", NNX, "prunex_jax", f"nnx_own:{name}")
        for name in (
            *("vit_ti", "vit_ti_rms", "vit_s", "vit_b", "convnext_t"),
            *("gpt", "gpt2", "bert"),
        )
    ),
    Network("nnx_wide_resnet", NNX, "tests", "nnx_own:wide_resnet"),
    Network("nnx_wide_resnet_training", NNX, "tests", "nnx_own:wide_resnet_training"),
    Network("nnx_mobilenet_v2", NNX, "tests", "nnx_own:mobilenet_v2", is_quick=True),
    Network("nnx_vit", NNX, "tests", "nnx_own:vit"),
    Network("nnx_gpt_scanned", NNX, "tests", "nnx_own:gpt_scanned", is_quick=True),
    Network("nnx_unet", NNX, "tests", "nnx_own:unet"),
    Network("nnx_lstm", NNX, "tests", "nnx_own:lstm"),
]
_OWN_LINEN = [
    Network("linen_densenet121", LINEN, "tests", "linen_own:densenet121"),
    Network("linen_densenet_training", LINEN, "tests", "linen_own:densenet_training"),
    Network("linen_mobilenet_v3", LINEN, "tests", "linen_own:mobilenet_v3"),
    Network("linen_unet", LINEN, "tests", "linen_own:unet", is_quick=True),
    Network("linen_vit", LINEN, "tests", "linen_own:vit", is_quick=True),
    Network("linen_lstm", LINEN, "tests", "linen_own:lstm"),
    Network("linen_gpt_scanned", LINEN, "tests", "linen_own:gpt_scanned"),
    Network("linen_t5", LINEN, "tests", "linen_own:t5"),
    Network("linen_dropout", LINEN, "tests", "linen_own:dropout"),
]
_OWN_EQUINOX = [
    Network(
        f"equinox_{name}", EQUINOX, "tests", f"equinox_own:{name}", needs=("equinox",)
    )
    for name in (
        "vgg16",
        "densenet",
        "densenet_training",
        "unet",
        "gpt_rotary",
        "gpt_scanned",
        "lstm",
        "inception",
    )
]
_OWN_HAIKU = [
    Network(f"haiku_{name}", HAIKU, "tests", f"haiku_own:{name}", needs=("haiku",))
    for name in (
        "vgg16",
        "densenet",
        "unet",
        "inception_v3_blocks",
        "gpt",
        "gpt_stacked",
        "lstm",
        "conv_lstm",
    )
]
_PLAIN = [
    Network("plain_resnext50", PLAIN, "tests", "plain_vision:resnext"),
    Network("plain_bit_resnet", PLAIN, "tests", "plain_vision:bit_resnet"),
    Network("plain_shufflenet", PLAIN, "tests", "plain_vision:shufflenet"),
    Network("plain_pixel_shuffle", PLAIN, "tests", "plain_vision:pixel_shuffle"),
    Network("plain_swin", PLAIN, "tests", "plain_vision:swin", is_quick=True),
    Network("plain_mlp_mixer", PLAIN, "tests", "plain_vision:mlp_mixer"),
    Network(
        "plain_gpt_grouped", PLAIN, "tests", "plain_sequence:gpt_grouped", is_quick=True
    ),
    Network("plain_gpt_scanned", PLAIN, "tests", "plain_sequence:gpt_scanned"),
    Network("plain_gpt_multi_query", PLAIN, "tests", "plain_sequence:gpt_multi_query"),
    Network("plain_lstm", PLAIN, "tests", "plain_sequence:lstm", is_quick=True),
    Network(
        "plain_mixture_gathered", PLAIN, "tests", "plain_sequence:mixture_gathered"
    ),
    Network("plain_mixture_dense", PLAIN, "tests", "plain_sequence:mixture_dense"),
    Network("plain_wavenet", PLAIN, "tests", "plain_sequence:wavenet"),
]
_HAIKU = [
    Network(
        f"haiku_nets_{name}",
        HAIKU,
        "dm-haiku 0.0.17",
        f"haiku_packaged:{name}",
        needs=("haiku",),
    )
    for name in (
        "resnet18",
        "resnet18_training",
        "resnet50_v2",
        "resnet152",
        "mobilenet_v1",
    )
]
_FLAXMODELS = [
    Network(
        f"flaxmodels_{name}",
        LINEN,
        "flaxmodels 0.1.3",
        f"linen_packaged:{name}",
        needs=("flaxmodels",),
    )
    for name in ("resnet18", "resnet50", "vgg16")
]
_TRANSFORMERS = [
    Network(
        name,
        LINEN,
        "transformers 4.57.1",
        f"linen_packaged:{name}",
        needs=("transformers",),
    )
    for name in (
        "hf_resnet50",
        "hf_regnet",
        "hf_vit",
        "hf_beit",
        "hf_gpt2",
        "hf_gptj",
        "hf_llama",
        "hf_mistral",
        "hf_gemma",
        "hf_bert",
    )
]
_JAXONMODELS = [
    Network(
        f"jaxonmodels_{name}",
        EQUINOX,
        "jaxonmodels 0.2.3",
        f"equinox_packaged:{name}",
        needs=("jaxonmodels",),
    )
    for name in (
        "resnet18",
        "resnext50",
        "wide_resnet50_2",
        "efficientnet_b0",
        "efficientnet_v2_s",
        "swin",
        "swin_v2",
        "mamba",
    )
]
_EQUIMO = [
    Network(
        name,
        EQUINOX,
        "equimo 1.1.0",
        f"equinox_packaged:{name}",
        needs=("equimo",),
    )
    for name in (
        "equimo_vit",
        "equimo_dinov3",
        "equimo_convnext",
        "equimo_mobilenet_v3",
    )
]

# Least shares (published size, tiny size) where they are not the usual ones, and why.
# Tiny networks have wide classifiers and embeddings beside narrow layers.
_TWO_PASS = "a two-pass layer norm keeps the stream whole"
_FLOORS = {
    "plain_swin": (0.91, 0.85, _TWO_PASS),
    "plain_mlp_mixer": (0.95, 0.65, _TWO_PASS),
    "plain_bit_resnet": (0.0, 0.0, "kernels are standardised over their inputs"),
    "plain_mixture_gathered": (0.95, 0.85, _TWO_PASS),
    "plain_mixture_dense": (0.95, 0.85, _TWO_PASS),
    "haiku_gpt": (0.5, 0.7, _TWO_PASS),
    "haiku_gpt_stacked": (0.5, 0.7, _TWO_PASS),
    "jaxonmodels_swin": (0.91, 0.85, _TWO_PASS),
    "jaxonmodels_swin_v2": (0.6, 0.65, _TWO_PASS),
    "equimo_vit": (0.93, 0.8, _TWO_PASS),
    "equimo_dinov3": (0.74, 0.6, _TWO_PASS),
    "equimo_convnext": (0.9, 0.55, _TWO_PASS),
}


def _with_floor(network: Network) -> Network:
    floor, floor_tiny, why = _FLOORS.get(network.name, (0.95, 0.9, ""))
    return dataclasses.replace(network, floor=floor, floor_tiny=floor_tiny, why=why)


_ALL = (
    *_OWN_NNX,
    *_OWN_LINEN,
    *_OWN_EQUINOX,
    *_OWN_HAIKU,
    *_PLAIN,
    *_HAIKU,
    *_FLAXMODELS,
    *_TRANSFORMERS,
    *_JAXONMODELS,
    *_EQUIMO,
)
NETWORKS = tuple(map(_with_floor, _ALL))
