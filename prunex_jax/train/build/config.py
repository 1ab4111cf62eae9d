"""Turns a ConfigDict into frozen, checked dataclasses, once.

Config files start from `default_config()`, change what their experiment changes, and
nothing right of this module ever sees a ConfigDict.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from prunex_jax.base.errors import UserError
from prunex_jax.base.settings import (
    OptimizerConfig,
    check_settings,
    read_settings,
    setting,
    without_none,
)
from prunex_jax.data.settings import DataConfig
from prunex_jax.mesh.settings import TopologyConfig
from prunex_jax.methods import MethodConfig, load_plugins, method_config
from prunex_jax.models.settings import ModelConfig
from prunex_jax.sparsity.settings import SparsityConfig
from prunex_jax.train.build.settings import DistillConfig, RunConfig

# Settings that may change when a run continues, because its parameters do not depend on
# them: how often it reports, evaluates or saves; where data lie and how they are read
# (both loaders make the same batches); how hosts are found, as long as the numbers of
# hosts and devices stay.
FREE_ON_RESUME = (
    "data.dir",
    "data.eval_batch_size",
    "data.loader",
    "data.num_workers",
    "run.checkpoint_every_steps",
    "run.checkpoints_kept",
    "run.compile_ahead",
    "run.compile_cache",
    "run.eval_every_steps",
    "run.join_seconds",
    "run.log_every_steps",
    "run.max_host_drift",
    "run.min_processes",
    "run.profile_steps",
    "run.silence_seconds",
    "run.stall_seconds",
    "run.trackers",
    "topology.cpu_devices",
    "topology.layout",
    "topology.link_gbits",
    "topology.shard",
    "topology.simulated",
)
# Those of earlier versions that might.
_DEPARTED_AND_FREE = ("run.tensorboard", "run.wandb")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Everything that defines a run."""

    seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    topology: TopologyConfig = TopologyConfig()  # noqa: RUF009
    data: DataConfig = DataConfig()  # noqa: RUF009
    model: ModelConfig = ModelConfig()  # noqa: RUF009
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009
    sparsity: SparsityConfig = SparsityConfig()  # noqa: RUF009
    # With the settings of every registered method.
    method: MethodConfig = dataclasses.field(default_factory=method_config)
    distill: DistillConfig = DistillConfig()  # noqa: RUF009
    run: RunConfig = RunConfig()  # noqa: RUF009


def default_config() -> ml_collections.ConfigDict:
    """Makes the ConfigDict that every config file starts from.

    Returns:
      A ConfigDict of all settings at their defaults, locked: setting an unknown key
      raises at once. Values that may be None in a dataclass are placeholders of their
      type, so that the command line can set them.
    Example:
      >>> config = default_config()
      >>> config.data.name = 'cifar10'
      >>> config.run.epochs = 30.0
    """
    return _config_dict_of(ExperimentConfig())


def add_plugins(config: ml_collections.ConfigDict) -> None:
    """Imports `method.plugins`, and adds the settings of the methods they register.

    Raises:
      UserError: One cannot be imported.
    """
    load_plugins(config.method.plugins)
    with config.method.unlocked():
        for key, value in default_config().method.items():
            if key not in config.method:
                config.method[key] = value


# Steps are counted in int32.
_MOST_STEPS = 2**31 - 1
# Settings that earlier versions had, at the values at which they changed nothing: a run
# folder of theirs goes on without them.
_DEPARTED = {
    "method.rounds.average": "mean",
    "method.rounds.clip": "none",
    "method.rounds.top_k_mean": "hosts",
    "method.local_sgd.channel_share": 1.0,
    "method.local_sgd.channel_choice": "moved",
    "run.average_share": 0.0,
    "sparsity.shrink_stairs": False,
    "run.tensorboard": False,
    "run.wandb": "",
    "sparsity.path": "stairs",
    "method.hsadmm.adapt": "none",
    "method.topk.is_exact": True,
    "method.dgc.is_exact": True,
    "model.vit.positions": "learned",
}


