"""Why the textbook form of H-SADMM loses: its forms side by side, with their health.

    python -m prunex_jax sweep --sweep=configs/sweeps/forms.py --workdir=runs/sweeps

The network and data of `cifar10_short.py`. From the textbook form to the default, one
change at a time; accuracies are of the validation split, because defaults are chosen by
them.
"""

from cifar10_short import SETTINGS
from rows import hsadmm

from prunex_jax.compare.sweep.study import Row, Sweep

PERIOD = 16


def get_study() -> Sweep:
    rows = make_rows()
    return Sweep(
        name="forms",
        config="../cifar10_resnet20_dense.py",
        settings=SETTINGS,
        rows=rows,
        baselines=("reset",),
        split="validation",
        health_rows=tuple(row.name for row in rows),
    )


def make_rows() -> tuple[Row, ...]:
    def form(name: str, title: str, **changes: object) -> Row:
        return hsadmm(name, title, PERIOD, **prefixed(changes))

    return (
        form("reset", "copies set to z, no dual", preset="reset"),
        form("recommended", "the same, z takes a Nesterov step"),
        form("paper", "textbook: two levels, both duals", preset="paper"),
        form("one-level", "textbook, one level", preset="paper", rho_host=0.0),
        form(
            "no-dual",
            "a pull in every step, no dual",
            preset="paper",
            rho_host=0.0,
            dual_decay=0.0,
        ),
        form(
            "full-dual", "a pull per round, full dual", preset="leaky", dual_decay=1.0
        ),
        form("leaky", "a pull per round, leaky dual", preset="leaky"),
    )


def prefixed(changes: dict[str, object]) -> dict[str, object]:
    return {f"method__hsadmm__{key}": value for key, value in changes.items()}
