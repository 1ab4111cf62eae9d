"""ConvNeXt of timm and of torchvision.

References:
  timm, convnext.py; torchvision, models/convnext.py.
"""

from collections.abc import Sequence

from prunex_jax.models.weights.table import (
    CONV,
    Axes,
    Layout,
    Row,
    dense_rows,
    norm_rows,
)

_STAGES = range(4)
# What a block adds is scaled by channel; torchvision keeps the axes of a map.
_SCALE_OF_MAP: Axes = ((0,), (), ())


def _patches(there: str, here: str) -> tuple[Row, ...]:
    return (
        Row(f"{there}.weight", f"{here}/patches/kernel", CONV),
        Row(f"{there}.bias", f"{here}/patches/bias"),
    )


def _stem(patches: str, norm: str) -> tuple[Row, ...]:
    here = "stages/0/before"
    return *_patches(patches, here), *norm_rows(norm, f"{here}/norm")


def _halving(there: str, stage: int) -> tuple[Row, ...]:
    here = f"stages/{stage}/before"
    return *norm_rows(f"{there}.0", f"{here}/norm"), *_patches(f"{there}.1", here)


def _block(parts: Sequence[str], here: str) -> tuple[Row, ...]:
    """Rows of a block; its parts are depthwise convolution, norm, up and down."""
    depthwise, norm, up, down = parts
    return (
        Row(f"{depthwise}.weight", f"{here}/depthwise/kernel", CONV),
        Row(f"{depthwise}.bias", f"{here}/depthwise/bias"),
        *norm_rows(norm, f"{here}/norm"),
        *dense_rows(up, f"{here}/mlp/up"),
        *dense_rows(down, f"{here}/mlp/down"),
    )


def _timm_stage(stage: int) -> tuple[Row, ...]:
    here, there = f"stages/{stage}/blocks/{{b}}", f"stages.{stage}.blocks.{{b}}"
    names = "conv_dw", "norm", "mlp.fc1", "mlp.fc2"
    parts = [f"{there}.{name}" for name in names]
    return (
        *(_halving(f"stages.{stage}.downsample", stage) if stage else ()),
        *_block(parts, here),
        Row(f"{there}.gamma", f"{here}/layer_scale"),
    )


def _torchvision_stage(stage: int) -> tuple[Row, ...]:
    here, there = f"stages/{stage}/blocks/{{b}}", f"features.{2 * stage + 1}.{{b}}"
    parts = [f"{there}.block.{number}" for number in (0, 2, 3, 5)]
    return (
        *(_halving(f"features.{2 * stage}", stage) if stage else ()),
        *_block(parts, here),
        Row(f"{there}.layer_scale", f"{here}/layer_scale", _SCALE_OF_MAP),
    )


TIMM_CONVNEXT = Layout(
    name="timm ConvNeXt",
    marks=("stem.0.weight", "stages.0.blocks.0.conv_dw.weight"),
    rows=(
        *_stem("stem.0", "stem.1"),
        *(row for stage in _STAGES for row in _timm_stage(stage)),
        *norm_rows("head.norm", "norm"),
        *dense_rows("head.fc", "head", is_head=True),
    ),
)
TORCHVISION_CONVNEXT = Layout(
    name="torchvision ConvNeXt",
    marks=("features.0.0.weight", "features.1.0.block.5.weight"),
    rows=(
        *_stem("features.0.0", "features.0.1"),
        *(row for stage in _STAGES for row in _torchvision_stage(stage)),
        *norm_rows("classifier.0", "norm"),
        *dense_rows("classifier.2", "head", is_head=True),
    ),
)
