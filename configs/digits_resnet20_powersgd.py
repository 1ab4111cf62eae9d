"""ResNet-20 on handwritten digits with PowerSGD of rank 2.

Gradients of kernels cross between hosts as products of two thin factors in every step,
with error feedback; nothing is pruned.

    python -m prunex_jax.train --workdir=runs/demo_powersgd \\
        --config=configs/digits_resnet20_powersgd.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "powersgd"
    config.method.powersgd.rank = 2
    return config
