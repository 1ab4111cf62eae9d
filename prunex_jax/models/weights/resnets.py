"""Residual networks of torchvision and timm, which have the same names.

References:
  https://docs.pytorch.org/vision/stable/models/resnet.html; timm, resnet.py.
"""

from collections.abc import Sequence

from prunex_jax.models.weights.table import CONV, Layout, Row, dense_rows, norm_rows


def _norm(there: str, here: str) -> tuple[Row, ...]:
    return (
        *norm_rows(there, here),
        Row(f"{there}.running_mean", f"{here}/mean"),
        Row(f"{there}.running_var", f"{here}/var"),
    )


def _stages(paths: Sequence[str]) -> dict[str, str]:
    """Block -> stage and block in it, as in `2.0`; blocks that project start stages.

    Example:
      >>> _stages(['blocks/0/conv1/kernel', 'blocks/1/shortcut/conv/kernel'])
      {'0': '1.0', '1': '2.0'}
    """
    split = [path.split("/") for path in paths if path.startswith("blocks/")]
    projecting = {keys[1] for keys in split if keys[2] == "shortcut"}
    stage, start, named = 1, 0, {}
    for number in range(len({keys[1] for keys in split})):
        if number and str(number) in projecting:
            stage, start = stage + 1, number
        named[str(number)] = f"{stage}.{number - start}"
    return named


RESNET = Layout(
    name="torchvision or timm ResNet",
    marks=("conv1.weight", "bn1.weight", "layer1.0.conv1.weight"),
    ignored=(r".*\.num_batches_tracked",),
    keys=_stages,
    rows=(
        Row("conv1.weight", "stem/conv/kernel", CONV),
        *_norm("bn1", "stem/norm"),
        Row("layer{b}.conv{i}.weight", "blocks/{b}/conv{i}/kernel", CONV),
        *_norm("layer{b}.bn{i}", "blocks/{b}/norm{i}"),
        Row("layer{b}.downsample.0.weight", "blocks/{b}/shortcut/conv/kernel", CONV),
        *_norm("layer{b}.downsample.1", "blocks/{b}/shortcut/norm"),
        *dense_rows("fc", "classifier", is_head=True),
    ),
)
