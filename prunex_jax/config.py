"""Turns a ConfigDict into frozen, checked dataclasses, once.

The dataclasses below are the complete list of settings; their comments are the
reference. Config files start from `default_config()`, change what their experiment
changes, and nothing right of this module ever sees a ConfigDict.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections

from prunex_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
    """Which devices form a host, and how simulated devices are made."""

    # auto | host | process | slice, or the number of hosts, as in "2".
    layout: str = "auto"
    # Virtual CPU devices of this process; 0 uses the devices the machine has.
    cpu_devices: int = 0


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes batches."""

    # digits | synthetic, or any image classification set that TFDS has prepared.
    name: str = "digits"
    # TFDS data directory; empty means TFDS's own default.
    dir: str = ""
    # Examples per step over the whole mesh.
    batch_size: int = 64
    # Share of the training split held out for validation.
    validation_share: float = 0.1
    # none | shift (1 pixel) | crop_flip (pad 4, CIFAR) | random_resized_crop (ImageNet)
    augment: str = "none"
    # Side of the image after decoding and resizing; 0 keeps the size of the set.
    image_size: int = 0
    # auto | memory (whole set in memory) | grain (read and decoded while training).
    loader: str = "auto"
    # Grain worker processes per jax process; 0 decodes in threads.
    num_workers: int = 0
    # Evaluation batch over the whole mesh; 0 means `batch_size`.
    eval_batch_size: int = 0
    # Size and shape of the synthetic set.
    synthetic_examples: int = 1024
    synthetic_classes: int = 10
    # Where the images of each host come from: shuffled over all hosts.
    shuffle_seed: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which network is trained."""

    # resnet20 | resnet32 | resnet56 | resnet110 | resnet18 | resnet34 | resnet50 |
    # resnet101 | resnet152 | wide_resnet50_2 | vgg16 | vgg19
    name: str = "resnet20"
    # cifar (3x3 stem) | imagenet (7x7 stem, max pool) | auto (by image size).
    stem: str = "auto"
    # Multiplies every width.
    width: float = 1.0
    # Batch statistics over the images of one device, or of all devices of a host.
    norm_scope: Literal["device", "host"] = "device"
    # float32 | bfloat16 for activations; parameters are float32.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # chunked (kernel gradients in chunks of the batch, faster on CPUs) | direct | auto
    # (chunked on CPUs, direct elsewhere).
    convolution: Literal["auto", "direct", "chunked"] = "auto"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer and its learning rate."""

    name: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    # Decoupled for adamw, part of the gradient for sgd; kernels only.
    weight_decay: float = 5e-4
    # Share of the run for the linear warm-up.
    warmup_share: float = 0.05
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    label_smoothing: float = 0.0
    # Largest gradient norm, measured after averaging; 0 means no clipping.
    clip_norm: float = 0.0


@dataclasses.dataclass(frozen=True)
class SparsityConfig:
    """How many channels are kept, of which groups, and when."""

    # Share of the channels removed at the end, in [0, 1).
    sparsity: float = 0.5
    # uniform (the same share of every group) | global (ranked over all groups).
    budget: Literal["uniform", "global"] = "uniform"
    # Share of the run at which pruning starts, and at which the mask freezes.
    start_share: float = 0.1
    freeze_share: float = 0.5
    # Number of densities between dense and final; each recompiles the exchange.
    num_stairs: int = 8
    # Kept counts are multiples of this where a group is wide enough.
    round_to: int = 8
    # Groups whose name contains one of these are left dense.
    exclude: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class HsadmmConfig:
    """Parameters of hierarchical structured ADMM; None takes the preset's value."""

    # recommended | reset | leaky | paper: see optim.hsadmm.PRESETS.
    preset: str = "recommended"
    # Steps between exchanges over the host axis.
    sync_period: int = 4
    # gradient (one copy per host) | consensus (one copy per device).
    device_level: Literal["gradient", "consensus"] = "gradient"
    # Pull of every local step towards the consensus, times the learning rate.
    rho_device: float | None = None
    # Host penalty relative to rho_device; 0 collapses host and global consensus.
    rho_host: float | None = None
    # Pull of every round towards the consensus, in [0, 1].
    prox_strength: float | None = None
    # What remains of the device dual after a round; 0 means no device dual.
    dual_decay: float | None = None
    outer_step: float | None = None
    outer_momentum: float | None = None
    # none | residual: residual balancing of the penalties (paper preset).
    adapt: Literal["none", "residual"] = "none"
    # float32 | float16: type of the compact array on the host axis.
    wire_dtype: Literal["float32", "float16"] = "float32"


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """Which method exchanges what over the host axis."""

    name: str = "hsadmm"
    hsadmm: HsadmmConfig = HsadmmConfig()


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, and how often it reports, evaluates and saves."""

    # Exactly one of the two is positive.
    steps: int = 0
    epochs: float = 0.0
    log_every_steps: int = 20
    # 0 evaluates at the end only.
    eval_every_steps: int = 0
    # 0 saves at the end, and on a signal, only.
    checkpoint_every_steps: int = 200
    checkpoints_kept: int = 2


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Everything that defines a run."""

    seed: int = 0
    topology: TopologyConfig = TopologyConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sparsity: SparsityConfig = SparsityConfig()
    method: MethodConfig = MethodConfig()
    run: RunConfig = RunConfig()


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
    default = _flatten(dataclasses.asdict(ExperimentConfig()))
    values = _flatten(dataclasses.asdict(config))
    return {
        key: (default[key], value)
        for key, value in values.items()
        if value != default[key]
    }


