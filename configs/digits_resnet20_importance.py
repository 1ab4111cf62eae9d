"""ResNet-20 on handwritten digits with importance-weighted pruning.

One host at a time chooses the 1 % of every layer whose held back gradient is largest
against the weight, and all hosts average there, for four steps.

    python -m prunex_jax.train --workdir=runs/demo_importance \\
        --config=configs/digits_resnet20_importance.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "importance"
    config.method.importance.density = 0.01
    config.method.importance.refresh_period = 4
    return config
