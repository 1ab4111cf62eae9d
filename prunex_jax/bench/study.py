"""What a study is: rows, hosts and links, as a small declarative file.

It owns the description and its checks, and reading it from a file. It leaves how it is
run to `runner`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prunex_jax.base.command import call_in_file, check_name, take_rows
from prunex_jax.base.errors import UserError

UNLIMITED = "unlimited"
_SPEED = re.compile(r"([0-9.]+) Mbit/s")
_RATIO = re.compile(r"r=([0-9.]+)")


@dataclasses.dataclass(frozen=True)
class Row:
    """One method, or one peer, as a study runs it.

    Attributes:
      name: Key, and name of its folder: letters, digits, dashes.
      label: What tables call it; empty takes `name`.
      runtime: jax (this package) | torch (DistributedDataParallel with gloo).
      settings: Dotted key -> value, over the settings of the study.
      period: Steps after which the pattern of exchanges repeats.
      hook: What torch does to gradients: dense | fp16 | powersgd.
      exchange_only: Whether a step is a dense exchange and nothing else.
      processes_per_host: Of torch, whose users start one per device.
    """

    name: str
    label: str = ""
    runtime: Literal["jax", "torch"] = "jax"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    period: int = 1
    hook: Literal["dense", "fp16", "powersgd"] = "dense"
    exchange_only: bool = False
    processes_per_host: int = 1

    @property
    def title(self) -> str:
        """What tables call it."""
        return self.label or self.name


@dataclasses.dataclass(frozen=True)
class Study:
    """Rows on hosts joined by links of several speeds.

    Attributes:
      name: Key of its records.
      config: Training config that all rows start from, relative to the study's file.
      settings: Dotted key -> value, over that config, for all rows.
      rows: What is compared.
      num_hosts: Sizes of the host axis, one after the other.
      devices_per_host: Virtual CPU devices of every host.
      links: "100 Mbit/s", "unlimited", or "r=4": so slow that one exchange of
        hierarchical dense float32 takes 4 times the computation of a step.
      held_out: Those links that the model of cost is not fitted to, but checked on.
      goal: step_time (steady steps, all links in one run per row) | accuracy (whole
        runs, one per row and link).
      rounds: Measured rounds of `Row.period` steps per link; one more goes before.
      seeds: Of goal accuracy: every row runs once with each.
      target_accuracies: Validation accuracies whose time is asked for.
      stand_in_seconds: Pause in every step that stands for the computation of the whole
        batch on one host; each of n hosts pauses for an n-th. 0: none.
      limit_seconds: Time for one row on one number of hosts; what takes longer is
        killed.
    """

    name: str
    config: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_hosts: tuple[int, ...] = (2,)
    devices_per_host: int = 1
    links: tuple[str, ...] = (UNLIMITED,)
    held_out: tuple[str, ...] = ()
    goal: Literal["step_time", "accuracy"] = "step_time"
    rounds: int = 5
    seeds: tuple[int, ...] = (0,)
    target_accuracies: tuple[float, ...] = ()
    stand_in_seconds: float = 0.0
    limit_seconds: float = 900.0


def link_megabits(link: str, seconds_per_r: float, dense_bytes: float) -> float | None:
    """Speed of a link in Mbit/s; None if it is unlimited.

    Args:
      link: As in `Study.links`.
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


def load_study(file: str | Path) -> Study:
    """Loads a study from a Python file with `get_study()`.

    Raises:
      UserError: The file does not exist, cannot be run, gives no study, or one that
        cannot be run.
    """
    study = call_in_file(file, "study", "get_study")
    if not isinstance(study, Study):
        raise UserError(f"get_study() of {file} gave {study!r}, which is no Study")
    return check_study(study)


def check_study(study: Study) -> Study:
    """Refuses what cannot be run, whatever the machine; returns the study.

    Raises:
      UserError: Names the value and the remedy.
    """
    names = [row.name for row in study.rows]
    for name in (study.name, *names):
        check_name(name)
    twice = {name for name in names if names.count(name) > 1}
    if twice or not names:
        what = f"two rows {min(twice)!r}" if twice else "no row"
        raise UserError(f"study {study.name!r} has {what}")
    for link in study.links:
        link_megabits(link, 1.0, 1.0)
    if not set(study.held_out) <= set(study.links):
        raise UserError(f"held_out={study.held_out} has links that are not measured")
    numbers = {
        "num_hosts": min(study.num_hosts, default=0),
        "devices_per_host": study.devices_per_host,
        "rounds": study.rounds,
        "links": len(study.links),
        "seeds": len(study.seeds),
        "limit_seconds": study.limit_seconds,
        "period": min(row.period for row in study.rows),
        "processes_per_host": min(row.processes_per_host for row in study.rows),
    }
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"study {study.name!r}: {name}={value} must be at least 1")
    for row in study.rows:
        if row.runtime == "jax" and row.processes_per_host > 1:
            raise UserError(
                f"row {row.name!r}: processes_per_host={row.processes_per_host} is for "
                "torch; a jax host is one process with devices_per_host devices"
            )
    if study.stand_in_seconds < 0:
        raise UserError(
            f"stand_in_seconds={study.stand_in_seconds} must not be negative"
        )
    return study


def narrow_study(
    study: Study,
    rows: Sequence[str] = (),
    num_hosts: Sequence[int] = (),
    links: Sequence[str] = (),
) -> Study:
    """Takes a part of a study; what is empty stays whole.

    Raises:
      UserError: A row that the study does not have, or a link that is not understood.
    """
    links = tuple(links) or study.links
    return check_study(
        dataclasses.replace(
            study,
            rows=take_rows(study.rows, rows, f"study {study.name!r}"),
            num_hosts=tuple(num_hosts) or study.num_hosts,
            links=links,
            held_out=tuple(link for link in study.held_out if link in links),
        )
    )
