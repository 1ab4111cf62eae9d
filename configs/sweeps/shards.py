"""Hosts whose data differ: H-SADMM with and without duals beside local SGD.

    python -m prunex_jax sweep --sweep=configs/sweeps/shards.py --workdir=runs/sweeps

The network of `cifar10_short.py`. Every host sees only its own shard: classes sorted
over the hosts, or mixed by a Dirichlet distribution with alpha 0.3. Where data differ,
duals are said to help, and batch statistics differ between hosts too.
"""

import dataclasses

from cifar10_short import SETTINGS
from rows import DENSE, hsadmm

from prunex_jax.compare.sweep.study import Row, Sweep, variant_row

PERIOD = 8
SHARDS = ("label_sorted", "dirichlet")


def get_study() -> Sweep:
    return Sweep(
        name="shards",
        config="../cifar10_resnet20_dense.py",
        settings=SETTINGS,
        rows=tuple(on(shards, row) for shards in SHARDS for row in make_rows()),
        baselines=tuple(f"local-sgd-{dashed(shards)}" for shards in SHARDS),
        health_rows=tuple(
            f"{form}-{dashed(shards)}"
            for shards in SHARDS
            for form in ("reset", "leaky")
        ),
    )


def make_rows() -> tuple[Row, ...]:
    return (
        DENSE,
        variant_row("local-sgd-8-int8", "local-sgd"),
        hsadmm(
            "reset",
            "H-SADMM without duals, every 8 steps, int8",
            PERIOD,
            method__hsadmm__preset="reset",
        ),
        hsadmm("recommended", "the same with outer momentum", PERIOD),
        hsadmm(
            "leaky",
            "H-SADMM with a leaky dual, every 8 steps, int8",
            PERIOD,
            method__hsadmm__preset="leaky",
        ),
        hsadmm(
            "paper",
            "H-SADMM with both duals, every 8 steps, int8",
            PERIOD,
            method__hsadmm__preset="paper",
        ),
    )


def on(shards: str, row: Row) -> Row:
    """The row with data dealt that way."""
    return dataclasses.replace(
        row,
        name=f"{row.name}-{dashed(shards)}",
        label=f"{shards.replace('_', ' ')}: {row.label}",
        settings={**row.settings, "data.shards": shards},
    )


def dashed(shards: str) -> str:
    return shards.replace("_", "-")
