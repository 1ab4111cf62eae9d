"""Trains networks across slow links between hosts, sending only what matters.

The names below are what most programs need; they are imported when first used, so that
`import prunex_jax` costs nothing. The trainer is `prunex_jax.train.train`, the commands
are those of `prunex-jax --help`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunex_jax.base.errors import UserError
    from prunex_jax.channels import trace_channels
    from prunex_jax.comm import Wire
    from prunex_jax.export import export_model, read_model
    from prunex_jax.mesh import MeshAxes
    from prunex_jax.methods import (
        METHODS,
        average_gradients,
        dgc,
        hsadmm,
        importance,
        kept_channels,
        pactrain,
        powersgd,
        register_method,
        topk,
    )
    from prunex_jax.pruner import prune, prune_iteratively
    from prunex_jax.shrink import certify, make_cut, repair
    from prunex_jax.sparsity import project_channels
    from prunex_jax.train.build.config import default_config

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "MeshAxes",
    "UserError",
    "Wire",
    "average_gradients",
    "certify",
    "default_config",
    "dgc",
    "export_model",
    "hsadmm",
    "importance",
    "kept_channels",
    "make_cut",
    "pactrain",
    "powersgd",
    "project_channels",
    "prune",
    "prune_iteratively",
    "read_model",
    "register_method",
    "repair",
    "topk",
    "trace_channels",
]
# Module -> the public names in it, as type checkers see them above.
_HOMES = {
    "base.errors": ("UserError",),
    "channels": ("trace_channels",),
    "comm": ("Wire",),
    "export": ("export_model", "read_model"),
    "mesh": ("MeshAxes",),
    "methods": (
        *("METHODS", "average_gradients", "dgc", "hsadmm", "importance"),
        *("kept_channels", "pactrain", "powersgd", "register_method", "topk"),
    ),
    "pruner": ("prune", "prune_iteratively"),
    "shrink": ("certify", "make_cut", "repair"),
    "sparsity": ("project_channels",),
    "train.build.config": ("default_config",),
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
