"""ResNet-20 on CIFAR-10 with Top-K and error feedback.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet20_topk \\
        --config=configs/cifar10_resnet20_topk.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet; between M hosts, 0.01 M of the dense bytes.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config(simulated)
    config.method.name = "topk"
    config.method.topk.density = 0.01
    return config
