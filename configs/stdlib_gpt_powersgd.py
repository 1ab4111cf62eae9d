"""A small GPT on the source of Python's standard library, PowerSGD of rank 4.

Gradients of kernels cross between hosts as products of two thin factors in every step,
with error feedback; nothing is pruned.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_powersgd \\
        --config=configs/stdlib_gpt_powersgd.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what dense
averaging, local SGD, DiLoCo and H-SADMM end at.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "powersgd"
    config.method.wire_dtype = "float32"
    config.method.powersgd.rank = 4
    return config
