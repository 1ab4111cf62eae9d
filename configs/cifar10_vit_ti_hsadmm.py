"""ViT-Ti on CIFAR-10 with H-SADMM: 30 % of head features and MLPs removed.

Patches of 8 pixels, 16 tokens and a class token. The three heads stay, of which one
would be a third, and the stream stays at its width, which loses least accuracy;
--config.sparsity.scope=all cuts it as well.

    python -m prunex_jax.train --workdir=runs/cifar10_vit_ti \\
        --config=configs/cifar10_vit_ti_hsadmm.py

    ...:4x2     simulates 4 hosts x 2 devices on the CPU

Hardware: one to sixteen GPUs. Result: not measured yet.
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
    config.data.rand_augment_operations = 2
    config.data.mixup = 0.2
    config.model.name = "vit_ti"
    config.model.vit.patch = 8
    config.model.vit.drop_path = 0.1
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.weight_decay = 0.05
    config.optimizer.warmup_share = 0.1
    config.optimizer.clip_norm = 1.0
    config.sparsity.sparsity = 0.3
    config.sparsity.scope = "inner"
    config.sparsity.multiples = ("blocks/*/attention/query:3",)
    config.sparsity.num_stairs = 3
    config.sparsity.freeze_share = 0.4
    config.sparsity.shrink_share = 0.4
    config.method.name = "hsadmm"
    config.method.hsadmm.sync_period = 8
    config.method.wire_dtype = "int8"
    config.run.epochs = 100.0
    config.run.log_every_steps = 50
    config.run.eval_every_steps = 2000
    config.run.checkpoint_every_steps = 1000
    return config
