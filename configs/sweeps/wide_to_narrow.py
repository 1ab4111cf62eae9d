"""Whether a network that starts wide ends better than one that always had its width.

    python -m prunex_jax sweep --sweep=configs/sweeps/wide_to_narrow.py \\
        --workdir=runs/sweeps --seeds=0

The data, length and hosts of `cifar10_coarse.py`. ResNet-20 starts at twice its width;
half of its channels are cut out after 26 % of the run, and the standard network trains
on. Rates stay at their peak until half of the run, also for what it is compared with.
All rows exchange every 4 steps 64 of 4,096 numbers in two bits. Accuracies are those of
the validation split.
"""

from typing import Any

from cifar10 import TRAINING
from cifar10_coarse import COARSE
from rows import HOSTS

from prunex_jax.compare.sweep.study import Row, Sweep, variant_row

# For a quarter of the run the wide network is 3.6 times the work: 1.7 runs in all. Its
# own teacher is asked in half of the run, which is as much as 0.65 of one more.
_EPOCHS_OF_AS_MUCH_WORK = 52.0
_RATE = {"optimizer.flat_share": 0.5}
_CUT = {
    "sparsity.num_stairs": 1,
    "sparsity.start_share": 0.25,
    "sparsity.freeze_share": 0.26,
    "sparsity.shrink_share": 0.26,
    "run.reestimate_batches": 32,
}
_TAUGHT = {"distill.teacher": "self", "distill.until_share": 0.8}


def get_study() -> Sweep:
    return Sweep(
        name="wide-to-narrow",
        config="../cifar10_resnet20_dense.py",
        settings={**HOSTS, **TRAINING, **COARSE},
        rows=make_rows(),
        baselines=("standard", "small"),
        split="validation",
    )


def make_rows() -> tuple[Row, ...]:
    more = {"run.epochs": _EPOCHS_OF_AS_MUCH_WORK}
    return (
        _whole("standard", "the standard network"),
        _whole("standard-longer", "the same, for as much work", **more),
        _cut("wide", "twice the width, then the standard one", 2.0),
        _cut("wide-taught", "the same, taught by itself", 2.0, **_TAUGHT),
        _whole("small", "half of the width", **{"model.width": 0.5}),
        _cut("half", "the standard network, then half of the width", 1.0),
        _cut("half-taught", "the same, taught by itself", 1.0, **_TAUGHT),
    )


def _whole(name: str, title: str, **settings: Any) -> Row:
    """A network that keeps its width, trained by local SGD."""
    return variant_row("local-sgd-4-top64", name, title, **_RATE, **settings)


def _cut(name: str, title: str, width: float, **settings: Any) -> Row:
    """A network that loses half of its channels, trained by H-SADMM."""
    return variant_row(
        "hsadmm-4-top64",
        name,
        title,
        **{"model.width": width, **_RATE, **_CUT, **settings},
    )
