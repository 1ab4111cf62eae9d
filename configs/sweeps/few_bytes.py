"""Which form of a round sends the fewest bytes for its accuracy, on validation data.

    python -m prunex_jax sweep --sweep=configs/sweeps/few_bytes.py \\
        --workdir=runs/sweeps --seeds=0

The network, data and length of `cifar10_coarse.py`. Nothing is pruned: this compares
bytes alone, by accuracies of the validation split, because settings are chosen by them.
"""

from typing import Any

from cifar10 import TRAINING
from cifar10_coarse import COARSE
from rows import HOSTS

from prunex_jax.compare.sweep.study import Row, Sweep, variant_row


def get_study() -> Sweep:
    return Sweep(
        name="few-bytes",
        config="../cifar10_resnet20_dense.py",
        settings={**HOSTS, **TRAINING, **COARSE},
        rows=make_rows(),
        baselines=("int8-8",),
        split="validation",
    )


def make_rows() -> tuple[Row, ...]:
    return (
        variant_row("local-sgd-8-int8", "int8-8"),
        _rounds("int2-16", "every 16 steps", 16),
        _rounds("top64-4", "every 4 steps, 64 of 4,096", 4, top_k=64),
        _rounds("top64-16", "every 16 steps, 64 of 4,096", 16, top_k=64),
        _rounds(
            "top58-8-owners",
            "every 8 steps, 58 of 4,096, owners add up",
            8,
            top_k=58,
            top_k_route="owners",
        ),
        variant_row("local-sgd-32-int8", "int8-32"),
        # As many bytes as int8-8, and as int8-32.
        *_outer(8),
        *_outer(32),
    )


def _outer(period: int) -> tuple[Row, ...]:
    """DiLoCo in int8 with its published outer step and momentum, and by law."""
    rules = {"fixed": "outer step 0.7, momentum 0.9", "law": "outer step by law"}
    return tuple(
        variant_row(
            "diloco-8-int8",
            f"diloco-{period}-{rule}",
            f"DiLoCo, every {period} steps, {words}, int8",
            **{"method.local_sgd.sync_period": period, "method.rounds.outer": rule},
        )
        for rule, words in rules.items()
    )


def _rounds(name: str, title: str, period: int, **rounds: Any) -> Row:
    """Local SGD in two bits; keyword arguments are settings of `method.rounds`."""
    settings = {f"method.rounds.{key}": value for key, value in rounds.items()}
    return variant_row(
        "local-sgd-8-int2",
        name,
        f"local SGD, {title}, int2",
        **{"method.local_sgd.sync_period": period, **settings},
    )
