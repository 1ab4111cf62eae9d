"""Accuracy per byte on CIFAR-10 in minutes: a small network, 2 epochs, 4 hosts.

    python -m prunex_jax sweep --sweep=configs/sweeps/cifar10_short.py \\
        --workdir=runs/sweeps

The narrow ResNet-18 of the studies of `prunex_jax.compare`, which two CPU cores train
with 100,000 images in two minutes. All rows are far from converged: this compares how
fast they learn per byte, not where they end. CIFAR-10 is read as TFDS has prepared it;
--config.data.dir names its data directory.
"""

from rows import HOSTS, every_10_or_16, other_methods, references

from prunex_jax.compare.sweep.study import Sweep

NETWORK = {"model.name": "resnet18", "model.width": 0.375, "model.stem": "imagenet"}
TRAINING = {
    "data.batch_size": 128,
    "data.augment": "none",
    "data.eval_batch_size": 500,
    "optimizer.warmup_share": 0.1,
    "run.epochs": 0.0,
    "run.steps": 768,
    "run.eval_every_steps": 192,
    "run.log_every_steps": 16,
    "run.checkpoint_every_steps": 0,
}
SETTINGS = {**HOSTS, **NETWORK, **TRAINING}


def get_study() -> Sweep:
    return Sweep(
        name="cifar10-short",
        config="../cifar10_resnet20_dense.py",
        settings=SETTINGS,
        rows=(*references(NETWORK["model.width"]), *every_10_or_16(), *other_methods()),
        baselines=("dense", "every-step", "small"),
        health_rows=("hsadmm-10", "hsadmm-16"),
    )
