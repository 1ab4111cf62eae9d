"""ResNet-18 on CIFAR-10 with H-SADMM, against the published figures of PowerSGD.

PowerSGD of rank 2 (Vogels et al., 2019) reaches 94.4 % on 16 GPUs while it sends 136
times fewer bytes than dense averaging, 300 epochs of 128 images per GPU. Here hosts
meet every 16 steps and send half of the channels in one byte per number.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet18 \\
        --config=configs/cifar10_resnet18_hsadmm.py

    ...:powersgd    the published method in this package; ...:dense averages densely

Hardware: four or more GPUs on several hosts. Result: not measured yet.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(method: str = "hsadmm") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config()
    config.data.batch_size = 512
    config.model.name = "resnet18"
    config.model.compute_dtype = "bfloat16"
    config.optimizer.learning_rate = 0.2
    config.optimizer.weight_decay = 1e-4
    config.method.name = method
    config.run.epochs = 300.0
    config.run.eval_every_steps = 2000
    if method == "powersgd":
        config.method.powersgd.rank = 2
    if method == "hsadmm":
        config.method.hsadmm.sync_period = 16
        config.method.wire_dtype = "int8"
        config.sparsity.start_share = 0.02
        config.sparsity.freeze_share = 0.3
        config.sparsity.shrink_share = 0.3
    return config
