"""Exports a function as a folder that runs without this package, and reads it back.

In come any function of JAX, its parameters, example inputs and the certificate of its
cut; out comes a folder of arrays, a StableHLO program and a manifest:

    folder     the files: written whole or not at all, and checked before they are used
    program    the function as StableHLO of any batch size, through `jax.export`
    onnx       the same as a program of ONNX, through the package jax2onnx

It knows no trainer: `train.export` exports a run.
"""

from prunex_jax.export.folder import ExportedModel, export_model, read_model
from prunex_jax.export.program import PLATFORMS

__all__ = ["PLATFORMS", "ExportedModel", "export_model", "read_model"]
