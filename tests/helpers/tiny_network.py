"""Puts `tiny` into the table of networks: two residual blocks, which compile quickly.

Tests import it, and so do the config files of processes that tests start.
"""

import functools

from prunex_jax.models import MODELS
from prunex_jax.models.resnet import make_resnet_spec

MODELS.setdefault(
    "tiny",
    functools.partial(make_resnet_spec, stage_blocks=(1, 1), stage_widths=(8, 16)),
)
