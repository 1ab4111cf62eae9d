"""ResNet-20 on CIFAR-10 with H-SADMM, half of the channels kept.

CIFAR-10 is read as TFDS has prepared it, without TensorFlow; --config.data.dir names
its data directory where that is not TFDS's own.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet20 \\
        --config=configs/cifar10_resnet20_hsadmm.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: any number of hosts whose devices divide the batch of 128. Result: not
measured yet.
"""

import ml_collections

from prunex_jax.train.build.config import default_config


def get_config(simulated: str = "") -> ml_collections.ConfigDict:
    config = default_config()
    if simulated:
        config.topology.layout = simulated
    config.data.name = "cifar10"
    config.data.batch_size = 128
    config.data.augment = "crop_flip"
    config.model.name = "resnet20"
    config.optimizer.learning_rate = 0.1
    config.optimizer.weight_decay = 5e-4
    config.sparsity.sparsity = 0.5
    config.method.name = "hsadmm"
    config.method.hsadmm.sync_period = 8
    config.run.epochs = 100.0
    config.run.log_every_steps = 50
    config.run.eval_every_steps = 2000
    config.run.checkpoint_every_steps = 1000
    return config
