"""Turns a ConfigDict into frozen, checked dataclasses, once.

The complete list of settings is in `settings`. Config files start from
`default_config()`, change what their experiment changes, and nothing right of this
module ever sees a ConfigDict.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections

from prunex_jax.base.errors import UserError, suggest
from prunex_jax.base.settings import (
    DataConfig,
    DenseConfig,
    DgcConfig,
    DistillConfig,
    ExperimentConfig,
    HsadmmConfig,
    ImportanceConfig,
    LocalSgdConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    PactrainConfig,
    PowersgdConfig,
    RunConfig,
    SparsityConfig,
    TopkConfig,
    TopologyConfig,
)

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
    "run.eval_every_steps",
    "run.log_every_steps",
    "run.max_host_drift",
    "topology.cpu_devices",
    "topology.layout",
    "topology.simulated",
)


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
        resolved = _from_mapping(ExperimentConfig, plain, "config")
    _check(resolved)
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

    Args:
      before: Settings by dotted key.
      now: The same.
    Returns:
      Key, value before and value now, "absent" where there is none; sorted by key.
    Example:
      >>> fixed_differences({'seed': 1, 'data.dir': 'a'}, {'seed': 2, 'data.dir': 'b'})
      [('seed', 1, 2)]
    """
    keys = sorted((before.keys() | now.keys()) - set(FREE_ON_RESUME))
    before = {**dotted_keys(config_to_dict(ExperimentConfig())), **before}
    pairs = [(key, before.get(key, "absent"), now.get(key, "absent")) for key in keys]
    return [(key, was, is_now) for key, was, is_now in pairs if was != is_now]


def _config_dict_of(value: Any) -> ml_collections.ConfigDict:
    hints = typing.get_type_hints(type(value))
    config = ml_collections.ConfigDict()
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            config[field.name] = _config_dict_of(item)
        elif item is None:
            config[field.name] = ml_collections.config_dict.placeholder(
                _without_none(hints[field.name])
            )
        else:
            config[field.name] = item
    return config.lock()


def _without_none(hint: Any) -> Any:
    options = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
    return options[0]


