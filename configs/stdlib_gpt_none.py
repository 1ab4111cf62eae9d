"""A small GPT on the source of Python's standard library, no exchange between hosts.

An upper bound on speed: every host trains a network of its own on its share of the
text, and that of the first is evaluated.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_none \\
        --config=configs/stdlib_gpt_none.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what dense
averaging, local SGD, DiLoCo and H-SADMM end at.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "none"
    config.method.wire_dtype = "float32"
    return config
