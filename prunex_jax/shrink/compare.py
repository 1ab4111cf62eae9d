"""Puts a network and its shrunk form side by side, on the device at hand.

Parameters and multiply-accumulates are counted, latency and throughput measured, for
every batch size in turn, and memory read off the compiled programs. It knows no
trainer: any two functions will do.
"""

import dataclasses
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.environment import versions
from prunex_jax.base.errors import UserError
from prunex_jax.base.timing import Timing, time_in_turn
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.shrink.cost import count_macs, count_params

# Share of the saving in arithmetic below which a latency deserves a remark.
_LEAST_GAIN = 0.5
_NONE = "-"


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A function and what it is called with before its inputs."""

    apply: Callable[..., Any]  # `apply(*trees, *inputs)`.
    trees: tuple[PyTree, ...]  # Parameters first, then statistics if it takes them.


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    unit: str  # parameters | macs | seconds | examples/s | bytes.
    batch_size: int | None  # Examples per call; None where it does not matter.
    full: float | None  # Of the network.
    small: float | None  # Of its shrunk form.
    ratio: float | None  # small / full; of times the median of the paired quotients.
    full_quartiles: tuple[float, float] | None = None
    small_quartiles: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    rows: tuple[Row, ...]  # Parameters, multiply-accumulates, then by batch size.
    device: str  # Kind of the device, and of the machine around it.
    versions: Mapping[str, str | None]  # Of jax and jaxlib.
    num_calls: int  # How often each was timed.
    remarks: tuple[str, ...]  # Where less arithmetic did not make it faster.

    def row(self, name: str, batch_size: int | None = None) -> Row:
        """Finds one line by its name and batch size."""
        found = [r for r in self.rows if (r.name, r.batch_size) == (name, batch_size)]
        if not found:
            known = ", ".join(dict.fromkeys(row.name for row in self.rows))
            raise UserError(
                f"no row {name!r} for batch size {batch_size}; there are {known}"
            )
        return found[0]

    def format(self) -> str:
        """Writes the table, and below it how and where it was measured."""
        cells = [("", "full", "small", "small / full")]
        cells += [_cells(row) for row in self.rows]
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        below = [
            f"Times are medians of {self.num_calls} calls, taken in turn, with their "
            f"quartiles; {self.device}; {versions}.",
            *self.remarks,
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                [first.ljust(widths[0])]
                + [c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)]
            ).rstrip()
            for first, *rest in cells
        ]
        return "\n".join([*lines, *below])


def compare(
    full: Subject,
    small: Subject,
    *inputs: PyTree,
    batch_sizes: Sequence[int] = (1, 8, 64),
    num_calls: int = 20,
    warm_up: int = 2,
    now: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Measures a network and its shrunk form on the current device.

    Both are compiled for every batch size and called in turn, so that a machine whose
    speed drifts slows both. Each is called alone, until its result is there.

    Args:
      full: The network.
      small: Its shrunk form.
      *inputs: Example inputs; the first axis of every leaf is the batch. Rows are
        repeated or dropped to make the batch sizes.
      batch_sizes: Examples per call.
      num_calls: How often each is timed, at least two.
      warm_up: Calls before, not timed.
      now: Seconds from any origin; a test passes its own.
    Returns:
      The table. Memory of a program is that of its arguments, results and temporary
      arrays, as compiled.
    Raises:
      UserError: No inputs, or a leaf without a batch axis; a batch size below 1.
    Example:
      >>> wide, narrow = np.ones((64, 64)), np.ones((64, 16))
      >>> apply = lambda w, x: x @ w
      >>> table = compare(Subject(apply, (wide,)), Subject(apply, (narrow,)),
      ...                 np.ones((1, 64)), batch_sizes=(2,), num_calls=2)
      >>> table.row('parameters').ratio, table.row('multiply-accumulates').full
      (0.25, 4096)
    """
    _check(inputs, batch_sizes)
    pair = {"small": small, "full": full}
    one = _batch(inputs, 1)
    sizes = {name: count_params(each.trees[0]) for name, each in pair.items()}
    macs = {n: count_macs(each.apply, *each.trees, *one) for n, each in pair.items()}
    rows = [
        _row("parameters", "parameters", None, sizes),
        _row("multiply-accumulates", "macs", None, macs),
    ]
    remarks = []
    for batch_size in sorted(batch_sizes):
        given = _batch(inputs, batch_size)
        found = _rows(batch_size, pair, given, num_calls, warm_up, now)
        rows += found
        remarks += _remarks(batch_size, rows[1].ratio, found[0].ratio)
    installed = versions()
    return Comparison(
        rows=tuple(rows),
        device=_device_name(jax.devices()[0]),
        versions={name: installed[name] for name in ("jax", "jaxlib")},
        num_calls=max(2, num_calls),
        remarks=tuple(remarks),
    )


