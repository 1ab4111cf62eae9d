"""What a person sees: the start screen, lines of progress, and the last screen.

Files and pipes get plain lines. A terminal gets the same lines with their labels in
bold, and a bar below them.
"""

import contextlib
import math
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Self, TextIO

import rich.console
import rich.progress
import rich.text

import prunex_jax
from prunex_jax.base.timing import meanwhile
from prunex_jax.mesh import HOST_AXIS
from prunex_jax.tasks import Metric, Objective
from prunex_jax.train.build.config import config_difference
from prunex_jax.train.build.experiment import Experiment, with_method
from prunex_jax.train.records.summary import worth_of

# The word in front of a line of the start screen and of the last screen.
_LABELS = r"(?m)^[a-z]+( link)?(?= {2})"

# Where text begins that follows a label.
_INDENT = " " * 10
# Steps before the time that is left is said.
_FIRST_ETA = 10
# Seconds between two lines that say that something still goes on.
_PATIENCE = 10.0

# Channel groups that are named one by one on the start screen.
_MOST_GROUPS = 4
_FLOPS = ("F/s", "kF/s", "MF/s", "GF/s", "TF/s", "PF/s")


class Console:
    """Writes lines on the primary process, and none elsewhere.

    Args:
      is_primary: Whether this process writes.
      stream: Where to; None is the standard output of the moment.
      num_steps: Length of the bar that a terminal shows.
      patience: Seconds of silence before `busy` says what goes on.
    Example:
      >>> with Console(True) as console:
      ...     console.line('stopped at step 8')
      stopped at step 8
    """

    def __init__(
        self,
        is_primary: bool,
        stream: TextIO | None = None,
        num_steps: int = 0,
        patience: float = _PATIENCE,
    ) -> None:
        self._is_primary = is_primary
        self._stream = stream
        self._patience = patience
        self._has_explained = False
        self._is_terminal = (stream or sys.stdout).isatty()
        self._terminal = rich.console.Console(file=stream, soft_wrap=True)
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[eta]}"),
            console=self._terminal,
            auto_refresh=False,
            transient=True,
            disable=not (is_primary and self._is_terminal),
        )
        self._lock = threading.Lock()  # Of the thread that says what goes on.
        self._said_at = time.monotonic()
        self._task = self._bar.add_task("steps", total=num_steps, eta="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        """Writes one or more lines at once; a terminal gets them wrapped."""
        if not self._is_primary:
            return
        with self._lock:
            self._said_at = time.monotonic()
            if self._is_terminal:
                styled = rich.text.Text(wrapped(text, self._terminal.width))
                styled.highlight_regex(_LABELS, "bold")
                self._terminal.print(styled)
            else:
                stream = self._stream or sys.stdout
                stream.write(text + "\n")
                stream.flush()

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Says what goes on whenever nothing was said for some seconds.

        Example:
          >>> with Console(True, patience=0.2) as console:
          ...     with console.busy('compiling the local step'):
          ...         time.sleep(0.3)
          compiling the local step (0 s so far)
        """
        if not self._is_primary:
            yield
            return
        started = time.monotonic()

        def tell() -> None:
            self.line(f"{text} ({time.monotonic() - started:.0f} s so far)")

        def pause() -> float:
            return self._said_at + self._patience - time.monotonic()

        with meanwhile("busy", tell, pause):
            yield

    def progress(
        self,
        row: Mapping[str, Any],
        num_steps: int,
        batch_size: int,
        objective: Objective,
    ) -> None:
        """Shows how far the run is; arguments as for `format_progress`.

        The first time it says what the columns are, and a terminal gets its bar.
        """
        if not self._has_explained:
            self._has_explained = True
            self.line(explain_progress(objective, row["flops_utilisation"] is not None))
            self._bar.start()
        width = self._terminal.width if self._is_terminal else None
        self.line(format_progress(row, num_steps, batch_size, objective, width))
        eta = f"eta {_eta(row, num_steps)}"
        self._bar.update(self._task, completed=row["step"], eta=eta, refresh=True)


def wrapped(text: str, width: int) -> str:
    """Breaks lines between words, and goes on below their text.

    Example:
      >>> print(wrapped('model     a network with many words', 26))
      model     a network with
                many words
    """
    if width <= 2 * len(_INDENT):
        return text
    lines = (
        textwrap.fill(
            line,
            width,
            subsequent_indent=_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )
    return "\n".join(lines)


def format_progress(
    row: Mapping[str, Any],
    num_steps: int,
    batch_size: int,
    objective: Objective,
    width: int | None = None,
) -> str:
    """Says how far a run is in one line of at most 132 columns, aligned with others.

    Numbers that are not finite show as `nan` or `-`. Up to 999,999 steps keep the
    width; where there are fewer columns, what matters least is left out.

    Example:
      >>> from prunex_jax.tasks import Classification
      >>> row = dict(
      ...     step=1200, seconds_per_step_median=0.0521, flops_per_second=3.1e11,
      ...     flops_utilisation=None, host_wire_bytes=14.8e9, host_wire_ratio=0.065,
      ...     sparsity=0.5, loss=1.234, accuracy=0.712, primal_residual=1.2e-3)
      >>> print(format_progress(row, 20000, 64, Classification())[:56].strip(), '...')
      1200/20000   6% eta   16m   1228 img/s 52.1ms   310GF/s ...
      >>> print(format_progress(row, 20000, 64, Classification(), 60).strip())
      1200/20000   6% eta   16m  loss 1.234  acc 71.2%
    """
    step, seconds = row["step"], row["seconds_per_step_median"]
    units = batch_size * objective.units_per_example
    host_bytes = row["host_wire_bytes"] / step / 1000
    kilobytes = _scaled(host_bytes, ("kB", "MB", "GB", "TB")) if host_bytes else "0B"
    # In their order; the larger the number, the sooner a column is left out.
    columns = [
        (0, f"{step:>{len(str(num_steps))}}/{num_steps} {100 * step // num_steps:>3}%"),
        (2, f" eta {_eta(row, num_steps):>5}"),
        (5, f"  {_speed(units / max(seconds, 1e-9)):>5} {objective.example}/s"),
        (6, f" {_scaled(1000 * seconds, ('ms', 's')):>6}"),
        (7, _flops(row)),
        (3, f"  host {kilobytes:>6} {_ratio(row['host_wire_ratio']):>6}"),
        (4, f"  sparsity {_percent(row['sparsity'], 0):>3}"),
        (8, f"  res {_power(row.get('primal_residual')):>6}"),
        *((1, _measured(row, metric)) for metric in objective.metrics),
    ]
    while width is not None and sum(len(text) for _, text in columns) > width:
        last = max(rank for rank, _ in columns)
        if last <= 1:
            break
        columns = [column for column in columns if column[0] != last]
    return "".join(text for _, text in columns)


def _eta(row: Mapping[str, Any], num_steps: int) -> str:
    """The time that is left, once there are steps enough to tell."""
    step, seconds = row["step"], row["seconds_per_step_median"]
    if step < min(_FIRST_ETA, num_steps):
        return "-"
    return _duration((num_steps - step) * seconds)


def explain_progress(objective: Objective, has_peak: bool) -> str:
    """Says what the columns of `format_progress` are, in their order.

    Example:
      >>> from prunex_jax.tasks import Classification
      >>> print(explain_progress(Classification(), False))
      columns   step, share of the run, time left, img per second, time per step, FLOP/s
                host: bytes that a host sends per step, and their share of dense
                sparsity: channels removed; res: distance of copies from their consensus
                since the last line: loss, acc
    """
    names = ", ".join(metric.label or metric.name for metric in objective.metrics)
    peak = ", share of the peak" if has_peak else ""
    return (
        f"columns   step, share of the run, time left, {objective.example} per second, "
        f"time per step, FLOP/s{peak}\n"
        "          host: bytes that a host sends per step, and their share of dense\n"
        "          sparsity: channels removed; res: distance of copies from their "
        f"consensus\n          since the last line: {names}"
    )


def _flops(row: Mapping[str, Any]) -> str:
    """Floating point operations per second, and their share of the best possible."""
    speed, share = row["flops_per_second"], row["flops_utilisation"]
    said = f"  {_scaled(speed, _FLOPS):>8}"
    return said if share is None else f"{said} {_percent(share, 0):>4}"


def _measured(row: Mapping[str, Any], metric: Metric) -> str:
    """A metric on the line of progress, as wide as in all others."""
    value = row[metric.name]
    text = _percent(value, 1) if metric.is_share else _four_digits(value)
    return f"  {metric.label or metric.name} {text:>5}"


def _duration(seconds: float) -> str:
    """At most five characters: 42s, 23m, 1h23m, 12h, 3d04h, 12d."""
    if not math.isfinite(seconds):
        return "-"
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m"
    if days < 1:
        return f"{hours}h{minutes % 60:02}m" if hours < 10 else f"{hours}h"
    return f"{days}d{hours % 24:02}h" if days < 10 else f"{days}d"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three digits and the unit; each unit is 1000 times the one before."""
    if not math.isfinite(value):
        return "-"
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    return f"{value:.{1 if value < 99.95 else 0}f}{units[index]}"


def _speed(value: float) -> str:
    return f"{value:.0f}" if value < 99999.5 else _scaled(value, ("", "k", "M", "G"))


def _ratio(value: float) -> str:
    return f"x{value:.3f}" if value == 0 or not value < 0.001 else f"x{_power(value)}"


def _percent(share: float, digits: int) -> str:
    if not math.isfinite(share):
        return "-"
    percent = round(100 * share, digits)
    return "100%" if percent == 100 else f"{percent:.{digits}f}%"


def _power(value: float | None) -> str:
    """Two digits and a short exponent: 1.2e-3."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _four_digits(value: float) -> str:
    for limit, digits in ((9.9995, 3), (99.995, 2), (999.95, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0e}" if math.isfinite(value) else str(value)


def start_screen(
    experiment: Experiment, workdir: str, environment: Mapping[str, Any], reason: str
) -> str:
    """Everything worth knowing before the first step, on one screen."""
    versions = environment["versions"]
    names = ("python", "jax", "jaxlib", "flax", "optax", "orbax")
    changed = [
        f"{key}={value!r} (default {default!r})"
        for key, (default, value) in config_difference(experiment.config).items()
    ]
    lines = [
        f"prunex_jax {prunex_jax.__version__}  "
        + "  ".join(f"{name} {versions[name]}" for name in names),
        f"start     {reason}",
        experiment.topology.table(),
        *_what_is_trained(experiment),
        *_what_is_sent(experiment),
        *_what_is_kept(experiment),
        f"settings  {changed[0] if changed else 'all at their defaults'}",
        *(f"          {text}" for text in changed[1:]),
        f"run       {experiment.num_steps} steps into {workdir}",
        *(f"warning   {text}" for text in experiment.warnings),
    ]
    return "\n".join(lines)


def _what_is_trained(experiment: Experiment) -> list[str]:
    config, mesh, data = experiment.config, experiment.mesh, experiment.task.dataset
    batch_size, num_hosts = experiment.batch_size, mesh.shape[HOST_AXIS]
    left_out = f" (and {experiment.left_out} left out)" if experiment.left_out else ""
    channels = experiment.channels
    lines = [
        f"data      {data.name}: {len(data.train)} training, {len(data.validation)} "
        f"validation {data.described}",
        f"batch     {batch_size} = {num_hosts} hosts x {batch_size // num_hosts} = "
        f"{mesh.size} devices x {batch_size // mesh.size}{left_out}",
        f"model     {config.model.name}: {experiment.num_params:,} parameters, "
        f"{len(channels.sizes)} channel groups with {sum(channels.sizes.values())} "
        f"channels, {channels.trace.prunable_share():.1%} of the parameters prunable",
    ]
    if experiment.start is not None:
        said = "as its checkpoints have them"
        if experiment.start.arrays:
            said = "; ".join(experiment.start.described)
        lines.append(f"weights   {config.model.weights}: {said}")
    if config.sparsity.scope == "inner":
        inner = [group for group in channels.trace.groups if group.is_inner]
        lines.append(
            f"scope     inner: {len(inner)} of the groups, with "
            f"{sum(group.size for group in inner)} channels, lie inside of a block and "
            "can lose some; what shortcuts add up stays"
        )
    if config.data.shards != "iid":
        alpha = f" with alpha {config.data.dirichlet_alpha:g}"
        drawn = alpha if config.data.shards == "dirichlet" else ""
        lines.insert(
            1,
            f"shards    {config.data.shards}{drawn}: each of {num_hosts} hosts has "
            f"{len(data.train) // num_hosts} training examples of its own",
        )
    return lines


def _what_is_sent(experiment: Experiment) -> list[str]:
    if len(experiment.phases) == 1:
        return _what_its_method_sends(experiment)
    lines = []
    for phase in experiment.phases:
        lines.append(f"phase     {phase.trigger}")
        lines += _what_its_method_sends(with_method(experiment, phase.method))
    return lines


def _what_its_method_sends(experiment: Experiment) -> list[str]:
    method, plan = experiment.current.method, experiment.current.plan
    keep_counts = experiment.channels.keep_counts
    dense_bytes = experiment.num_params * 4
    if not method.payload.elements(keep_counts):
        return [
            f"method    {method.name}: hosts exchange nothing and train networks of "
            "their own; this shows the speed without exchanges, not a way to train"
        ]
    when = str(plan.sync or "every step")
    if method.is_streaming:
        when += ", in parts while masks stay"
    if plan.sync and method.pruning.in_rounds:
        stages = ", ".join(
            f"{stage.density:.3g}{' frozen' if stage.is_frozen else ''} from step "
            f"{stage.start_step}"
            for stage in plan.stages
        )
        unit = experiment.config.sparsity.unit
        share = "density" if unit == "channels" else f"share of {unit}"
        when += f"; {share} {stages}"
        if plan.shrink_step:
            when += f"; the small network trains on from step {plan.shrink_step}"
    payload = method.payload.num_bytes(keep_counts)
    return [
        f"method    {method.name}: exchanges {when}",
        f"payload   {payload:,} bytes per exchange at the end, "
        f"{payload / dense_bytes:.3f} of the dense {dense_bytes:,}",
    ]


def _what_is_kept(experiment: Experiment) -> list[str]:
    """Channels of every group at the end, or how many groups have so many."""
    counts, sizes = experiment.final_counts, experiment.channels.sizes
    if not experiment.prunes or not sizes:
        return []
    if experiment.config.sparsity.budget == "global":
        return [
            f"kept      ranked over all groups in training; with equal shares "
            f"{sum(counts.values())} of {sum(sizes.values())} channels"
        ]
    each = [f"{counts[name]} of {size} {name}" for name, size in sizes.items()]
    if len(each) > _MOST_GROUPS:
        alike = Counter((counts[name], size) for name, size in sizes.items())
        each = [
            f"{kept} of {size} in {number} {'group' if number == 1 else 'groups'}"
            for (kept, size), number in sorted(alike.items(), key=lambda x: x[0][1])
        ]
    return [f"kept      channels at the end: {', '.join(each)}"]


def last_screen(summary: Mapping[str, Any], workdir: str) -> str:
    """What came out, from the values of summary.json."""
    return _LAST_SCREEN.format(
        **summary,
        ms=1000 * summary["seconds_per_step_median"],
        params_share=summary["params_kept"] / summary["params_dense"],
        macs_share=summary["macs_kept"] / summary["macs_dense"],
        worth=worth_of(summary),
        flops=_flops_of(summary),
        seen=_seen_in(summary),
        workdir=workdir,
    )


def _flops_of(summary: Mapping[str, Any]) -> str:
    speed, share = summary["flops_per_second"], summary["flops_utilisation"]
    said = f"{_scaled(speed, _FLOPS)} of the network in forward and backward passes"
    return said if share is None else f"{said}, {_percent(share, 1)} of the peak"


def _seen_in(summary: Mapping[str, Any]) -> str:
    """How much was read in training, in the units of the task."""
    name = next(name for name in summary if name.endswith("_seen"))
    return f"{summary[name]:,} {name.removesuffix('_seen')} seen"


_LAST_SCREEN = """\
done      {steps} steps in {seconds_total:.0f} s, {ms:.1f} ms per step, \
{num_compilations} programs compiled
speed     {flops}, {seen}
network   {worth}
size      {params_kept:,} of {params_dense:,} parameters ({params_share:.3f}), \
{macs_kept:,} of {macs_dense:,} multiply-accumulates ({macs_share:.3f})
          {channel_sparsity:.1%} of the channels removed; masked and shrunk network \
differ by at most {shrink_max_abs_error:.1e}
host link {host_wire_bytes:,.0f} bytes sent per host, {host_wire_ratio:.4f} of the \
{host_wire_bytes_dense:,.0f} of hierarchical dense averaging
          {host_payload_bytes_steady:,} bytes per round at the end, \
{host_payload_ratio:.3f} of the dense {host_payload_bytes_dense:,}; {num_rounds} rounds
run       {workdir}"""
