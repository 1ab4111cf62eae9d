"""Settings as frozen dataclasses: ranges beside the defaults, read and checked here.

A room declares its settings as a frozen dataclass; numbers that have a range say so
with `setting`. `read_settings` makes one from nested plain values and `check_settings`
refuses what lies outside its range. Below follow the settings of a run that several
rooms read; those of a method stand in its own file.
"""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from prunex_jax.base.errors import UserError, suggest

SettingsT = TypeVar("SettingsT")
# Counts end as int32 in arrays; no setting needs more.
_MAX_INT = 2**31 - 1
# Devices that can be simulated; more are a slip of the pen.
MAX_SIMULATED = 4096
# What channels are ranked by; see `sparsity.criteria`.
Criterion = Literal["norm", "taylor", "scale", "mixture"]


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number may be; it is finite in any case.

    Example:
      >>> Range(above=0, at_most=1).check('density', 2.0)
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: density=2.0 must lie in (0, 1]
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def check(self, name: str, value: float) -> None:
        """Raises UserError, naming the value, unless it is finite and in the range."""
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} must {Range()}")
        if not (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        ):
            raise UserError(f"{name}={value} must {self}")

    def __str__(self) -> str:
        low = self.at_least if self.above is None else self.above
        high = self.at_most if self.below is None else self.below
        if low is not None and high is not None:
            left = "[" if self.above is None else "("
            right = "]" if self.below is None else ")"
            return f"lie in {left}{low:.10g}, {high:.10g}{right}"
        if high is not None:
            return f"be {'at most' if self.below is None else 'below'} {high:.10g}"
        if low == 0:
            return "not be negative" if self.above is None else "be positive"
        if low is not None:
            return f"be {'at least' if self.above is None else 'above'} {low:.10g}"
        return "be a finite number"


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declares a number of a settings dataclass that has a range.

    Args:
      default: Its default; None where the setting may be None, which has no range.
      at_least: Smallest value.
      above: What it must exceed.
      at_most: Largest value.
      below: What it must stay below.
    Returns:
      A dataclass field.
    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class TopkConfig:
      ...     density: float = setting(0.01, above=0, at_most=1)
      >>> check_settings(TopkConfig(2.0), 'config.topk')
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: config.topk.density=2.0 must lie in (0, 1]
    """
    limits = Range(at_least, above, at_most, below)
    return dataclasses.field(default=default, metadata={"range": limits})


def check_settings(settings: Any, where: str) -> None:
    """Refuses numbers outside their ranges and words that are no choice, at any depth.

    Args:
      settings: A settings dataclass; its fields may be settings themselves.
      where: Dotted path of it, for messages, such as `config.data`.
    Raises:
      UserError: A number is not finite or outside its range, or a word is not one of
        the literals that its type lists.
    """
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value, path = getattr(settings, field.name), f"{where}.{field.name}"
        if dataclasses.is_dataclass(value):
            check_settings(value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            limits = field.metadata.get("range", Range())
            limits.check(path, value)
            if isinstance(value, int) and limits.at_most is None:
                Range(at_least=-_MAX_INT, at_most=_MAX_INT).check(path, value)
        elif typing.get_origin(hints[field.name]) is Literal:
            _as_type(value, hints[field.name], path)


def check_defaults(part: str, config: Any, names: Collection[str], what: str) -> None:
    """Refuses settings that would have no effect.

    Args:
      part: The section of the settings.
      config: It.
      names: Those of its settings that must be at their defaults; settings within
        settings are looked through.
      what: On what they have none.
    Raises:
      UserError: One is not.
    Example:
      >>> check_defaults('data', DataConfig(image_size=8), ('image_size',), 'text')
      Traceback (most recent call last):
        ...
      prunex_jax.base.errors.UserError: config.data.image_size=8 has no effect on text;\
 leave it at 0
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in names or value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            within = [inner.name for inner in dataclasses.fields(value)]
            check_defaults(f"{part}.{field.name}", value, within, what)
            continue
        raise UserError(
            f"config.{part}.{field.name}={value!r} has no effect on {what}; leave "
            f"it at {field.default!r}"
        )