def settings_of(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Lists the settings of a ConfigDict by dotted key.

    Example:
      >>> settings_of(default_config())['run.log_every_steps']
      20
    """
    return _flatten(config.to_dict())


def suggest(word: str, known: typing.Iterable[str]) -> str:
    """Says ", did you mean ...?" when something known resembles the word, else "".

    Example:
      >>> suggest('learning_rat', ['learning_rate', 'momentum'])
      ", did you mean 'learning_rate'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


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
    """Rejects what cannot run on any machine."""
    run, data, optimizer = config.run, config.data, config.optimizer
    hsadmm, sparsity = config.method.hsadmm, config.sparsity
    if (run.steps > 0) == (run.epochs > 0):
        raise UserError(
            f"config.run.steps={run.steps} and config.run.epochs={run.epochs}: give "
            "exactly one of them a positive value"
        )
    positive = {
        "data.batch_size": data.batch_size,
        "optimizer.learning_rate": optimizer.learning_rate,
        "model.width": config.model.width,
        "run.log_every_steps": run.log_every_steps,
        "run.checkpoints_kept": run.checkpoints_kept,
        "sparsity.num_stairs": sparsity.num_stairs,
        "sparsity.round_to": sparsity.round_to,
        "method.hsadmm.sync_period": hsadmm.sync_period,
    }
    for key, value in positive.items():
        if not value > 0:
            raise UserError(f"config.{key}={value} must be positive")
    not_negative = {
        "run.steps": run.steps,
        "run.epochs": run.epochs,
        "run.eval_every_steps": run.eval_every_steps,
        "run.checkpoint_every_steps": run.checkpoint_every_steps,
        "topology.cpu_devices": config.topology.cpu_devices,
        "data.eval_batch_size": data.eval_batch_size,
        "data.num_workers": data.num_workers,
        "data.image_size": data.image_size,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_norm": optimizer.clip_norm,
        "method.hsadmm.rho_device": hsadmm.rho_device or 0.0,
        "method.hsadmm.rho_host": hsadmm.rho_host or 0.0,
        "method.hsadmm.outer_step": hsadmm.outer_step or 0.0,
    }
    for key, value in not_negative.items():
        if value < 0:
            raise UserError(f"config.{key}={value} must not be negative")
    shares = {
        "data.validation_share": (data.validation_share, 0.9),
        "optimizer.momentum": (optimizer.momentum, 0.9999),
        "optimizer.label_smoothing": (optimizer.label_smoothing, 0.9999),
        "optimizer.warmup_share": (optimizer.warmup_share, 1.0),
        "method.hsadmm.prox_strength": (hsadmm.prox_strength or 0.0, 1.0),
        "method.hsadmm.dual_decay": (hsadmm.dual_decay or 0.0, 1.0),
        "method.hsadmm.outer_momentum": (hsadmm.outer_momentum or 0.0, 0.9999),
    }
    for key, (value, largest) in shares.items():
        if not 0.0 <= value <= largest:
            raise UserError(f"config.{key}={value} must lie in [0, {largest:g}]")
    if not 0.0 <= sparsity.sparsity < 1.0:
        raise UserError(
            f"config.sparsity.sparsity={sparsity.sparsity} must lie in [0, 1): the "
            "density, 1 - sparsity, has to stay in (0, 1]"
        )
    if not 0.0 <= sparsity.start_share <= sparsity.freeze_share <= 1.0:
        raise UserError(
            f"config.sparsity.start_share={sparsity.start_share} and freeze_share="
            f"{sparsity.freeze_share} must satisfy 0 <= start <= freeze <= 1"
        )


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
