"""ResNet-20 on CIFAR-10, no exchange between hosts.

An upper bound on speed: every host trains a network of its own on its share of the
data, and that of the first is evaluated.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet20_none \\
        --config=configs/cifar10_resnet20_none.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config(simulated)
    config.method.name = "none"
    return config
