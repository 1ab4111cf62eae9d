"""ResNet-20 on CIFAR-10 with deep gradient compression.

What the paper does on CIFAR-10: one in a thousand entries, after a warm-up of 4 epochs
of 164.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet20_dgc \\
        --config=configs/cifar10_resnet20_dgc.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet; between M hosts, 0.001 M of the dense bytes after the warm-up.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config(simulated)
    config.method.name = "dgc"
    config.method.dgc.density = 0.001
    config.method.dgc.warmup_share = 4 / 164
    return config
