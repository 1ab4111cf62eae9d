"""ResNet-20 on handwritten digits with Top-K and error feedback.

Every host sends the largest one in a hundred entries of its gradient in every step, and
keeps the rest for later; nothing is pruned.

    python -m prunex_jax.train --workdir=runs/demo_topk \\
        --config=configs/digits_resnet20_topk.py

Hardware: two CPU cores. Result: see the table of methods in the README.
"""

import digits_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "2x2") -> ml_collections.ConfigDict:
    config = digits_resnet20_hsadmm.get_config(simulated)
    config.method.name = "topk"
    config.method.topk.density = 0.01
    return config
