"""A small GPT on the source of Python's standard library, dense averaging.

The baseline: gradients are averaged over hosts in every step.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_dense \\
        --config=configs/stdlib_gpt_dense.py

Hardware: two CPU cores. Result: not measured on 2x2. Over 4 hosts of one device, test
bits per byte 2.221, 2.228 and 2.225 with seeds 0, 1 and 2
(docs/results/accuracy.md), by

    python -m prunex_jax sweep --sweep=configs/sweeps/stdlib_gpt.py \\
        --rows=dense --seeds=0,1,2 --workdir=runs/sweeps
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "dense"
    config.method.wire_dtype = "float32"
    return config
