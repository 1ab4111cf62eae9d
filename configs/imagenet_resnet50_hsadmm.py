"""ResNet-50 on ImageNet with H-SADMM, half of the channels kept, for GPU clusters.

ImageNet is read as TFDS has prepared it in ArrayRecord form, and decoded by Grain's
worker processes.

    srun python -m prunex_jax.train --workdir=/shared/runs/imagenet_resnet50 \\
        --config=configs/imagenet_resnet50_hsadmm.py --config.data.dir=/shared/tfds

Hardware: meant for 4 or more hosts of 4 or 8 GPUs. Result: not measured yet.
"""

import ml_collections

from prunex_jax.train.build.config import default_config


def get_config() -> ml_collections.ConfigDict:
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.batch_size = 1024
    config.data.augment = "random_resized_crop"
    config.data.image_size = 224
    config.data.validation_share = 0.01
    config.data.loader = "grain"
    config.data.num_workers = 16
    config.model.name = "resnet50"
    config.model.stem = "imagenet"
    config.model.compute_dtype = "bfloat16"
    # 0.1 per 256 images (Goyal et al., 2017).
    config.optimizer.learning_rate = 0.4
    config.optimizer.weight_decay = 1e-4
    config.optimizer.label_smoothing = 0.1
    config.sparsity.sparsity = 0.5
    config.method.name = "hsadmm"
    config.method.hsadmm.sync_period = 8
    config.run.epochs = 90.0
    config.run.log_every_steps = 100
    config.run.eval_every_steps = 5000
    config.run.checkpoint_every_steps = 2000
    return config
