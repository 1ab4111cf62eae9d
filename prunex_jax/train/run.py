"""Runs an experiment from settings to summary; callable without the command line."""

import contextlib
import dataclasses
import inspect
import json
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from prunex_jax.base.environment import environment
from prunex_jax.base.errors import RunStopped, UserError
from prunex_jax.base.files import alone_in
from prunex_jax.base.signals import StopRequest
from prunex_jax.mesh import Topology, gather_texts, run_together
from prunex_jax.processes import Heartbeat, LaunchFlags
from prunex_jax.train.build.config import (
    ExperimentConfig,
    config_to_dict,
    resolve_config,
)
from prunex_jax.train.build.experiment import (
    Experiment,
    make_experiment,
    own_of,
)
from prunex_jax.train.build.fingerprints import fingerprints_of
from prunex_jax.train.build.joining import (
    check_same_reading,
    check_same_settings,
    check_shared_folder,
    join_processes,
    make_heartbeat,
)
from prunex_jax.train.build.optimizer import MakeOptimizer
from prunex_jax.train.console import Console, last_screen, start_screen
from prunex_jax.train.loop import AfterStep, Loop, Progress, Surroundings
from prunex_jax.train.records.checkpoint import Checkpointer
from prunex_jax.train.records.folder import (
    ADDRESSES,
    FINGERPRINTS,
    WEIGHTS,
    RunFolder,
    holds_run,
    last_start,
)
from prunex_jax.train.records.summary import TrainResult, finish
from prunex_jax.train.records.trackers import Trackers, check_trackers
from prunex_jax.train.records.weights import find_weights
from prunex_jax.train.steps.state import TrainState


def train(
    config: ml_collections.ConfigDict | Mapping[str, Any] | ExperimentConfig,
    workdir: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    loss: Callable[[Any, Any], Any] | str | None = None,
    inputs: Any = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    optimizer: MakeOptimizer | None = None,
    fresh: bool = False,
    exact_topology: bool = False,
    launch: LaunchFlags | None = None,
    after_step: Sequence[AfterStep] = (),
) -> TrainResult:
    """Trains, resuming if the folder holds an unfinished run of the same settings.

    Args:
      config: Settings in any form that `config.resolve_config` takes.
      workdir: The run folder: settings, metrics, checkpoints and summary.
      model: A network of your own instead of `config.model`: a Flax NNX module or its
        class, a module of Linen, Equinox or PyTorch, or a pair (init, apply) of
        functions; see `models.own_model`.
      data: Examples of your own instead of `config.data`: arrays such as (x, y), data
        sources and data sets that are indexed, or lists of examples; or a dict of them
        with `train` and perhaps `validation` and `test`; see `data.open_own`.
      loss: (answers, examples) -> their mean loss, or the loss of each; or
        `classification` or `regression`. None takes the first for integer targets, and
        the second for others.
      inputs: What the network reads of examples: a key, or a function of them. None is
        x of (x, y), entry `image` of a dict, or all of a single array.
      metrics: Name -> (answers, examples) -> mean or each, measured beside the loss.
      optimizer: Makes the inner optimizer of the learning rate, as `optax.lamb` does,
        instead of `config.optimizer.name`; a function of optax is also given the weight
        decay of the settings, if it takes one.
      fresh: Start over, removing the run that the folder holds.
      exact_topology: Refuse to go on with a run that was on another number of hosts, or
        of devices per host; otherwise what they hold is merged or spread.
      launch: How processes find each other; None detects it.
      after_step: Functions of a `loop.Progress` and the training state, called before
        the first step and after every one, on every process; or pairs of what says
        when, such as `every(100)`, and such a function. What one raises ends the run.
    Returns:
      The network and its summary.
    Raises:
      RunStopped: Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 stopped the run. It is saved, and
        goes on with the next call.
      UserError: Something about the settings, the machine or the folder cannot work, or
        another process trains into it.
      TrainingDivergedError: The loss became infinite or not a number.
    Example:
      >>> import tempfile
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def init(key):
      ...     return {'hidden': jax.random.normal(key, (64, 32)) / 8,
      ...             'out': jnp.zeros((32, 10))}
      >>> def apply(params, images):
      ...     x = images.reshape(len(images), -1)
      ...     return jax.nn.relu(x @ params['hidden']) @ params['out']
      >>> settings = {'run': {'steps': 4}, 'data': {'batch_size': 32}}
      >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
      ...     result = train(settings, folder, model=(init, apply))
      prunex_jax ...
      >>> result.summary['params_kept'] / result.summary['params_dense']
      0.5
    """
    running = _running(types.SimpleNamespace(**locals()))  # All arguments, by name.
    while True:
        try:
            next(running)
        except StopIteration as end:
            result: TrainResult = end.value
            return result


def train_steps(
    config: ml_collections.ConfigDict | Mapping[str, Any] | ExperimentConfig,
    workdir: str | Path,
    **options: Any,
) -> Iterator[tuple[Progress, TrainState]]:
    """Trains step by step, for whoever wants to look or act between steps.

    A run that is left before its end is saved where it stands. `train` with the same
    arguments goes on from there, and gives the result.

    Args:
      config: As of `train`.
      workdir: As there.
      **options: Other arguments of `train`, by name.
    Yields:
      How far the run is, and what it trains, before the first step and after every
      one. The next step takes the arrays over: copy what is to stay.
    Raises:
      RunStopped: As from `train`.
      UserError: As there.
      TrainingDivergedError: As there.
    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype('f4')
      >>> labels = (x[:, 0] > 0).astype('i4')
      >>> model = lambda key: jnp.zeros((3, 2)), lambda w, x: x @ w
      >>> settings = {'run': {'steps': 4}, 'data': {'batch_size': 16}}
      >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
      ...     run = train_steps(settings, folder, model=model, data=(x, labels))
      ...     for progress, state in run:
      ...         if progress.step == 2:
      ...             break
      ...     run.close()
      prunex_jax ...
      >>> progress.step
      2
    """
    asked = inspect.signature(train).bind(config, workdir, **options)
    asked.apply_defaults()
    running = _running(types.SimpleNamespace(**asked.arguments))
    with contextlib.closing(running):
        for loop in running:
            yield loop.progress, loop.state


