"""What a study of links is: rows on real processes, over links of several speeds."""

import dataclasses
import re
from collections.abc import Collection
from typing import Any, ClassVar, Literal, Self

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.compare.sweep import study as base
from prunex_jax.compare.sweep.figure import Figure
from prunex_jax.compare.sweep.study import Row, Study
from prunex_jax.methods import find_variants

UNLIMITED = "unlimited"
STEP_TIME = "step_time"
_SPEED = re.compile(r"([0-9.]+) Mbit/s")
_RATIO = re.compile(r"r=([0-9.]+)")


@dataclasses.dataclass(frozen=True)
class LinkRow(Row):
    """One method with its settings, or one peer."""

    period: int = 1  # Steps after which the pattern of exchanges repeats.
    # jax (this package) | torch (DistributedDataParallel with gloo).
    runtime: Literal["jax", "torch"] = "jax"
    # What torch does to gradients: dense | fp16 | powersgd.
    hook: Literal["dense", "fp16", "powersgd"] = "dense"
    exchange_only: bool = False  # Whether a step is a dense exchange and nothing else.
    processes_per_host: int = 1  # Of torch, whose users start one per device.


def variant_rows(*names: str) -> tuple[LinkRow, ...]:
    """Rows of variants of registered methods; see `variant_row`."""
    return tuple(variant_row(name) for name in names)


def variant_row(
    variant: str, name: str = "", label: str = "", **settings: Any
) -> LinkRow:
    """A row of a variant of a registered method; arguments and errors as of sweeps.

    Example:
      >>> row = variant_row('dense')
      >>> row.name, row.period
      ('dense', 1)
    """
    row = base.variant_row(variant, name, label, **settings)
    (found,) = find_variants(variant)
    return LinkRow(**vars(row), period=found.period)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkStudy(Study):
    """Rows on hosts joined by links of several speeds."""

    rows: tuple[LinkRow, ...]
    num_hosts: tuple[int, ...] = (2,)  # Sizes of the host axis, one after the other.
    devices_per_host: int = 1  # Virtual CPU devices of every host.
    # "100 Mbit/s", "unlimited", or "r=4": so slow that one exchange of hierarchical
    # dense float32 takes 4 times the computation of a step.
    links: tuple[str, ...] = (UNLIMITED,)
    # Those links that the model of cost is not fitted to, but checked on.
    held_out: tuple[str, ...] = ()
    # step_time (steady steps, all links in one run per row), or a metric of the task,
    # such as accuracy or bits_per_byte (whole runs, one per row, link and seed).
    goal: str = STEP_TIME
    less_is_better: bool = False  # Whether that metric is a loss, or the like.
    # Measured rounds of `Row.period` steps per link; one more goes before.
    rounds: int = 5
    # Values of that metric, on the validation split, whose time is asked for.
    targets: tuple[float, ...] = ()
    # Examples of the validation split that are scored, spread evenly over it; 0: all.
    scored_examples: int = 0
    # Pause in every step that stands for the computation of the whole batch on one
    # host; each of n hosts pauses for an n-th. 0: none.
    stand_in_seconds: float = 0.0
    # Time for one row on one number of hosts; what takes longer is killed.
    limit_seconds: float = 900.0
    run_by: ClassVar[str] = "benchmarks links --study"

    @property
    def figure(self) -> Figure | None:
        """What whole runs are scored by; None where steps are timed."""
        is_timed = self.goal == STEP_TIME
        return None if is_timed else Figure(self.goal, self.less_is_better)

    def check(self) -> None:
        """See `Study`."""
        for link in self.links:
            link_megabits(link, 1.0, 1.0)
        if not set(self.held_out) <= set(self.links):
            raise UserError(f"held_out={self.held_out} has links that are not measured")
        numbers = {
            "num_hosts": min(self.num_hosts, default=0),
            "devices_per_host": self.devices_per_host,
            "rounds": self.rounds,
            "links": len(self.links),
            "limit_seconds": self.limit_seconds,
            "period": min(row.period for row in self.rows),
            "processes_per_host": min(row.processes_per_host for row in self.rows),
        }
        for name, value in numbers.items():
            if value < 1:
                raise UserError(
                    f"study {self.name!r}: {name}={value} must be at least 1"
                )
        for row in self.rows:
            if row.runtime == "jax" and row.processes_per_host > 1:
                raise UserError(
                    f"row {row.name!r}: processes_per_host={row.processes_per_host} is "
                    "for torch; a jax host is one process with devices_per_host devices"
                )
        for name in ("stand_in_seconds", "scored_examples"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative")

    def with_what_is_left(self) -> Self:
        """See `Study`."""
        held_out = tuple(link for link in self.held_out if link in self.links)
        return dataclasses.replace(self, held_out=held_out)


def check_goal(goal: str, metrics: Collection[str]) -> None:
    """Refuses a goal that is none of the metrics that a task measures.

    Raises:
      UserError: Names them.
    """
    if goal not in metrics:
        raise UserError(
            f"goal={goal!r} is neither {STEP_TIME!r} nor measured by the task of the "
            f"study{suggest(goal, metrics)} (it measures {', '.join(metrics)})"
        )


def link_megabits(link: str, seconds_per_r: float, dense_bytes: float) -> float | None:
    """Speed of a link in Mbit/s; None if it is unlimited.

    Args:
      link: As in `LinkStudy.links`.
      seconds_per_r: Computation of a step, which r multiplies.
      dense_bytes: What a host sends in a hierarchical dense float32 exchange.
    Raises:
      UserError: Not understood.
    Example:
      >>> link_megabits('r=4', 0.5, 1e6), link_megabits('100 Mbit/s', 0.5, 1e6)
      (4.0, 100.0)
    """
    if link == UNLIMITED:
        return None
    if match := _SPEED.fullmatch(link):
        return float(match[1])
    if match := _RATIO.fullmatch(link):
        return 8 * dense_bytes / 1e6 / (float(match[1]) * seconds_per_r)
    raise UserError(
        f"link {link!r} is not understood; write '100 Mbit/s', 'r=4' or '{UNLIMITED}'"
    )