def _rows(
    batch_size: int,
    pair: Mapping[str, Subject],
    inputs: tuple[PyTree, ...],
    num_calls: int,
    warm_up: int,
    now: Callable[[], float],
) -> list[Row]:
    """What is measured for one batch size: times first."""
    calls: dict[str, Callable[[], Any]] = {}
    memory = {}
    for name, subject in pair.items():
        arguments = jax.device_put((*subject.trees, *inputs))
        program = jax.jit(subject.apply).lower(*arguments).compile()
        calls[name] = functools.partial(program, *arguments)
        memory[name] = program_bytes(program)
    timings = time_in_turn(calls, num_calls, warm_up, now)
    latency = _latency(batch_size, timings)
    speeds = {name: batch_size / each.median for name, each in timings.items()}
    speed = _row("throughput", "examples/s", batch_size, speeds)
    assert latency.ratio is not None
    rows = [latency, dataclasses.replace(speed, ratio=1 / latency.ratio)]
    if memory["full"] is not None:
        rows.append(_row("memory of the program", "bytes", batch_size, memory))
    return rows


def program_bytes(program: Any) -> int | None:
    """Bytes at once of a `jax.stages.Compiled`; None where no compiler tells."""
    memory = program.memory_analysis()
    if memory is None:
        return None
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _latency(batch_size: int, timings: Mapping[str, Timing]) -> Row:
    full, small = timings["full"], timings["small"]
    pairs = zip(small.seconds, full.seconds, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return Row(
        "latency",
        "seconds",
        batch_size,
        full.median,
        small.median,
        ratio,
        full.quartiles,
        small.quartiles,
    )


def _row(
    name: str,
    unit: str,
    batch_size: int | None,
    values: Mapping[str, float | None],
) -> Row:
    full, small = values["full"], values["small"]
    ratio = small / full if full and small is not None else None
    return Row(name, unit, batch_size, full, small, ratio)


def _remarks(batch_size: int, macs: float | None, latency: float | None) -> list[str]:
    """Says where a call is hardly faster although it computes much less."""
    if macs is None or latency is None or macs >= 1.0:
        return []
    if 1 - latency >= _LEAST_GAIN * (1 - macs):
        return []
    return [
        f"Batch size {batch_size}: {macs:.2f} of the arithmetic takes {latency:.2f} of "
        "the time; arithmetic is not what limits this device there. A larger batch, or "
        "kept counts in larger multiples (`multiples` of the target), may gain more."
    ]


def _batch(inputs: tuple[PyTree, ...], batch_size: int) -> tuple[PyTree, ...]:
    def rows(leaf: Any) -> np.ndarray:
        return np.resize(np.asarray(leaf), (batch_size, *np.shape(leaf)[1:]))

    return jax.tree.map(rows, inputs)


def _check(inputs: tuple[PyTree, ...], batch_sizes: Sequence[int]) -> None:
    leaves = flatten_by_path(inputs)
    if not leaves:
        raise UserError("there is nothing to compare on; pass example inputs")
    for path, leaf in leaves.items():
        if np.ndim(leaf) < 1 or np.shape(leaf)[0] < 1:
            raise UserError(
                f"input {path} has shape {np.shape(leaf)} and no example on its first "
                "axis; give every input a batch axis"
            )
    if not batch_sizes or min(batch_sizes) < 1:
        raise UserError(
            f"batch_sizes={tuple(batch_sizes)}: give at least one, each at least 1"
        )


def _device_name(device: jax.Device) -> str:
    cores = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    is_cpu = device.platform == "cpu"
    return f"on {cores}" if is_cpu else f"on {device.device_kind} beside {cores}"


def _cells(row: Row) -> tuple[str, str, str, str]:
    name = row.name
    if row.batch_size is not None:
        name = f"{name}, batch size {row.batch_size}"
    return (
        name,
        _shown(row.full, row.unit, row.full_quartiles),
        _shown(row.small, row.unit, row.small_quartiles),
        _NONE if row.ratio is None else f"{row.ratio:.3f}",
    )


def _shown(
    value: float | None, unit: str, quartiles: tuple[float, float] | None
) -> str:
    if value is None:
        return _NONE
    if unit == "seconds":
        low, high = quartiles or (value, value)
        return f"{1e3 * value:.3g} ms ({1e3 * low:.3g} to {1e3 * high:.3g})"
    if unit == "examples/s":
        return f"{value:,.4g} /s" if value < 1000 else f"{value:,.0f} /s"
    if unit == "bytes":
        return f"{value / 1e6:,.2f} MB"
    return f"{value:,}"
