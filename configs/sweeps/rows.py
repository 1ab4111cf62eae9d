"""Rows that sweeps share: every method as it is compared at half of the channels."""

import dataclasses
from typing import Any

from prunex_jax.compare.sweep.study import Row, variant_row, variant_rows

HOSTS = {"topology.layout": "4", "topology.cpu_devices": 4}
DENSE = variant_row("dense", label="dense, every step")


def hsadmm(name: str, title: str, sync_period: int, **changes: Any) -> Row:
    """A row of H-SADMM in int8; changes are settings with `__` for dots."""
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    period = {"method.hsadmm.sync_period": sync_period}
    return variant_row("hsadmm-16", name, title, **period, **settings)


def by_sparsity(*percents: int) -> tuple[Row, ...]:
    """H-SADMM every 10 steps that removes these shares of the channels."""
    return tuple(
        hsadmm(
            f"hsadmm-10-{percent}",
            f"H-SADMM, every 10 steps, int8, {percent} % of the channels removed",
            10,
            sparsity__sparsity=percent / 100,
            # The share itself: multiples of 8 would leave more than it says.
            sparsity__round_to=1,
        )
        for percent in percents
    )


def go_on_small(*rows: Row) -> tuple[Row, ...]:
    """The rows, of which those that prune train the small network on, once frozen."""

    def small(settings: dict[str, Any]) -> dict[str, Any]:
        if settings["method.name"] != "hsadmm":
            return settings
        return settings | {"sparsity.shrink_share": settings["sparsity.freeze_share"]}

    return tuple(
        dataclasses.replace(row, settings=small({**row.settings})) for row in rows
    )


def references(width: float = 1.0) -> tuple[Row, ...]:
    """What H-SADMM is measured by: dense, the same pruning in every step, and small.

    The small network is as wide as what pruning leaves of one of the given width. It
    exchanges in every step, and as rarely and narrowly as H-SADMM does.
    """
    small, title = {"model.width": width / 2}, "small network from scratch"
    return (
        DENSE,
        variant_row("every-step"),
        variant_row("dense", "small", f"{title}, every step", **small),
        variant_row(
            "local-sgd-10-int8",
            "small-10",
            f"{title}, local SGD, every 10 steps, int8",
            **small,
        ),
    )


def small_for_as_much_work(epochs: float, width: float = 1.0) -> Row:
    """The small network, trained for so many epochs: as much work as H-SADMM's."""
    return variant_row(
        "dense",
        "small-longer",
        f"small network from scratch, every step, {epochs:g} epochs",
        **{"model.width": width / 2, "run.epochs": epochs},
    )


def every_10_or_16() -> tuple[Row, ...]:
    """H-SADMM at its defaults, rarely and in int8: under 1/100 of the bytes."""
    return variant_rows("hsadmm-10", "hsadmm-16")


def other_methods() -> tuple[Row, ...]:
    """Every other method at the settings of its config."""
    return (
        variant_row("local-sgd-8-int8", "local-sgd"),
        # As few bytes as H-SADMM sends every 10 steps.
        variant_row("local-sgd-32-int8", "local-sgd-32"),
        *variant_rows("local-sgd-4-top64", "local-sgd-16-top64"),
        # A twentieth of what was not sent is lost in every round.
        variant_row(
            "local-sgd-4-top64",
            "local-sgd-4-top64-decay",
            "local SGD, every 4 steps, 64 of 4,096 numbers, int2, errors decay",
            **{"method.rounds.error_decay": 0.95},
        ),
        variant_row("diloco-8-int8", "diloco"),
        *variant_rows("pactrain", "topk", "dgc", "powersgd", "importance"),
    )
