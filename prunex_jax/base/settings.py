"""Settings as frozen dataclasses: ranges beside the defaults, read and checked here.

A room declares its settings as a frozen dataclass; numbers that have a range say so
with `setting`. `read_settings` makes one from nested plain values and `check_settings`
refuses what lies outside its range.
"""

import dataclasses
import math
import operator
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from prunex_jax.base.errors import UserError, suggest

_SettingsT = TypeVar("_SettingsT")
# Counts end as int32 in arrays; no setting needs more.
_MAX_INT = 2**31 - 1
# What is smaller is 0 in float32, or as good as that.
_SMALLEST = 1.2e-38


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


def check_whole_number(name: str, value: Any) -> int:
    """The value if it is a whole number, of Python or of numpy; not True, not 1.5."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError(f"{name}={value!r} must be a whole number")
    return operator.index(value)


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
      part: The section of the settings, which `config` is.
      config: Settings; those within them are looked through.
      names: What must be at its default.
      what: On what it has no effect.
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
    default: _SettingsT, values: Mapping[str, Any], where: str
) -> _SettingsT:
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
      >>> read_settings(OptimizerConfig(), {'name': 'adamw'}, 'config.optimizer').name
      'adamw'
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
    """The type that an optional setting has where it is not None."""
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


# Here, as both the loss of a task and methods that apply momentum themselves read it.
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer and its learning rate."""

    # sgd | adamw | lion | muon (matrices, and adamw for the rest), or
    # package.module:function for another one, as in optax:lamb.
    name: str = "sgd"
    # Muon: parts of paths of the matrices that take adamw.
    adamw_paths: tuple[str, ...] = ("embedding", "position", "classifier", "head")
    learning_rate: float = setting(0.1, at_least=_SMALLEST)
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
