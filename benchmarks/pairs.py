"""Compares two calls that were timed in turn, pair by pair, for the benchmarks."""

import statistics

from prunex_jax.base.timing import Timing


def ratio_quartiles(mine: Timing, reference: Timing) -> tuple[float, ...]:
    """Lower quartile, median and upper quartile of the ratios of all pairs."""
    pairs = zip(mine.seconds, reference.seconds, strict=True)
    return tuple(statistics.quantiles([a / b for a, b in pairs], n=4))


def describe_pairs(mine: Timing, reference: Timing) -> str:
    """The ratio with its spread and n, and both times."""
    low, median, high = ratio_quartiles(mine, reference)
    return (
        f"median {median:.3f}, quartiles {low:.3f} to {high:.3f}, "
        f"n={len(mine.seconds)} pairs; {1000 * mine.median:.1f} ms / "
        f"{1000 * reference.median:.1f} ms"
    )
