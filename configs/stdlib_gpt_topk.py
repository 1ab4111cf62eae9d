"""A small GPT on the source of Python's standard library, Top-K with error feedback.

Every host sends the largest one in a hundred entries of its gradient in every step, and
keeps the rest for later; nothing is pruned.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_topk \\
        --config=configs/stdlib_gpt_topk.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what dense
averaging, local SGD, DiLoCo and H-SADMM end at.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "topk"
    config.method.wire_dtype = "float32"
    config.method.topk.density = 0.01
    return config
