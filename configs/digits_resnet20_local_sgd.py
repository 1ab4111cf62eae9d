"""ResNet-20 on handwritten digits, local SGD.

Hosts train alone for 8 steps, then their networks are averaged.

    python -m prunex_jax.train --workdir=runs/digits_local_sgd \\
        --config=configs/digits_resnet20_local_sgd.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "local_sgd"
    return config
