"""A small GPT on the source of Python's standard library, local SGD.

Hosts train alone for 8 steps, and average.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_local_sgd \\
        --config=configs/stdlib_gpt_local_sgd.py

Hardware: two CPU cores. Result: not measured in float32. In int8 over 4 hosts of one
device, test bits per byte 2.337 with seed 0, where dense averaging ends at 2.221
(docs/results/accuracy.md), by

    python -m prunex_jax sweep --sweep=configs/sweeps/stdlib_gpt.py \\
        --rows=local-sgd --seeds=0 --workdir=runs/sweeps
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "local_sgd"
    config.method.wire_dtype = "float32"
    return config
