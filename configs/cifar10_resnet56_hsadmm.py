"""ResNet-56 on CIFAR-10 with H-SADMM, against the published figures of DepGraph.

DepGraph (Fang et al., 2023) prunes a trained ResNet-56 of 93.53 % to 2.13 times fewer
multiply-accumulates at 93.77 %, and to 2.57 times fewer at 93.64 %. Here one run
trains, prunes and goes on small, over hosts that meet every 8 steps.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet56 \\
        --config=configs/cifar10_resnet56_hsadmm.py

    ...:2.57    for 2.57 times fewer; 1 is dense averaging, the baseline

Hardware: one to sixteen GPUs; --config.model.compute_dtype=float32 where they have no
bfloat16. Result: not measured yet.
"""

import cifar10_resnet20_hsadmm
import ml_collections


def get_config(times_fewer: str = "2.13") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config()
    config.model.name = "resnet56"
    config.model.compute_dtype = "bfloat16"
    config.optimizer.label_smoothing = 0.0
    config.method.wire_dtype = "int8"
    config.sparsity.unit = "macs"
    config.sparsity.budget = "global"
    config.sparsity.sparsity = 1 - 1 / float(times_fewer)
    config.sparsity.start_share = 0.05
    config.sparsity.freeze_share = 0.3
    config.sparsity.shrink_share = 0.3
    config.run.epochs = 200.0
    config.run.eval_every_steps = 3000
    if float(times_fewer) == 1:
        config.method.name = "dense"
        config.method.wire_dtype = "float32"
    return config
