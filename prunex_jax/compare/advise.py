"""Command line of advice: which method suits these links, if any.

    prunex-jax advise --config=FILE[:ARGUMENT] [--config.KEY=VALUE ...]
        [--measure] [--margin=PERCENT] [--out=FILE.json]
        [--link=1Gbit/s --hosts=8 --devices=8 --step=120ms [--hop=0.2ms]]
        [--coordinator=HOST:PORT --num_processes=N --process_id=I] [--launcher=NAME]

Started like training, on all hosts. It measures the links between hosts and inside
them, times the computation of a step, and prints what a step of every method would
take and send. The advice may be not to compress. With --link, nothing is measured: the
links, hosts and steps are those that are given, and need not be here. Exit code 0:
advised; 2: bad input.
"""

import dataclasses
import functools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from prunex_jax.base.command import Command, Flag, Values, run_command
from prunex_jax.base.errors import UserError
from prunex_jax.comm.chunks import CHUNK
from prunex_jax.compare.probe import ProbedLink, probe_links, slowest
from prunex_jax.compare.report.tables import Column, make_table
from prunex_jax.compare.step_time import Link, late_options, steady_traffic
from prunex_jax.mesh import HOST_AXIS, check_has_links, run_together
from prunex_jax.methods import METHODS, MethodConfig
from prunex_jax.tasks import Batch
from prunex_jax.train.build.config import (
    ExperimentConfig,
    config_to_dict,
    resolve_config,
)
from prunex_jax.train.build.experiment import Experiment, make_experiment, with_method
from prunex_jax.train.build.joining import join_processes
from prunex_jax.train.changes.means import with_network
from prunex_jax.train.commands.command import (
    CONFIG_FLAG,
    LAUNCH_FLAGS,
    given_launch,
    load_config,
    override_config,
)
from prunex_jax.train.records.weights import find_weights
from prunex_jax.train.steps.state import TrainState

# What gains are over.
BASE = "dense"
_TIMED_STEPS = 5

