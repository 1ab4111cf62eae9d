"""Accuracy per byte on CIFAR-10: ResNet-20, 4 hosts, 30 epochs, every method, 3 seeds.

    python -m prunex_jax sweep --sweep=configs/sweeps/cifar10.py --workdir=runs/sweeps

Hosts are simulated on the CPU. One GPU can do it too:

    --config.topology.cpu_devices=0 --config.topology.layout=auto \\
        --config.topology.simulated=4x1

On 4 or more real hosts, start every row by its own command, which --dry_run prints.
CIFAR-10 is read as TFDS has prepared it;
--config.data.dir names its data directory. `cifar10_short.py` is the same in minutes.
"""

from rows import (
    HOSTS,
    by_sparsity,
    every_10_or_16,
    go_on_small,
    other_methods,
    references,
)

from prunex_jax.compare.sweep.study import Sweep

TRAINING = {
    "data.eval_batch_size": 500,
    "run.epochs": 30.0,
    "run.eval_every_steps": 700,
    "run.checkpoint_every_steps": 700,
}


def get_study() -> Sweep:
    return Sweep(
        name="cifar10",
        config="../cifar10_resnet20_dense.py",
        settings={**HOSTS, **TRAINING},
        rows=(
            *go_on_small(*references(), *every_10_or_16(), *by_sparsity(30, 70)),
            *other_methods(),
        ),
        baselines=("dense", "every-step", "small"),
        health_rows=("hsadmm-10", "hsadmm-16"),
    )