def resolve_config(
    config: ml_collections.ConfigDict | Mapping[str, Any] | ExperimentConfig,
) -> ExperimentConfig:
    """Turns settings of any form into one checked `ExperimentConfig`.

    Args:
      config: What `get_config()` of a config file returned, a nested dict (missing
        keys take their defaults), or an `ExperimentConfig`, which is checked again.
    Returns:
      The frozen configuration.
    Raises:
      UserError: Unknown key (with the nearest known one), a value of the wrong type, or
        values that cannot run whatever the machine.
    Example:
      >>> resolve_config({'run': {'steps': 5}}).run.steps
      5
    """
    if isinstance(config, ExperimentConfig):
        resolved = config
    else:
        plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        plain = _without_departed(plain)
        method = plain.get("method", {})
        load_plugins(method.get("plugins", ()) if isinstance(method, Mapping) else ())
        resolved = read_settings(ExperimentConfig(), plain, "config")
    check_settings(resolved, "config")
    _check_run(resolved.run, resolved.data)
    return resolved


def config_to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Gives the settings as nested dicts; `resolve_config` inverts it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_difference(config: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
    """Lists the settings that differ from the defaults.

    Returns:
      Dotted key -> (default, value), in the order of the dataclasses.
    Example:
      >>> config_difference(resolve_config({'seed': 3, 'run': {'steps': 9}}))
      {'seed': (0, 3), 'run.steps': (0, 9)}
    """
    default = dotted_keys(dataclasses.asdict(ExperimentConfig()))
    values = dotted_keys(dataclasses.asdict(config))
    return {
        key: (default[key], value)
        for key, value in values.items()
        if value != default[key]
    }


def dotted_keys(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Lists nested settings by dotted key.

    Example:
      >>> dotted_keys({'seed': 0, 'run': {'steps': 9}})
      {'seed': 0, 'run.steps': 9}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= dotted_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def fixed_differences(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Lists what differs between two runs and may not when one continues the other.

    A setting that an earlier version did not know was at what is its default now.

    Returns:
      Key, value before and value now, "absent" where there is none; sorted by key.
    Example:
      >>> fixed_differences({'seed': 1, 'data.dir': 'a'}, {'seed': 2, 'data.dir': 'b'})
      [('seed', 1, 2)]
    """
    before = {k: v for k, v in before.items() if not _has_departed(k, v)}
    free = {*FREE_ON_RESUME, *_DEPARTED_AND_FREE}
    keys = sorted((before.keys() | now.keys()) - free)
    before = {**dotted_keys(config_to_dict(ExperimentConfig())), **before}
    pairs = [(key, before.get(key, "absent"), now.get(key, "absent")) for key in keys]
    return [(key, was, is_now) for key, was, is_now in pairs if was != is_now]


def _without_departed(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings without those that are no more and changed nothing."""
    return {
        key: _without_departed(value, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else value
        for key, value in settings.items()
        if not _has_departed(prefix + str(key), value)
    }


def _has_departed(key: str, value: Any) -> bool:
    return key in _DEPARTED and value == _DEPARTED[key]


def _config_dict_of(value: Any) -> ml_collections.ConfigDict:
    hints = typing.get_type_hints(type(value))
    config = ml_collections.ConfigDict()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            config[field.name] = _config_dict_of(item)
        elif item is None:
            config[field.name] = ml_collections.config_dict.placeholder(
                without_none(hints[field.name])
            )
        else:
            config[field.name] = item
    return config.lock()


def _check_run(run: RunConfig, data: DataConfig) -> None:
    """How long a run is, and what is left to score its network on."""
    if (run.steps > 0) == (run.epochs > 0):
        raise UserError(
            f"config.run.steps={run.steps} and config.run.epochs={run.epochs}: give "
            "exactly one of them a positive value"
        )
    if not run.read_test and not data.validation_share:
        raise UserError(
            "config.run.read_test=False and config.data.validation_share=0 leave "
            "nothing to score the network on: hold out a share for validation"
        )


def total_steps(config: ExperimentConfig, num_examples: int) -> int:
    """Length of the run in steps, whichever unit it was given in.

    Raises:
      UserError: They are more than can be counted.
    Example:
      >>> config = resolve_config({'run': {'epochs': 2.0}, 'data': {'batch_size': 10}})
      >>> total_steps(config, 105)
      21
    """
    if config.run.steps:
        return config.run.steps
    steps = config.run.epochs * num_examples / config.data.batch_size
    if steps > _MOST_STEPS:
        raise UserError(
            f"config.run.epochs={config.run.epochs:g} are {steps:.3g} steps, and a run "
            f"has at most {_MOST_STEPS}; lower it"
        )
    return max(1, round(steps))
