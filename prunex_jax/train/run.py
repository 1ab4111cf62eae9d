"""Runs an experiment from settings to summary; callable without the command line."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from prunex_jax.base.environment import environment
from prunex_jax.base.files import alone_in
from prunex_jax.base.signals import StopRequest
from prunex_jax.mesh import run_together
from prunex_jax.methods.inner import MakeOptimizer
from prunex_jax.processes import Heartbeat, LaunchFlags
from prunex_jax.tasks import Own
from prunex_jax.train.checkpoint import Checkpointer
from prunex_jax.train.config import ExperimentConfig, config_to_dict, resolve_config
from prunex_jax.train.console import Console, last_screen, start_screen
from prunex_jax.train.experiment import Experiment, make_experiment
from prunex_jax.train.folder import (
    ADDRESSES,
    WEIGHTS,
    RunFolder,
    holds_run,
    last_start,
)
from prunex_jax.train.joining import (
    check_same_reading,
    join_processes,
    make_heartbeat,
)
from prunex_jax.train.loop import Loop, Surroundings, Watch
from prunex_jax.train.same import (
    check_same_settings,
    check_shared_folder,
)
from prunex_jax.train.summary import TrainResult, finish
from prunex_jax.train.trackers import check_trackers, make_trackers
from prunex_jax.train.weights import find_weights


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
    watch: Watch | None = None,
) -> TrainResult | None:
    """Trains, resuming if the folder holds an unfinished run of the same settings.

    Args:
      config: Settings in any form that `config.resolve_config` takes.
      workdir: The run folder: settings, metrics, checkpoints and summary.
      model: A network of your own instead of `config.model`: a Flax NNX module or its
        class, a Linen module, an Equinox module, or a pair (init, apply) of functions;
        see `models.own_model`.
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
      watch: Called with a `loop.Progress` and the training state before the first step
        and after every one, on every process; what it raises ends the run.
    Returns:
      The network and its summary, or None if Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2
      stopped the run, which is saved then and goes on with the next call.
    Raises:
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
    own = None
    if any(part is not None for part in (model, data, loss, inputs, metrics)):
        own = Own(model, data, loss, inputs, metrics or {})
    config = resolve_config(config)
    launch = launch or LaunchFlags()
    check_trackers(config.run)
    # Before process 0 may write there.
    goes_on, last = holds_run(workdir) and not fresh, last_start(workdir)
    started, topology = join_processes(config, launch, last)
    described = environment(topology.describe())
    if started.addresses:
        described[ADDRESSES] = list(started.addresses)

    def prepare() -> tuple[Experiment, RunFolder]:
        weights = find_weights(config.model.weights, workdir, fresh=fresh)
        experiment = make_experiment(
            config, topology, own, optimizer, weights, goes_on=goes_on
        )
        if weights is not None:
            described[WEIGHTS] = weights.record()
        in_use.enter_context(alone_in(workdir, topology.is_primary))
        plain, is_primary = config_to_dict(experiment.config), topology.is_primary
        return experiment, RunFolder.open(
            workdir,
            plain,
            described,
            is_primary=is_primary,
            fresh=fresh,
            exact_topology=exact_topology,
        )

    with (
        make_heartbeat(config, launch) as heartbeat,
        contextlib.ExitStack() as in_use,
        heartbeat.telling(),
    ):
        check_same_settings(config)
        experiment, folder = run_together(prepare)
        check_shared_folder(folder.workdir)
        check_same_reading(experiment)
        console = Console(topology.is_primary, num_steps=experiment.num_steps)
        in_use.enter_context(console)
        folder = in_use.enter_context(_shown_elsewhere(folder, experiment, console))
        console.line(
            start_screen(experiment, str(workdir), described, started.described)
        )
        around = functools.partial(
            Surroundings,
            watch=watch,
            at=heartbeat.at,
            timed_by=heartbeat.timed_by,
            exact_topology=exact_topology,
        )
        result = _run(experiment, folder, console, around, heartbeat)
        if result is not None:
            console.line(last_screen(result.summary, str(workdir)))
        return result


@contextlib.contextmanager
def _shown_elsewhere(
    folder: RunFolder, experiment: Experiment, console: Console
) -> Iterator[RunFolder]:
    """The folder of a run, whose rows go to the trackers of its settings as well."""
    if not folder.is_primary:
        yield folder
        return
    config = experiment.config
    settings = config_to_dict(config)
    made = make_trackers(config.run, folder.workdir, settings, console.line)
    with made as trackers:
        yield dataclasses.replace(folder, trackers=trackers)


def _run(
    experiment: Experiment,
    folder: RunFolder,
    console: Console,
    around: Callable[..., Surroundings],
    heartbeat: Heartbeat,
) -> TrainResult | None:
    """Trains to the end, or until asked to stop."""
    kept = experiment.config.run.checkpoints_kept
    with (
        Checkpointer(folder.checkpoint_dir, kept) as checkpointer,
        StopRequest() as stop,
        heartbeat.telling(),
    ):
        loop = Loop(experiment, around(folder, checkpointer, console, stop))
        state, is_complete = loop.run()
        if not is_complete:
            console.line(
                f"stopped at step {loop.position.step} of {loop.num_steps} and saved; "
                "the same command goes on from here"
            )
            return None
        with console.busy("shrinking and testing the network"):
            result = finish(
                loop.experiment, loop.position, loop.clock, state, loop.final_mean
            )
    folder.write_summary(result.summary)
    return result
