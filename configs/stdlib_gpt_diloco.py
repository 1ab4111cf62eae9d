"""A small GPT on the source of Python's standard library, DiLoCo.

Hosts train alone for 8 steps; a Nesterov step follows their mean movement.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_diloco \\
        --config=configs/stdlib_gpt_diloco.py

Hardware: two CPU cores. Result: not measured in float32. In int8 over 4 hosts of one
device, test bits per byte 2.354 with seed 0, where dense averaging ends at 2.221
(docs/results/accuracy.md), by

    python -m prunex_jax sweep --sweep=configs/sweeps/stdlib_gpt.py \\
        --rows=diloco --seeds=0 --workdir=runs/sweeps
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "diloco"
    config.method.wire_dtype = "float32"
    # Near the optimum of the rate, the published outer step would be too long.
    config.method.rounds.outer = "law"
    return config
