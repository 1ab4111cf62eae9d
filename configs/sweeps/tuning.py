"""Which settings make H-SADMM win: one change at a time, on validation data.

    python -m prunex_jax sweep --sweep=configs/sweeps/tuning.py --workdir=runs/sweeps

The network and data of `cifar10_short.py`, hosts that meet every 16 steps in int8.
"""

from cifar10_short import SETTINGS
from rows import hsadmm

from prunex_jax.compare.sweep.study import Row, Sweep

PERIOD = 16


def get_study() -> Sweep:
    return Sweep(
        name="tuning",
        config="../cifar10_resnet20_dense.py",
        settings=SETTINGS,
        rows=make_rows(),
        baselines=("default",),
        split="validation",
    )


def make_rows() -> tuple[Row, ...]:
    def row(name: str, title: str, **changes: object) -> Row:
        return hsadmm(name, title, PERIOD, **changes)

    def outer(name: str, step: float, momentum: float) -> Row:
        return row(
            name,
            f"outer step {step}, momentum {momentum}",
            method__hsadmm__outer_step=step,
            method__hsadmm__outer_momentum=momentum,
        )

    def pruned(name: str, start: float, freeze: float, **changes: object) -> Row:
        return row(
            name,
            f"pruned from {start:g} to {freeze:g} of the run",
            sparsity__start_share=start,
            sparsity__freeze_share=freeze,
            **changes,
        )

    return (
        row("default", "default"),
        outer("outer-none", 1.0, 0.0),
        outer("outer-mild", 1.0, 0.5),
        outer("outer-long", 0.7, 0.9),
        pruned("pruned-at-once", 0.01, 0.03, sparsity__num_stairs=1),
        pruned("pruned-early", 0.02, 0.2),
        pruned("pruned-late", 0.1, 0.7),
        row("global", "global budget", sparsity__budget="global"),
        row("rate-low", "learning rate 0.05", optimizer__learning_rate=0.05),
        row("rate-high", "learning rate 0.2", optimizer__learning_rate=0.2),
        row("rewind", "rate starts over after pruning", optimizer__rewind_share=0.4),
        row("reestimate", "statistics of 8 batches", run__reestimate_batches=8),
    )
