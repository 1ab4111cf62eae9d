"""ViT-Ti on CIFAR-10, dense: the baseline of cifar10_vit_ti_hsadmm.

    python -m prunex_jax.train --workdir=runs/cifar10_vit_ti_dense \\
        --config=configs/cifar10_vit_ti_dense.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet.
"""

import cifar10_vit_ti_hsadmm
import ml_collections


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = cifar10_vit_ti_hsadmm.get_config(simulated)
    config.method.name = "dense"
    config.method.wire_dtype = "float32"
    config.sparsity.shrink_share = 1.0
    return config
