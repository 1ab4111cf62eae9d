"""A small GPT on the source of Python's standard library, PacTrain.

Heads, their features, hidden units and the stream lose 30 % before the first step,
chosen by gradient flow on the first batches; the gradients of the others are packed and
averaged in every step, and the network is small at the end.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_pactrain \\
        --config=configs/stdlib_gpt_pactrain.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what dense
averaging, local SGD, DiLoCo and H-SADMM end at.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "pactrain"
    config.method.wire_dtype = "float32"
    return config