def read_settings(
    default: SettingsT, values: Mapping[str, Any], where: str
) -> SettingsT:
    """Changes settings as nested plain values say; `check_settings` comes after it.

    Args:
      default: Settings that give the types, and what `values` leaves out.
      values: Value by key, settings within settings as mappings or dataclasses.
      where: Dotted path of the settings, for messages.
    Returns:
      The changed settings.
    Raises:
      UserError: Unknown key (with the nearest known one), or a value of a wrong type.
    Example:
      >>> read_settings(TopologyConfig(), {'layout': '2'}, 'config.topology').layout
      '2'
    """
    hints = typing.get_type_hints(type(default))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise UserError(
                f"{where}.{key} is not a setting{suggest(str(key), hints)} "
                f"(known: {', '.join(hints)})"
            )
        earlier = getattr(default, key)
        if dataclasses.is_dataclass(earlier) and isinstance(value, Mapping):
            changes[key] = read_settings(earlier, value, f"{where}.{key}")
        else:
            changes[key] = _as_type(value, hints[key], f"{where}.{key}")
    return dataclasses.replace(default, **changes)  # type: ignore[type-var]


def without_none(hint: Any) -> Any:
    """The type that an optional setting has where it is not None.

    Example:
      >>> without_none(float | None)
      <class 'float'>
    """
    options = _options(hint)
    return next(option for option in options if option is not types.NoneType)


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _as_type(value: Any, hint: Any, where: str) -> Any:
    """Returns `value` as the hinted type, or says what was expected."""
    if value is None and types.NoneType in _options(hint):
        return None
    hint = without_none(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise UserError(
                f"{where}={value!r} is not one of {', '.join(map(str, arguments))}"
                f"{suggest(str(value), arguments)}"
            )
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise UserError(f"{where}={value!r} should be a tuple of strings")
        return tuple(_as_type(each, arguments[0], where) for each in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number and abs(value) <= sys.float_info.max:
        return float(value)
    is_wrong_bool = isinstance(value, bool) and hint is not bool
    if not isinstance(value, hint) or is_wrong_bool:
        raise UserError(f"{where}={value!r} should be of type {hint.__name__}")
    return value


# What lies in slices over the devices of a host.
Shard = Literal["none", "state", "params"]


@dataclasses.dataclass(frozen=True)
class TopologyConfig:
    """Which devices form a host, and how simulated devices are made."""

    # auto | host | process | slice, or the number of hosts, as in "2"; or hosts x
    # virtual CPU devices, as in "2x2", that stand in where the run has one process, and
    # mean auto where it has several.
    layout: str = "auto"
    # Virtual CPU devices of this process; 0 uses the devices the machine has.
    cpu_devices: int = setting(0, at_least=0, at_most=MAX_SIMULATED)
    # Hosts x devices, as in "4x2", that one real device simulates, such as a GPU; empty
    # for the devices there are. On CPUs `cpu_devices` is faster.
    simulated: str = ""
    # none (every device of a host has all of the training state) | state (each has an
    # equal slice of what the optimizer and the method remember) | params (and of the
    # parameters, which are gathered for both passes of a step).
    shard: Shard = "none"
    # Gbit/s of the link of a host, such as 10: by it XLA plans on GPUs how early sums
    # over hosts start, and so how much runs beside them (`rounds.delay`). 0 leaves XLA
    # its own guess, which is for the fastest links.
    link_gbits: float = setting(0.0, at_least=0)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes batches."""

    # digits | synthetic; stdlib (the source of Python's standard library, as text); in
    # `dir` folder (of images, one folder per class) | npz (arrays) | huggingface (what
    # `save_to_disk` wrote) | text (files of text) | tokens (files of tokens); or any
    # set that TFDS has prepared, of images with one class each or of text.
    name: str = "digits"
    # Where a folder, file or set lies; for TFDS its data directory, where empty means
    # TFDS's own default.
    dir: str = ""
    # What is done about image files that cannot be decoded: refuse (the first is named
    # before training starts) | skip (all are decoded to find them).
    broken_files: Literal["refuse", "skip"] = "refuse"
    # Examples per step over the whole mesh.
    batch_size: int = setting(64, at_least=1)
    # Share of the training split held out for validation.
    validation_share: float = setting(0.1, at_least=0, below=1)
    # none | shift (1 pixel) | crop_flip (pad 4, CIFAR) | random_resized_crop (ImageNet)
    augment: Literal["none", "shift", "crop_flip", "random_resized_crop"] = "none"
    # RandAugment after that: operations on every image, 0 for none, and how strong they
    # are, from 0 to 30.
    rand_augment_operations: int = setting(0, at_least=0)
    rand_augment_magnitude: float = setting(9.0, at_least=0, at_most=30)
    # Mixup and CutMix: every image with another of its batch, with shares drawn from
    # Beta(alpha, alpha); 0 for none; where both are positive, each has half of them.
    mixup: float = setting(0.0, at_least=0)
    cutmix: float = setting(0.0, at_least=0)
    # How pixels become inputs: auto (by the usual mean and deviation of a known set, or
    # those that are measured) | imagenet (by ImageNet's, as trained networks of
    # torchvision expect it) | half (by 0.5 and 0.5, as some ViTs of timm do).
    normalization: Literal["auto", "imagenet", "half"] = "auto"
    # Tokens of a sequence of text.
    sequence_length: int = setting(128, at_least=1)
    # A tokenizer.json of Hugging Face's tokenizers; empty reads text as bytes.
    tokenizer: str = ""
    # Token that it has behind every document; empty looks for the usual ones.
    end_token: str = ""
    # Where encoded text is kept; empty means the user's cache folder.
    cache_dir: str = ""
    # Which files below `dir` are text, as in '*.txt'; none that starts with a dot is.
    text_glob: str = "*"
    # What .bin files of tokens hold; .npy files say it themselves.
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    # Tokens that there are, in files of tokens; 0 reads all to find the largest.
    vocabulary: int = setting(0, at_least=0)
    # Side of the image after decoding and resizing; 0 keeps the size of the set.
    image_size: int = setting(0, at_least=0, at_most=16384)
    # auto | memory (whole set in memory) | grain (read and decoded while training).
    loader: Literal["auto", "memory", "grain"] = "auto"
    # Grain worker processes per jax process; 0 decodes in threads.
    num_workers: int = setting(0, at_least=0, at_most=1024)
    # Evaluation batch over the whole mesh; 0 means `batch_size`.
    eval_batch_size: int = setting(0, at_least=0)
    # Size and shape of the synthetic set.
    synthetic_examples: int = setting(1024, at_least=1, at_most=10**8)
    synthetic_classes: int = setting(10, at_least=1, at_most=10**6)
    # Decides which training examples are held out for validation and, where `shards` is
    # not iid, which host has which.
    shuffle_seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    # What a host trains on: iid (all examples) | label_sorted (classes of its own) |
    # dirichlet (class shares drawn at random); the last two need the set in memory.
    shards: Literal["iid", "label_sorted", "dirichlet"] = "iid"
    # Class shares of hosts are drawn from Dirichlet(alpha), scaled by those of the set
    # where classes differ in size: up to 0.1 few classes fill a shard; from 100 on,
    # shards are nearly alike.
    dirichlet_alpha: float = setting(0.3, above=0)


@dataclasses.dataclass(frozen=True)
class GptConfig:
    """Models `gpt` and `gpt2`; `model.width` multiplies all widths."""

    # Blocks of attention and unit.
    layers: int = setting(4, at_least=1, at_most=10_000)
    # Of the stream.
    width: int = setting(128, at_least=1)
    # Query heads, and key heads, of which each serves as many query heads.
    heads: int = setting(4, at_least=1)
    key_heads: int = setting(4, at_least=1)
    # Features of a head; an even number for gpt.
    head_width: int = setting(32, at_least=2)
    # Of the unit; 0 is 8/3 of the stream in multiples of 32 for gpt, and 4 times the
    # stream for gpt2.
    hidden: int = setting(0, at_least=0)
    # Learned positions of gpt2; 0 has as many as a sequence has tokens.
    positions: int = setting(0, at_least=0)
    # Of the angles of rotary positions of gpt.
    rotary_base: float = setting(10_000.0, above=1)
    # Added to mean squares in norms; 0 is 1e-6 for gpt, and 1e-5 for gpt2.
    norm_epsilon: float = setting(0.0, at_least=0)
    # Logits by a matrix of their own, or by the embedding of tokens (tied); auto is own
    # for gpt, and tied for gpt2.
    head: Literal["auto", "own", "tied"] = "auto"
    # Share of activations that training drops.
    dropout: float = setting(0.0, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Model `bert`; `model.width` multiplies all widths."""

    # Blocks of attention and unit.
    layers: int = setting(4, at_least=1, at_most=10_000)
    # Of the stream.
    width: int = setting(128, at_least=1)
    # Attention heads.
    heads: int = setting(4, at_least=1)
    # Features of a head.
    head_width: int = setting(32, at_least=1)
    # Of the unit; 0 is 4 times the stream.
    hidden: int = setting(0, at_least=0)
    # Learned positions; 0 has as many as a sequence has tokens.
    positions: int = setting(0, at_least=0)
    # Kinds of sentences that have an embedding, as trained weights have 2, of which the
    # first is used; 0 has none.
    kinds: int = setting(0, at_least=0)
    # Added to variances in norms.
    norm_epsilon: float = setting(1e-12, above=0)
    # Share of activations that training drops.
    dropout: float = setting(0.0, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class VitConfig:
    """Form of models `vit_ti`, `vit_s` and `vit_b`.

    Widths are those of the name where they are 0, and `model.width` multiplies them.
    """

    # Side of a patch in pixels, which divides the sides of images.
    patch: int = setting(16, at_least=1)
    # learned | sincos (sines and cosines that stay as they are).
    positions: Literal["learned", "sincos"] = "learned"
    # What is classified: a class token, or the mean over all tokens, without one.
    pooling: Literal["token", "mean"] = "token"
    # layer | rms (root mean square; has no mean over channels).
    norm: Literal["layer", "rms"] = "layer"
    # Stochastic depth: share of the examples for which the last block is left out in
    # training; the share grows evenly from 0 at the first.
    drop_path: float = setting(0.0, at_least=0, below=1)
    # Blocks of attention and MLP.
    layers: int = setting(0, at_least=0)
    # Of the stream.
    width: int = setting(0, at_least=0)
    # Heads of attention, and features of a head.
    heads: int = setting(0, at_least=0)
    head_width: int = setting(0, at_least=0)
    # Of the MLP.
    hidden: int = setting(0, at_least=0)


@dataclasses.dataclass(frozen=True)
class ConvNextConfig:
    """Form of model `convnext_t`."""

    # Stochastic depth, as of `vit`.
    drop_path: float = setting(0.1, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which network is trained."""

    # resnet20 | resnet32 | resnet56 | resnet110 | resnet18 | resnet34 | resnet50 |
    # resnet101 | resnet152 | wide_resnet50_2 | vgg16 | vgg19 | vit_ti | vit_s | vit_b |
    # convnext_t; of text gpt (as Llama) | gpt2 | bert; or package.module:object for a
    # network of your own, as `models.own_model` takes it.
    name: str = "resnet20"
    # Trained weights to start from: a folder made by `prunex-jax export`, a run folder,
    # or safetensors of torchvision, timm or Hugging Face; empty draws them at random.
    weights: str = ""
    # cifar (3x3 stem) | imagenet (7x7 stem, max pool) | auto (by image size); of
    # convnext_t, patches of 2 or of 4 pixels.
    stem: Literal["auto", "cifar", "imagenet"] = "auto"
    # Multiplies every width.
    width: float = setting(1.0, above=0)
    # Batch statistics over the examples of one device, or of all devices of a host.
    norm_scope: Literal["device", "host"] = "device"
    # float32 | bfloat16 for activations.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # float32 | bfloat16 for parameters between steps, rounded stochastically. What the
    # optimizer and the method remember, the consensus among it, stays float32.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # none | blocks: what lies inside of a block is not kept for the backward pass but
    # computed again, which takes less memory and more time. Of gpt, gpt2, bert, vit and
    # convnext.
    recompute: Literal["none", "blocks"] = "none"
    # chunked (kernel gradients in chunks of the batch, depthwise convolutions as sums
    # of shifted maps; faster on CPUs) | direct | auto (chunked on CPUs, else direct).
    convolution: Literal["auto", "direct", "chunked"] = "auto"
    gpt: GptConfig = GptConfig()
    bert: BertConfig = BertConfig()
    vit: VitConfig = VitConfig()
    convnext: ConvNextConfig = ConvNextConfig()


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer and its learning rate."""

    # sgd | adamw | lion | muon (matrices, and adamw for the rest), or
    # package.module:function for another one, as in optax:lamb.
    name: str = "sgd"
    # Muon: parts of paths of the matrices that take adamw.
    adamw_paths: tuple[str, ...] = ("embedding", "position", "classifier", "head")
    learning_rate: float = setting(0.1, above=0)
    momentum: float = setting(0.9, at_least=0, below=1)
    nesterov: bool = True
    # Part of the gradient for sgd, decoupled for the others; kernels only.
    weight_decay: float = setting(5e-4, at_least=0)
    # Share of the run for the linear warm-up.
    warmup_share: float = setting(0.05, at_least=0, at_most=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # Share of the run until which the rate stays at its peak before it decays. Networks
    # that lose channels recover better at a high rate than at one that has decayed.
    flat_share: float = setting(0.0, at_least=0, at_most=1)
    # Share of the run at which warm-up and decay start over, as after pruning; 0 never.
    rewind_share: float = setting(0.0, at_least=0, at_most=1)
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    # Largest gradient norm, measured after averaging; 0 means no clipping.
    clip_norm: float = setting(0.0, at_least=0)
    # Parts in which a device's share of the batch goes through the network, one after
    # the other, to save memory: gradients are averaged, and exchanged once.
    micro_batches: int = setting(1, at_least=1)


@dataclasses.dataclass(frozen=True)
class SparsityConfig:
    """How many channels are kept, of which groups, and when."""

    # Share removed at the end, in [0, 1): of the channels, or of what `unit` counts.
    sparsity: float = setting(0.5, at_least=0, below=1)
    # channels | params | macs | bytes (of one exchange). In the last three, as few
    # channels are removed as reach the share, at every density on the way.
    unit: Literal["channels", "params", "macs", "bytes"] = "channels"
    # uniform (the same share of every group) | global (ranked over all groups).
    budget: Literal["uniform", "global"] = "uniform"
    # No group loses more than this share of its channels, whatever the budget.
    max_group_sparsity: float = setting(1.0, above=0, at_most=1)
    # all (for bytes: every group) | inner (for accuracy: groups inside of a block only;
    # channels that a shortcut adds up over blocks stay).
    scope: Literal["all", "inner"] = "all"
    # What hsadmm ranks the channels of a group by: norm (of all entries that carry the
    # channel) | taylor (what its removal would change the loss by, to first order) |
    # scale (of the norms behind it) | mixture (HESSO's, of norm and gradients).
    criterion: Criterion = "norm"
    # Share of the run at which pruning starts, and at which the mask freezes.
    start_share: float = setting(0.1, at_least=0, at_most=1)
    freeze_share: float = setting(0.5, at_least=0, at_most=1)
    # Share of the run at which dead channels are cut out and the small network trains
    # on; not before the mask freezes. 1 cuts them out at the end only.
    shrink_share: float = setting(1.0, at_least=0, at_most=1)
    # Whether what a stair has removed is cut out at once, too, of all stairs but the
    # last; each cut compiles the small network anew.
    shrink_stairs: bool = False
    # stairs (weak channels are set to zero, a few at every density on the way) | fade
    # (rounds of hsadmm shrink all that will go, and the freeze sets them to zero).
    path: Literal["stairs", "fade"] = "stairs"
    # Number of densities between dense and final; each recompiles the exchange.
    num_stairs: int = setting(8, at_least=1, at_most=10_000)
    # Kept counts are multiples of this where a group is wide enough.
    round_to: int = setting(8, at_least=1)
    # Other multiples for some groups, each `groups:multiple`: 'blocks/*:64', or
    # '*>=512:128' for groups of at least 512 channels. The first that is for a group
    # counts; a group smaller than its multiple is rounded by `round_to`.
    multiples: tuple[str, ...] = ()
    # Groups whose name contains one of these are left dense.
    exclude: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """What is learned from a trained network beside the labels."""

    # Folder made by `python -m prunex_jax export`; self for the run's own network, from
    # before it lost its first channels; empty for no teacher.
    teacher: str = ""
    # Share of the run until which the teacher is asked.
    until_share: float = setting(1.0, above=0, at_most=1)
    # Of teacher self: share of the run, before the first channels go, over whose rounds
    # networks are averaged.
    average_share: float = setting(0.05, at_least=0, at_most=1)
    # Share of the loss that is the distance to the teacher's answers.
    weight: float = setting(0.5, at_least=0, at_most=1)
    # Divides logits of both: the higher, the more its view of wrong classes counts.
    temperature: float = setting(4.0, above=0)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, and how often it reports, evaluates and saves."""

    # Exactly one of the two is positive.
    steps: int = setting(0, at_least=0)
    epochs: float = setting(0.0, at_least=0)
    log_every_steps: int = setting(20, at_least=1)
    # 0 evaluates at the end only.
    eval_every_steps: int = setting(0, at_least=0)
    # 0 saves at the end, and on a signal, only.
    checkpoint_every_steps: int = setting(200, at_least=0)
    checkpoints_kept: int = setting(2, at_least=1)
    # Training batches, at the end and where dead channels are cut out, from which batch
    # statistics are taken anew; 0 keeps the running ones, which copies have left.
    reestimate_batches: int = setting(0, at_least=0)
    # Share of the run, at its end, over whose rounds networks are averaged: the mean is
    # the final network, with batch statistics of its own. 0 takes the last network.
    average_share: float = setting(0.0, at_least=0, below=1)
    # Stop where copies are further than this from their consensus, as a share of its
    # norm: so H-SADMM diverges, with every loss finite. 0 never stops.
    max_host_drift: float = setting(1.0, at_least=0)
    # False leaves the test split alone, in runs that choose settings.
    read_test: bool = True
    # Where commands keep compiled programs, to start sooner the next time: auto (what
    # JAX_COMPILATION_CACHE_DIR says, or the user's cache folder) | off | a folder.
    compile_cache: str = "auto"
    # Seconds that processes wait for each other at the start.
    join_seconds: int = setting(300, at_least=1)
    # How many processes are enough then, where others do not come; 0 for all of them.
    # A run goes on on fewer hosts with the same batches and the same consensus.
    min_processes: int = setting(0, at_least=0)
    # Seconds without a sign of life after which a process counts as lost: all others
    # say so and end. jax itself gives up ten seconds later, and not before 100.
    silence_seconds: float = setting(60.0, at_least=1, at_most=3600)
    # Seconds that one phase, such as a step or a save, may take: after half of them a
    # warning shows what every thread does. 0 waits for ever. A phase may always take 20
    # times its median.
    stall_seconds: float = setting(3600.0, at_least=0)
    # Whether what a run will need later is compiled while its steps run: auto (unless
    # they run on CPU, where compiling takes cores from them) | on | off.
    compile_ahead: Literal["auto", "on", "off"] = "auto"
    # Shows the metrics in TensorBoard, too: event files in the run folder (extra
    # `tensorboard`).
    tensorboard: bool = False
    # Project of Weights & Biases that shows the metrics, too (extra `wandb`); empty for
    # none.
    wandb: str = ""
    # Steps that jax's profiler traces into the run folder, as in 100:110: from when 100
    # are done until 110 are; empty for none.
    profile_steps: str = ""