def _running(asked: types.SimpleNamespace) -> Generator[Loop, None, TrainResult]:
    """The loop of a run, before the first step and after every one; then its result.

    Raises:
      RunStopped: It was asked to stop, and all that watches over it was left.
    """
    result = yield from _watched(asked)
    if result is None:
        raise RunStopped("the run was stopped and saved; the same call goes on")
    return result


_Running = Generator[Loop, None, TrainResult | None]


def _watched(asked: types.SimpleNamespace) -> _Running:
    """The same among processes that are watched over; None if it was stopped."""
    config, workdir = resolve_config(asked.config), asked.workdir
    for name in ("fresh", "exact_topology"):
        value = getattr(asked, name)
        if not isinstance(value, bool):  # A word would count as true, and remove a run.
            raise UserError(f"{name}={value!r} must be True or False")
    launch = asked.launch or LaunchFlags()
    check_trackers(config.run)
    # Before process 0 may write there.
    goes_on, last = holds_run(workdir) and not asked.fresh, last_start(workdir)
    started, topology = join_processes(config, launch, last)
    described = environment(topology.describe())
    if started.addresses:
        described[ADDRESSES] = list(started.addresses)

    # What is in use is left when an error of this process has been told to the others.
    with (
        contextlib.ExitStack() as in_use,
        make_heartbeat(config, launch) as heartbeat,
    ):
        check_same_settings(config)
        experiment = run_together(
            lambda: _prepared(asked, config, topology, described, goes_on)
        )
        # Nothing is written before all have read the same.
        check_same_reading(experiment, described[FINGERPRINTS])
        folder = run_together(
            lambda: _opened(asked, experiment, topology, described, in_use)
        )
        heartbeat.writes_into(folder.workdir)
        check_shared_folder(folder.workdir)
        console = Console(topology.is_primary, num_steps=experiment.num_steps)
        in_use.enter_context(console)
        settings = config_to_dict(experiment.config)
        made = Trackers(config.run, folder.workdir, settings, console.line)
        folder = dataclasses.replace(folder, trackers=in_use.enter_context(made))
        console.line(
            start_screen(experiment, str(workdir), described, started.described)
        )
        result = yield from _trained(asked, experiment, folder, console, heartbeat)
        if result is not None:
            console.line(last_screen(result.summary, str(workdir)))
        return result


def _prepared(
    asked: types.SimpleNamespace,
    config: ExperimentConfig,
    topology: Topology,
    described: dict[str, Any],
    goes_on: bool,
) -> Experiment:
    """The run; what its start has found is added to what describes it."""
    weights = find_weights(config.model.weights, asked.workdir, fresh=asked.fresh)
    own = own_of(asked.model, asked.data, asked.loss, asked.inputs, asked.metrics)
    experiment = make_experiment(
        config, topology, own, asked.optimizer, weights, goes_on=goes_on
    )
    if weights is not None:
        described[WEIGHTS] = weights.record()
    described[FINGERPRINTS] = fingerprints_of(
        experiment.task, experiment.config, own, asked.optimizer
    )
    return experiment


def _opened(
    asked: types.SimpleNamespace,
    experiment: Experiment,
    topology: Topology,
    described: dict[str, Any],
    in_use: contextlib.ExitStack,
) -> RunFolder:
    """The folder of the run, which no other run uses from now on."""
    in_use.enter_context(alone_in(asked.workdir, topology.is_primary))
    return RunFolder.open(
        asked.workdir,
        config_to_dict(experiment.config),
        described,
        is_primary=topology.is_primary,
        fresh=asked.fresh,
        exact_topology=asked.exact_topology,
    )


def _trained(
    asked: types.SimpleNamespace,
    experiment: Experiment,
    folder: RunFolder,
    console: Console,
    heartbeat: Heartbeat,
) -> _Running:
    """Trains to the end, or until asked to stop."""
    kept = experiment.config.run.checkpoints_kept
    with (
        Checkpointer(folder.checkpoint_dir, kept) as checkpointer,
        StopRequest() as stop,
    ):
        around = Surroundings(
            folder,
            checkpointer,
            console,
            stop,
            after_step=tuple(asked.after_step),
            at=heartbeat.at,
            timed_by=heartbeat.timed_by,
        )
        loop = Loop(experiment, around)
        has_ended = True
        for _ in loop.steps():
            has_ended = False
            yield loop
        if not loop.is_complete:
            console.line(
                f"stopped at step {loop.position.step} of {loop.num_steps} and saved; "
                "the same command goes on from here"
            )
            return None
        with console.busy("shrinking and testing the network"):
            end = loop.experiment, loop.position, loop.clock, loop.state
            written = _same_everywhere(folder.read_summary()) if has_ended else None
            result = finish(*end, folder.workdir, written)
        if written is None:
            folder.write_summary(result.summary)
        return result


def _same_everywhere(summary: dict[str, Any] | None) -> dict[str, Any] | None:
    """What process 0 has read."""
    read: dict[str, Any] | None = json.loads(gather_texts(json.dumps(summary))[0])
    return read
