"""A vision transformer over 4 simulated hosts: accuracy against bytes over hosts.

    python -m prunex_jax sweep --sweep=configs/sweeps/cifar10_vit.py \\
        --workdir=runs/sweeps --config.data.dir=DIR

ViT-Ti on CIFAR-10 with patches of 16 pixels, four tokens and a class token: so coarse
that a run takes minutes on two cores, and so short that what regularises is left out.
"""

from typing import Any

from rows import HOSTS

from prunex_jax.compare.sweep.study import Row, Sweep, variant_row

# Features of heads and hidden units, but neither heads nor the stream.
_CUT = {
    "sparsity.scope": "inner",
    "sparsity.num_stairs": 3,
    "sparsity.start_share": 0.1,
    "sparsity.freeze_share": 0.4,
    "sparsity.shrink_share": 0.4,
}
# As wide as what is left at 30 %.
_SMALL = {"model.vit.head_width": 48, "model.vit.hidden": 536}


def get_study() -> Sweep:
    return Sweep(
        name="cifar10-vit",
        config="../cifar10_vit_ti_dense.py",
        settings={
            **HOSTS,
            "data.rand_augment_operations": 0,
            "data.mixup": 0.0,
            "model.vit.patch": 16,
            "model.vit.drop_path": 0.0,
            "run.epochs": 2.5,
            "run.eval_every_steps": 0,
        },
        rows=make_rows(),
        seeds=(0,),
        baselines=("dense", "small"),
        health_rows=("hsadmm-30",),
    )


def make_rows() -> tuple[Row, ...]:
    often = "every 4 steps, 64 of 4,096 numbers, int2"
    return (
        variant_row("dense", label="dense, every step"),
        variant_row("local-sgd-8-int8", "local-sgd"),
        variant_row("diloco-8-int8", "diloco"),
        _pruned("hsadmm-8-int8", "hsadmm-30", 30, "every 8 steps, int8"),
        _pruned("hsadmm-8-int8", "hsadmm-50", 50, "every 8 steps, int8"),
        _pruned("hsadmm-4-top64", "hsadmm-30-top64", 30, often),
        variant_row(
            "dense", "small", "small network from scratch, every step", **_SMALL
        ),
    )


def _pruned(variant: str, name: str, percent: int, how: str) -> Row:
    """H-SADMM that removes a share of head features and hidden units."""
    title = f"H-SADMM, {percent} % of head features and hidden units removed, {how}"
    settings: dict[str, Any] = {**_CUT, "sparsity.sparsity": percent / 100}
    return variant_row(variant, name, title, **settings)
