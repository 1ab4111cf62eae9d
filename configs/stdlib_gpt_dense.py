"""A small GPT on the source of Python's standard library, dense averaging.

The baseline: gradients are averaged over hosts in every step.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_dense \\
        --config=configs/stdlib_gpt_dense.py

Hardware: two CPU cores. Result: not measured yet.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "dense"
    config.method.wire_dtype = "float32"
    return config
