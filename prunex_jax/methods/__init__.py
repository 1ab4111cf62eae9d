"""The methods that can be compared: what is sent between hosts, and when.

In come a `Recipe` (settings, inner optimizer, channel groups, mesh axes); out comes a
`Method`, which the trainer runs. Every method is one file, or folder, with settings, an
optax transformation for anybody's training loop, its state, its traffic formula and its
row; `table` lists the rows, and `register_method` adds to them.
"""

from prunex_jax.methods.dense import average_gradients
from prunex_jax.methods.dgc import dgc
from prunex_jax.methods.hsadmm import hsadmm, kept_channels
from prunex_jax.methods.importance import importance
from prunex_jax.methods.method import (
    InnerState,
    Method,
    MethodConfig,
    MethodRow,
    Payload,
    Placements,
    Preparation,
    Pruning,
    Recipe,
    RoundKind,
    Rounds,
    StepOptions,
    Variant,
)
from prunex_jax.methods.pactrain import pactrain
from prunex_jax.methods.powersgd import powersgd
from prunex_jax.methods.table import (
    METHODS,
    all_variants,
    check_method,
    config_of,
    find_variants,
    load_plugins,
    make_method,
    method_config,
    register_method,
)
from prunex_jax.methods.topk import topk

__all__ = [
    "METHODS",
    "InnerState",
    "Method",
    "MethodConfig",
    "MethodRow",
    "Payload",
    "Placements",
    "Preparation",
    "Pruning",
    "Recipe",
    "RoundKind",
    "Rounds",
    "StepOptions",
    "Variant",
    "all_variants",
    "average_gradients",
    "check_method",
    "config_of",
    "dgc",
    "find_variants",
    "hsadmm",
    "importance",
    "kept_channels",
    "load_plugins",
    "make_method",
    "method_config",
    "pactrain",
    "powersgd",
    "register_method",
    "topk",
]