def _from_mapping(cls: type, values: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise UserError(
                f"{where}.{key} is not a setting{suggest(str(key), hints)} "
                f"(known: {', '.join(hints)})"
            )
    arguments = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            arguments[key] = _from_mapping(
                typing.cast(type, hint), value, f"{where}.{key}"
            )
        else:
            arguments[key] = _checked_type(value, hint, f"{where}.{key}")
    return cls(**arguments)


def _checked_type(value: Any, hint: Any, where: str) -> Any:
    """Returns `value` as the hinted type, or says what was expected."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        options = typing.get_args(hint)
        if value not in options:
            raise UserError(
                f"{where}={value!r} is not one of {', '.join(map(str, options))}"
                f"{suggest(str(value), options)}"
            )
        return value
    if origin in (types.UnionType, typing.Union):
        return (
            None if value is None else _checked_type(value, _without_none(hint), where)
        )
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise UserError(f"{where}={value!r} should be a tuple of strings")
        return tuple(_checked_type(v, typing.get_args(hint)[0], where) for v in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_wrong_bool = isinstance(value, bool) and hint is not bool
    if not isinstance(value, hint) or is_wrong_bool:
        raise UserError(f"{where}={value!r} should be of type {hint.__name__}")
    return value


def _check(config: ExperimentConfig) -> None:
    """Rejects what cannot run on any machine; `sparsity` checks its own settings."""
    run, data, optimizer = config.run, config.data, config.optimizer
    hsadmm = config.method.hsadmm
    _check_run(run, data)
    positive = {
        "data.batch_size": data.batch_size,
        "data.dirichlet_alpha": data.dirichlet_alpha,
        "distill.temperature": config.distill.temperature,
        "optimizer.learning_rate": optimizer.learning_rate,
        "optimizer.micro_batches": optimizer.micro_batches,
        "model.width": config.model.width,
        "run.log_every_steps": run.log_every_steps,
        "run.checkpoints_kept": run.checkpoints_kept,
        "method.hsadmm.sync_period": hsadmm.sync_period,
        "method.topk.density": config.method.topk.density,
        "method.dgc.density": config.method.dgc.density,
        "method.powersgd.rank": config.method.powersgd.rank,
    }
    for key, value in positive.items():
        if not value > 0:
            raise UserError(f"config.{key}={value} must be positive")
    not_negative = {
        "run.steps": run.steps,
        "run.epochs": run.epochs,
        "run.eval_every_steps": run.eval_every_steps,
        "run.checkpoint_every_steps": run.checkpoint_every_steps,
        "run.max_host_drift": run.max_host_drift,
        "run.reestimate_batches": run.reestimate_batches,
        "topology.cpu_devices": config.topology.cpu_devices,
        "data.eval_batch_size": data.eval_batch_size,
        "data.num_workers": data.num_workers,
        "data.image_size": data.image_size,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_norm": optimizer.clip_norm,
        "method.bucket_bytes": config.method.bucket_bytes,
        "method.hsadmm.rho_device": hsadmm.rho_device or 0.0,
        "method.hsadmm.rho_host": hsadmm.rho_host or 0.0,
        "method.hsadmm.outer_step": hsadmm.outer_step or 0.0,
        "method.powersgd.min_gain": config.method.powersgd.min_gain,
    }
    for key, value in not_negative.items():
        if value < 0:
            raise UserError(f"config.{key}={value} must not be negative")
    shares = {
        "data.validation_share": (data.validation_share, 0.9),
        "distill.weight": (config.distill.weight, 1.0),
        "optimizer.momentum": (optimizer.momentum, 0.9999),
        "optimizer.label_smoothing": (optimizer.label_smoothing, 0.9999),
        "optimizer.warmup_share": (optimizer.warmup_share, 1.0),
        "optimizer.rewind_share": (optimizer.rewind_share, 1.0),
        "method.hsadmm.prox_strength": (hsadmm.prox_strength or 0.0, 1.0),
        "method.hsadmm.dual_decay": (hsadmm.dual_decay or 0.0, 1.0),
        "method.hsadmm.outer_momentum": (hsadmm.outer_momentum or 0.0, 0.9999),
        "method.topk.density": (config.method.topk.density, 1.0),
        "method.dgc.density": (config.method.dgc.density, 1.0),
        "method.dgc.warmup_share": (config.method.dgc.warmup_share, 1.0),
    }
    for key, (value, largest) in shares.items():
        if not 0.0 <= value <= largest:
            raise UserError(f"config.{key}={value} must lie in [0, {largest:g}]")
    _check_shared_positions(config.method)


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


def _check_shared_positions(method: MethodConfig) -> None:
    """The ranges of methods in which all hosts send the same entries."""
    importance, pactrain = method.importance, method.pactrain
    for key, density in (
        ("importance.density", importance.density),
        ("pactrain.density", pactrain.density),
    ):
        if not 0.0 < density <= 1.0:
            raise UserError(f"config.method.{key}={density} must lie in (0, 1]")
    for key, value, smallest in (
        ("importance.num_choosers", importance.num_choosers, 1),
        ("importance.refresh_period", importance.refresh_period, 1),
        ("importance.damping", importance.damping, 0),
        ("pactrain.score_batches", pactrain.score_batches, 1),
        ("pactrain.stable_steps", pactrain.stable_steps, 0),
    ):
        if value < smallest:
            raise UserError(f"config.method.{key}={value} must be at least {smallest}")


def total_steps(config: ExperimentConfig, num_examples: int) -> int:
    """Length of the run in steps, whichever unit it was given in.

    Args:
      config: The run.
      num_examples: Training examples in one epoch.
    Example:
      >>> config = resolve_config({'run': {'epochs': 2.0}, 'data': {'batch_size': 10}})
      >>> total_steps(config, 105)
      21
    """
    if config.run.steps:
        return config.run.steps
    return max(1, round(config.run.epochs * num_examples / config.data.batch_size))


__all__ = [
    "FREE_ON_RESUME",
    "DataConfig",
    "DenseConfig",
    "DgcConfig",
    "DistillConfig",
    "ExperimentConfig",
    "HsadmmConfig",
    "ImportanceConfig",
    "LocalSgdConfig",
    "MethodConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PactrainConfig",
    "PowersgdConfig",
    "RunConfig",
    "SparsityConfig",
    "TopkConfig",
    "TopologyConfig",
    "config_difference",
    "config_to_dict",
    "default_config",
    "dotted_keys",
    "fixed_differences",
    "resolve_config",
    "total_steps",
]
