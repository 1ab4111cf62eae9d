"""Exports a function as a folder that runs without this package, and reads it back.

    program    the function as StableHLO, through `jax.export`
    batching   for any number of examples, wherever that is possible
    manifest   what the folder says of itself
    folder     the files: written whole or not at all, and checked before they are used
    __main__   python -m prunex_jax export: of a run

`export_model` takes any function of JAX and knows nothing of the trainer.
"""

from prunex_jax.export.folder import ExportedModel, export_model, read_model
from prunex_jax.export.program import PLATFORMS

__all__ = ["PLATFORMS", "ExportedModel", "export_model", "read_model"]
