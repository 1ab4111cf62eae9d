"""Rows that sweeps share: every method as it is compared at half of the channels."""

import dataclasses
from typing import Any

from prunex_jax.bench.study import Row

HALF = {"sparsity.sparsity": 0.5}
# Pruning ends at 40 % of the run: most of it is sent, and computed, small.
SCHEDULE = {"sparsity.start_share": 0.05, "sparsity.freeze_share": 0.4}
DENSE = Row("dense", "dense, every step", {"method.name": "dense"})


def local_sgd(name: str = "local-sgd", sync_period: int = 8) -> Row:
    """A row of local SGD in int8."""
    settings = {
        "method.name": "local_sgd",
        "method.local_sgd.sync_period": sync_period,
        "method.wire_dtype": "int8",
    }
    return Row(name, f"local SGD, every {sync_period} steps, int8", settings)


def hsadmm(name: str, title: str, sync_period: int, **changes: Any) -> Row:
    """A row of H-SADMM; changes are settings with `__` for dots."""
    settings = {
        "method.name": "hsadmm",
        **HALF,
        **SCHEDULE,
        "method.hsadmm.sync_period": sync_period,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return Row(name, title, settings)


def every_10_or_16() -> tuple[Row, ...]:
    """H-SADMM at its defaults, rarely and in int8: under 1/100 of the bytes."""
    return tuple(
        hsadmm(
            f"hsadmm-{period}",
            f"H-SADMM, every {period} steps, int8",
            period,
            method__wire_dtype="int8",
        )
        for period in (10, 16)
    )


def by_sparsity(*percents: int) -> tuple[Row, ...]:
    """H-SADMM every 10 steps that removes these shares of the channels: one curve."""
    rows = (
        hsadmm(
            f"hsadmm-10-{percent}",
            f"H-SADMM, every 10 steps, int8, {percent} % of the channels removed",
            10,
            method__wire_dtype="int8",
            sparsity__sparsity=percent / 100,
            # The share itself: multiples of 8 would leave more than it says.
            sparsity__round_to=1,
        )
        for percent in percents
    )
    curve = "H-SADMM, every 10 steps"
    return tuple(dataclasses.replace(row, curve=curve) for row in rows)


def go_on_small(*rows: Row) -> tuple[Row, ...]:
    """The rows, of which those that prune train the small network on, once frozen."""
    settings = {"sparsity.shrink_share": SCHEDULE["sparsity.freeze_share"]}
    return tuple(
        dataclasses.replace(row, settings={**row.settings, **settings})
        if row.settings["method.name"] == "hsadmm"
        else row
        for row in rows
    )


def references(width: float = 1.0) -> tuple[Row, ...]:
    """What H-SADMM is measured by: dense, the same pruning in every step, and small.

    The small network is as wide as what pruning leaves of one of the given width. It
    exchanges in every step, and as rarely and narrowly as H-SADMM does.
    """
    small = {"model.width": width / 2}
    return (
        DENSE,
        hsadmm(
            "every-step",
            "the same pruning, float32, every step",
            1,
            method__hsadmm__preset="reset",
        ),
        Row(
            "small",
            "small network from scratch, every step",
            {"method.name": "dense", **small},
        ),
        Row(
            "small-10",
            "small network from scratch, local SGD, every 10 steps, int8",
            {**local_sgd(sync_period=10).settings, **small},
        ),
    )


def other_methods() -> tuple[Row, ...]:
    """Every other method at the settings of its config."""
    return (
        local_sgd(),
        # As few bytes as H-SADMM sends every 10 steps.
        local_sgd("local-sgd-32", 32),
        Row(
            "diloco",
            "DiLoCo, every 8 steps, int8",
            {**local_sgd().settings, "method.name": "diloco"},
        ),
        Row(
            "pactrain",
            "PacTrain, half of the channels",
            {**HALF, "method.name": "pactrain"},
        ),
        Row("topk", "Top-K, 1 %", {"method.name": "topk"}),
        Row("dgc", "DGC, 0.1 %", {"method.name": "dgc"}),
        Row("powersgd", "PowerSGD, rank 2", {"method.name": "powersgd"}),
        Row(
            "importance",
            "importance, 1 %, one choice in 4 steps",
            {"method.name": "importance", "method.importance.refresh_period": 4},
        ),
    )
