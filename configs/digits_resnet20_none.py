"""ResNet-20 on handwritten digits, no exchange between hosts.

An upper bound on speed: every host trains a network of its own on its share of the
data, and that of the first is evaluated.

    python -m prunex_jax.train --workdir=runs/digits_none \\
        --config=configs/digits_resnet20_none.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "none"
    return config
