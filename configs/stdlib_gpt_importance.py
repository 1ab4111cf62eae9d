"""A small GPT on the source of Python's standard library, importance-weighted pruning.

One host at a time chooses the 1 % of every layer whose held back gradient is largest
against the weight, and all hosts average there, for four steps.

    python -m prunex_jax.train --workdir=runs/stdlib_gpt_importance \\
        --config=configs/stdlib_gpt_importance.py

Hardware: two CPU cores. Result: not measured. docs/results/accuracy.md has what dense
averaging, local SGD, DiLoCo and H-SADMM end at.
"""

import ml_collections
import stdlib_gpt_hsadmm


def get_config() -> ml_collections.ConfigDict:
    config = stdlib_gpt_hsadmm.get_config()
    config.method.name = "importance"
    config.method.wire_dtype = "float32"
    # The method holds momentum back itself, and so needs sgd.
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.3
    config.optimizer.weight_decay = 0.0
    config.method.importance.density = 0.01
    config.method.importance.refresh_period = 4
    return config
