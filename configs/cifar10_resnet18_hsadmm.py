"""ResNet-18 on CIFAR-10 with H-SADMM, against the published figures of PowerSGD.

PowerSGD of rank 2 (Vogels et al., 2019) reaches 94.4 % on 16 GPUs while it sends 136
times fewer bytes than dense averaging, 300 epochs of 128 images per GPU. Here hosts
meet every 16 steps and send half of the channels in one byte per number.

    python -m prunex_jax.train --workdir=runs/cifar10_resnet18 \\
        --config=configs/cifar10_resnet18_hsadmm.py

    ...:params      a quarter of the parameters stays, chosen by what they are worth
    ...:macs        half of every layer stays, a quarter of the multiply-accumulates
    ...:bytes       as params, in four bits and from every 4 steps
    ...:powersgd    the published method in this package; ...:dense averages densely

In `params`, `macs` and `bytes` hosts meet often while the learning rate is high, and
rarer as it falls; what reads removed channels is repaired when they go.

Hardware: four or more GPUs on several hosts. Result: not measured at this size; these
three on a coarse form at half of the width over 10 epochs: "When to meet, and which
channels" in docs/results/accuracy.md.
"""

from typing import Any

import cifar10_resnet20_hsadmm
import ml_collections

# What goes, and how hosts meet, by name: settings of sparsity, then of H-SADMM.
_RANKED = {"budget": "global", "unit": "params", "sparsity": 0.75}
_FORMS: dict[str, tuple[dict[str, Any], int, str]] = {
    "params": (_RANKED, 2, "int8"),
    "macs": ({"sparsity": 0.5}, 2, "int8"),
    "bytes": (_RANKED, 4, "int4"),
}


def get_config(method: str = "hsadmm") -> ml_collections.ConfigDict:
    config = cifar10_resnet20_hsadmm.get_config()
    config.data.batch_size = 512
    config.model.name = "resnet18"
    config.model.compute_dtype = "bfloat16"
    config.optimizer.learning_rate = 0.2
    config.optimizer.weight_decay = 1e-4
    config.method.name = "hsadmm" if method in _FORMS else method
    config.run.epochs = 300.0
    config.run.eval_every_steps = 2000
    if method == "powersgd":
        config.method.powersgd.rank = 2
    if config.method.name == "hsadmm":
        config.method.hsadmm.sync_period = 16
        config.method.wire_dtype = "int8"
        config.sparsity.start_share = 0.02
        config.sparsity.freeze_share = 0.3
        config.sparsity.shrink_share = 0.3
    if method in _FORMS:
        which, period, wire_dtype = _FORMS[method]
        config.sparsity.update(which, criterion="taylor", repair_batches=4)
        config.method.rounds.sync_rule = "quadratic"
        config.method.hsadmm.sync_period = period
        config.method.wire_dtype = wire_dtype
    return config
