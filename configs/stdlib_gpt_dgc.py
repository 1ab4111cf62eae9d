"""A small GPT on the source of Python's standard library, deep gradient compression.

Every host sends the largest one in a thousand entries of its momentum in every step,
after a warm-up in which it sends more; nothing is pruned.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_dgc \\
        --config=configs/stdlib_gpt_dgc.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what dense
averaging, local SGD, DiLoCo and H-SADMM end at.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "dgc"
    config.method.wire_dtype = "float32"
    # The method holds momentum back itself, and so needs sgd.
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.3
    config.optimizer.weight_decay = 0.0
    config.method.dgc.density = 0.001
    return config
