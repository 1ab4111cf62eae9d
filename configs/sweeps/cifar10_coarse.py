"""Accuracy per byte on CIFAR-10 seen coarsely: ResNet-20, 4 hosts, 30 epochs.

    python -m prunex_jax sweep --sweep=configs/sweeps/cifar10_coarse.py \\
        --workdir=runs/sweeps

What `cifar10.py` asks, where there is no GPU: the stem for large images, with its
stride of 4, leaves the same 20 layers a thirteenth of the work, so that two CPU cores
train 30 epochs in a quarter of an hour. Accuracies are those of coarse images, well
below those of `cifar10.py`; differences between rows are what it is for.
CIFAR-10 is read as TFDS has prepared it; --config.data.dir names its data directory.
"""

from cifar10 import TRAINING
from rows import (
    HOSTS,
    by_sparsity,
    every_10_or_16,
    go_on_small,
    other_methods,
    references,
    small_for_as_much_work,
)

from prunex_jax.compare.sweep.study import Sweep

COARSE = {"model.stem": "imagenet", "run.eval_every_steps": 1400}


def get_study() -> Sweep:
    return Sweep(
        name="cifar10-coarse",
        config="../cifar10_resnet20_dense.py",
        settings={**HOSTS, **TRAINING, **COARSE},
        rows=(
            *go_on_small(*references(), *every_10_or_16(), *by_sparsity(30)),
            # H-SADMM's forward passes cost 0.580 of dense, and those of a small network
            # that trains 30 epochs 0.298.
            small_for_as_much_work(epochs=58.4),
            *other_methods(),
        ),
        baselines=("dense", "every-step", "small"),
        health_rows=("hsadmm-10", "hsadmm-16"),
    )
