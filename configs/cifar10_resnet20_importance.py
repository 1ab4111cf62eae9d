"""ResNet-20 on CIFAR-10 with importance-weighted pruning.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet20_importance \\
        --config=configs/cifar10_resnet20_importance.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config(simulated)
    config.method.name = "importance"
    config.method.importance.density = 0.01
    config.method.importance.refresh_period = 4
    return config
