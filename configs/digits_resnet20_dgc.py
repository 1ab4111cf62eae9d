"""ResNet-20 on handwritten digits with deep gradient compression.

Every host sends the largest one in a thousand entries of its momentum in every step,
after a warm-up in which it sends more; nothing is pruned.

    python -m prunex_jax.train --workdir=runs/demo_dgc \\
        --config=configs/digits_resnet20_dgc.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "dgc"
    config.method.dgc.density = 0.001
    return config
