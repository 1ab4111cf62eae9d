"""Local SGD and DiLoCo: some steps alone, then an outer step along the mean movement.

They are forms of the core of H-SADMM in which nothing is pruned: copies start every
round from the consensus, which moves along the mean of how far they went. H-SADMM's
presets `reset` and `recommended` are the same on compact channels.
"""

import dataclasses
from typing import Any

from prunex_jax.base.settings import setting
from prunex_jax.methods.hsadmm.core import Hsadmm
from prunex_jax.methods.hsadmm.method import consensus_method, rounds_of, streaming_of
from prunex_jax.methods.hsadmm.presets import preset
from prunex_jax.methods.method import Method, MethodRow, Recipe, Variant


@dataclasses.dataclass(frozen=True)
class LocalSgdConfig:
    """Local steps, and an outer step of the mean."""

    # Steps between exchanges over the host axis; the fewest, by another `sync_rule`.
    sync_period: int = setting(8, at_least=1)
    # Outer step and Nesterov momentum; None takes those of the method: 1 and 0 for
    # local_sgd, 0.7 and 0.9 for diloco, or what rounds.outer=law says.
    outer_step: float | None = None
    outer_momentum: float | None = None


def make_local_sgd(recipe: Recipe) -> Method:
    """Builds local SGD: the mean of the copies every `sync_period` steps.

    With `sync_period` 1 and plain SGD inside, it is dense data parallelism.

    References:
      Stich, Local SGD Converges Fast and Communicates Little, 2018, arXiv:1805.09767.
    """
    return consensus_method(core_of(recipe, 1.0, 0.0), recipe, prunes=False)


def make_diloco(recipe: Recipe) -> Method:
    """Builds DiLoCo: local steps, and an outer Nesterov step of the mean.

    Differs from the paper: the inner optimizer is that of the settings, AdamW only
    if they say so, and its state stays with the host, as there.

    References:
      Douillard et al., DiLoCo, 2023, arXiv:2311.08105, algorithm 1; outer step 0.7 and
      momentum 0.9 are those of its section 3.
    """
    return consensus_method(core_of(recipe, 0.7, 0.9), recipe, prunes=False)


def core_of(recipe: Recipe, outer_step: float, outer_momentum: float) -> Hsadmm:
    """The core as the settings say, and where they leave it to the method."""
    config: LocalSgdConfig = recipe.settings
    sync = recipe.sync(config.sync_period)
    outer = {"outer_step": outer_step, "outer_momentum": outer_momentum}
    if recipe.config.rounds.outer == "law":
        outer = {}
    given = {"outer_step": config.outer_step, "outer_momentum": config.outer_momentum}
    outer |= {name: value for name, value in given.items() if value is not None}
    return Hsadmm(
        recipe.inner,
        groups=(),
        keep_counts={},
        parameters=preset("reset", sync.period, **outer, **rounds_of(recipe)),
        sync=sync,
        axes=recipe.axes,
        learning_rate=recipe.learning_rate,
        streaming=streaming_of(recipe.config, sync),
        slicing=recipe.slicing,
    )


def _largest(period: int, **more: Any) -> Variant:
    """The largest 64 of every 4,096 numbers, in two bits."""
    route = ", owners add up" if more else ""
    return Variant(
        f"local-sgd-{period}-top64{'-owners' if more else ''}",
        f"local SGD, every {period} steps, 64 of 4,096 numbers, int2{route}",
        {
            "method.local_sgd.sync_period": period,
            "method.wire_dtype": "int2",
            "method.rounds.top_k": 64,
            **more,
        },
        period,
    )


def _variants(name: str, title: str, *rare_periods: int) -> tuple[Variant, ...]:
    """Every 8 steps in float32, and every so many steps in int8."""

    def variant(period: int, suffix: str, words: str, **more: Any) -> Variant:
        settings = {"method.local_sgd.sync_period": period, **more}
        named = f"{title}, every {period} steps{words}"
        return Variant(f"{name}{suffix}", named, settings, period)

    int8 = {"method.wire_dtype": "int8"}
    return (
        variant(8, "", ""),
        *(variant(each, f"-{each}-int8", ", int8", **int8) for each in rare_periods),
    )


LOCAL_SGD = MethodRow(
    "local_sgd",
    make_local_sgd,
    LocalSgdConfig,
    key="local_sgd",
    takes_slices=True,
    variants=(
        *_variants("local-sgd", "local SGD", 8, 10, 32),
        Variant(
            "local-sgd-8-int2",
            "local SGD, every 8 steps, int2",
            {"method.local_sgd.sync_period": 8, "method.wire_dtype": "int2"},
            8,
        ),
        _largest(4),
        _largest(16),
        _largest(8, **{"method.rounds.top_k_route": "owners"}),
        Variant(
            "local-sgd-8-int8-streaming",
            "local SGD, every 8 steps, int8, in 2 parts beside steps",
            {
                "method.local_sgd.sync_period": 8,
                "method.wire_dtype": "int8",
                "method.rounds.fragments": 2,
                "method.rounds.delay": 1,
            },
            8,
        ),
    ),
)
DILOCO = MethodRow(
    "diloco",
    make_diloco,
    LocalSgdConfig,
    key="local_sgd",
    takes_slices=True,
    variants=_variants("diloco", "DiLoCo", 8),
)
