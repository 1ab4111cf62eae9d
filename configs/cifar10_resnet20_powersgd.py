"""ResNet-20 on CIFAR-10 with PowerSGD of rank 2: as cifar10_resnet20_dense otherwise.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet20_powersgd \\
        --config=configs/cifar10_resnet20_powersgd.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config(simulated)
    config.method.name = "powersgd"
    config.method.powersgd.rank = 2
    return config