# What --link needs to know beside the link.
_ELSEWHERE = (
    Flag("hosts", 0, "With --link: hosts.", at_least=0),
    Flag("devices", 1, "With --link: devices of each.", at_least=1),
    Flag("step", "", "With --link: computation of a step, as in 120ms."),
    Flag("hop", "0ms", "With --link: time until a message reaches a neighbour."),
)
COMMAND = Command(
    text=str(__doc__),
    flags=(
        CONFIG_FLAG,
        *LAUNCH_FLAGS,
        Flag("measure", False, "Run a few real steps of every method as well."),
        Flag("margin", 10, "Least gain over dense, in percent.", at_least=1),
        Flag("seconds", 10, "Time for measuring the links.", at_least=1),
        Flag("out", "", "File for the same as JSON; written by the first process."),
        Flag("link", "", "Speed of a host's link, as in 1Gbit/s; nothing is measured."),
        *_ELSEWHERE,
    ),
    takes_settings=True,
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step of one method on the links that were found."""

    label: str  # Method and settings.
    settings: Mapping[str, Any]  # Dotted key -> value that gives this method.
    host_bytes: float  # Sent by a host per step.
    exchange_seconds: float  # Predicted time of the exchange between hosts, per step.
    seconds: float  # Predicted time of a step.
    # Measured time of a step; None if it was not measured.
    measured_seconds: float | None = None

    @property
    def best_known(self) -> float:
        """Measured time, or else the prediction."""
        return self.seconds if self.measured_seconds is None else self.measured_seconds


@dataclasses.dataclass(frozen=True)
class Assumed:
    """Links and steps that are not here."""

    link: Link  # Of a host.
    compute_seconds: float  # Of a step that exchanges nothing between hosts.


@dataclasses.dataclass(frozen=True)
class Advice:
    """What was found and what follows."""

    links: Mapping[str, ProbedLink | Link]  # Mesh axis -> its links.
    compute_seconds: float  # Of a step that exchanges nothing between hosts.
    predictions: tuple[Prediction, ...]  # Of every method, `dense` first.
    # Label -> why a method cannot be used with these settings.
    refused: Mapping[str, str]
    text: str  # The recommendation.


def candidates(config: MethodConfig) -> dict[str, dict[str, Any]]:
    """Lists what is compared: label -> settings over those of the config."""
    rows: dict[str, dict[str, Any]] = {}
    for wire in ("float32", "bfloat16", "int8", "int4"):
        label = BASE if wire == "float32" else f"dense, {wire}"
        rows[label] = {"method.name": "dense", "method.wire_dtype": wire}
    for period in sorted({1, 4, 16, config.hsadmm.sync_period}):
        for wire in ("float32", "int8"):
            suffix = "" if wire == "float32" else f", {wire}"
            rows[f"hsadmm every {period}{suffix}"] = {
                "method.name": "hsadmm",
                "method.wire_dtype": wire,
                "method.hsadmm.sync_period": period,
            }
    names = [name for name in METHODS if name not in ("dense", "hsadmm", "none")]
    rows |= {name: {"method.name": name} for name in names}
    return rows | _few_bytes()


def _few_bytes() -> dict[str, dict[str, Any]]:
    """Rounds in two bits, of all numbers and of the largest: label -> settings."""
    rows: dict[str, dict[str, Any]] = {}
    for method in ("local_sgd", "hsadmm"):
        for period in (4, 16):
            for count in (0, 64):
                few = f", {count} of {CHUNK:,} numbers" if count else ""
                rows[f"{method} every {period}, int2{few}"] = {
                    "method.name": method,
                    "method.wire_dtype": "int2",
                    f"method.{method}.sync_period": period,
                    "method.rounds.top_k": count,
                }
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, measures and advises."""
    return run_command(COMMAND, _advise, arguments)


def advise(
    experiment: Experiment,
    *,
    is_measured: bool = False,
    margin: float = 0.1,
    probe_seconds: float = 10.0,
    assumed: Assumed | None = None,
) -> Advice:
    """Measures links and computation, and predicts the step of every method.

    Every process of the run that is planned calls this, and gets the same advice.

    Args:
      experiment: The run.
      is_measured: Whether to run real steps of every method, too.
      margin: Least gain over `dense` that is advised, as a share.
      probe_seconds: Time for measuring the links.
      assumed: Links and steps to advise for, instead of those that are measured here.
    """
    links: Mapping[str, ProbedLink | Link]
    if assumed is None:
        links = probe_links(experiment.mesh, probe_seconds)
        batch = _first_batch(experiment)
        compute_seconds = _step_seconds(with_method(experiment, "none"), batch)
    else:
        links, batch = {HOST_AXIS: assumed.link}, {}
        compute_seconds = assumed.compute_seconds
    found: list[Prediction] = []
    refused: dict[str, str] = {}
    for label, settings in candidates(experiment.config.method).items():
        try:
            changed = _with_settings(experiment, settings)
        except UserError as error:
            refused[label] = str(error)
            continue
        sent = steady_traffic(
            changed.current.method,
            changed.current.shapes,
            dict(experiment.mesh.shape),
            _keep_counts(changed),
        )
        exchange = 0.0
        if HOST_AXIS in links and experiment.topology.num_hosts > 1:
            found_link = links[HOST_AXIS]
            link = found_link if isinstance(found_link, Link) else found_link.link
            exchange = link.seconds(*sent)
        measured = _step_seconds(changed, batch) if is_measured else None
        seconds = compute_seconds + exchange
        row = Prediction(label, settings, sent.host_bytes, exchange, seconds, measured)
        found.append(row)
    text = recommend(found, margin, experiment.topology.num_hosts)
    return Advice(links, compute_seconds, tuple(found), refused, text)


def recommend(predictions: Sequence[Prediction], margin: float, num_hosts: int) -> str:
    """Says which method suits, which may be to send everything.

    Of the methods that are nearly as fast as the fastest, it takes the one that sends
    most, because that changes training least.
    """
    if num_hosts == 1:
        return "Do not compress: with one host, nothing crosses a link between hosts."
    base = next(row for row in predictions if row.label == BASE)
    fastest = min(predictions, key=lambda row: row.best_known)
    gain = base.best_known / fastest.best_known - 1
    if gain < margin:
        return (
            f"Do not compress: the fastest, {fastest.label}, would gain {gain:.1%} "
            f"over {BASE}, less than the {margin:.0%} that make a change worth it. "
            f"Use {BASE}."
        )
    near = [
        row
        for row in predictions
        if row.best_known <= (1 + margin) * fastest.best_known
    ]
    chosen = max(near, key=lambda row: row.host_bytes)
    flags = [f"--config.{key}={value}" for key, value in chosen.settings.items()]
    text = (
        f"Use {chosen.label} ({' '.join(flags)}): {_times(base, chosen)} the speed of "
        f"{BASE}, with {chosen.host_bytes / base.host_bytes:.3g} of its bytes."
    )
    if chosen is not fastest:
        text += (
            f" The fastest, {fastest.label}, has {_times(base, fastest)} that speed."
        )
    return text


def _times(base: Prediction, row: Prediction) -> str:
    return f"{base.best_known / row.best_known:.2f} times"


def report(advice: Advice, is_simulated: bool) -> str:
    """The advice as lines of text, which say whether the links are simulated."""
    lines = [f"{axis} axis: {link}" for axis, link in advice.links.items()]
    lines.append(f"computation of a step: {advice.compute_seconds:.4g} s")
    has_times = any(row.measured_seconds is not None for row in advice.predictions)
    base, seconds = advice.predictions[0], "{:.4f}".format
    columns: list[Column[Prediction]] = [
        Column("method", lambda row: row.label),
        Column("MB/step", lambda row: row.host_bytes / 1e6, "{:.3f}".format),
        Column("exchange s", lambda row: row.exchange_seconds, seconds),
        Column("step s", lambda row: row.seconds, seconds),
        Column("speed", lambda row: base.best_known / row.best_known, "{:.2f}".format),
    ]
    if has_times:
        columns.append(Column("measured s", lambda row: row.measured_seconds, seconds))
    lines += ["", make_table("", columns, advice.predictions).text()]
    lines += [f"{label}: not possible: {why}" for label, why in advice.refused.items()]
    lines += ["", advice.text, ""]
    lines.append(
        "Not known here: the accuracy that each method reaches in as many steps; "
        "docs/results/accuracy.md has what was measured."
    )
    if not has_times:
        lines.append(
            "Not counted: what methods compute to compress (--measure runs them), and "
            "what a network saves whose dead channels are cut out."
        )
    if is_simulated:
        lines.append(
            "Hosts share a machine: the links that were measured are not real."
        )
    return "\n".join(lines) + "\n"


# Units of flags, in Mbit/s and in seconds.
_SPEEDS = {"kbit": 1e-3, "Mbit": 1.0, "Gbit": 1e3}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _read(flag: str, text: str, units: Mapping[str, float], example: str) -> float:
    """The value of a text like the example; speeds may end with bit/s, bitps or bit.

    Example:
      >>> _read('link', '2.5Gbit/s', _SPEEDS, '1Gbit/s')
      2500.0
    """
    unit = text.strip().lstrip("0123456789.")
    number = text.strip().removesuffix(unit)
    try:
        return float(number) * units[re.sub("bit(/s|ps)$", "bit", unit.strip())]
    except (ValueError, KeyError):
        raise UserError(
            f"--{flag}={text} cannot be read; write it as in {example}"
        ) from None


def _assumed(values: Values) -> Assumed | None:
    """What the flags say of links and steps; None where they are to be measured."""
    if not values.link:
        for flag in _ELSEWHERE:
            name, value = flag.name, getattr(values, flag.name)
            if value != flag.default:
                raise UserError(
                    f"--{name}={value} is of links that are not here; give --link, as "
                    "in --link=1Gbit/s, or leave it out"
                )
        return None
    for name in ("hosts", "step"):
        if not getattr(values, name):
            raise UserError(
                f"--link={values.link} is for hosts that are not here: give --hosts, "
                "--devices of each and --step as well, as in --hosts=8 --step=120ms"
            )
    if values.measure:
        raise UserError("--measure runs real steps, and --link has none; leave one out")
    megabits = _read("link", values.link, _SPEEDS, "1Gbit/s")
    step = _read("step", values.step, _TIMES, "120ms")
    if not (megabits > 0 and step > 0):
        raise UserError(
            f"--link={values.link} and --step={values.step} must be more than nothing"
        )
    return Assumed(Link(megabits, _read("hop", values.hop, _TIMES, "120ms")), step)


def _with_settings(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """The same run with another method."""
    nested = config_to_dict(experiment.config)
    for dotted, value in settings.items():
        *path, key = dotted.split(".")
        functools.reduce(dict.__getitem__, path, nested)[key] = value
    changed = dataclasses.replace(experiment, config=resolve_config(nested))
    return with_method(changed, changed.config.method.name)


def _keep_counts(experiment: Experiment) -> dict[str, int]:
    """Channels that travel once nothing more is pruned."""
    channels, prunes = experiment.channels, experiment.current.method.pruning.in_rounds
    return dict(channels.keep_counts if prunes else channels.sizes)


def _step_seconds(experiment: Experiment, batch: Batch) -> float:
    """Measures a step in the steady state, its share of an exchange included."""
    method, programs = experiment.current.method, experiment.current.programs
    state = programs.init(jax.random.key(0))
    if method.preparation is not None:
        state = programs.prepare(state, (batch,) * method.preparation.num_batches)
    taught = _taught(experiment, state)
    total, kinds = 0.0, late_options(method)
    for share, options in kinds:

        def step(state: Any, options: Mapping[str, Any] = options) -> Any:
            return programs.local_step(state, taught(batch), **options)[0]

        seconds, state = _timed(step, state)
        total += share * seconds
    if method.rounds is None or method.is_streaming:
        return total
    counts = tuple(sorted(_keep_counts(experiment).items()))
    state = programs.exchange(state, keep_counts=counts, kind="freeze")
    seconds, _ = _timed(
        lambda state: programs.exchange(state, keep_counts=counts, kind="frozen"), state
    )
    return total + seconds * method.rounds.sync.rounds_per_step


def _taught(experiment: Experiment, state: TrainState) -> Callable[[Batch], Batch]:
    """Asks the teacher of a run, if it has one, about a batch."""
    teaching = experiment.teaching
    if teaching is None:
        return lambda batch: batch
    own = None
    if teaching.own is not None:
        own = with_network(None, experiment, state)
    return lambda batch: teaching.taught(batch, teaching.steps.start, own)


def _timed(step: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    """Median seconds of a step on the slowest process, and the state after the last."""
    seconds = []
    jax.block_until_ready(state)
    for _ in range(1 + _TIMED_STEPS):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        seconds.append(time.perf_counter() - start)
    return statistics.median(slowest(seconds)[1:]), state


def _first_batch(experiment: Experiment) -> Batch:
    """What the run would train on first, on the mesh."""
    with experiment.batches() as batches:
        return next(batches)


def _advise(values: Values, overrides: list[str]) -> None:
    out = Path(values.out) if values.out else None
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out={out}: there is no folder {out.parent}; make it first")
    config = resolve_config(override_config(load_config(values.config), overrides))
    assumed, launch = _assumed(values), given_launch(values)
    if assumed is None:
        check_has_links(config.topology.simulated)
    else:
        config = _elsewhere(config, f"{values.hosts}x{values.devices}")
        launch = dataclasses.replace(launch, launcher="none")
    started, topology = join_processes(config, launch)
    # Batches of a plan need not divide among devices that are not here.
    weights, goes_on = find_weights(config.model.weights), assumed is not None
    experiment = run_together(
        lambda: make_experiment(config, topology, weights=weights, goes_on=goes_on)
    )
    where = f"start     {started.described}\n{topology.table()}"
    if assumed is not None:
        where = f"{values.hosts} hosts x {values.devices} devices that are not here"
    if topology.is_primary:
        sys.stdout.write(f"{where}\n\n")
    advice = advise(
        experiment,
        is_measured=values.measure,
        margin=values.margin / 100,
        probe_seconds=float(values.seconds),
        assumed=assumed,
    )
    if not topology.is_primary:
        return
    sys.stdout.write(report(advice, topology.is_simulated and assumed is None))
    if out is not None:
        out.write_text(json.dumps(_plain(dataclasses.asdict(advice)), indent=2) + "\n")


def _elsewhere(config: ExperimentConfig, grid: str) -> ExperimentConfig:
    """The settings of a run on hosts x devices that are not here."""
    elsewhere = dataclasses.replace(
        config.topology, layout="auto", cpu_devices=0, simulated=grid, shard="none"
    )
    return dataclasses.replace(config, topology=elsewhere)


def _plain(value: Any) -> Any:
    """The same without infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if value == math.inf else value


if __name__ == "__main__":
    sys.exit(main())
