"""ResNet-20 on handwritten digits, DiLoCo.

Hosts train alone for 8 steps; a Nesterov step follows their mean movement.

    python -m prunex_jax.train --workdir=runs/digits_diloco \\
        --config=configs/digits_resnet20_diloco.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "diloco"
    return config
