"""Labels that say which positions of which axes are one and the same channel.

Every position of every axis of every intermediate value carries an integer label. Equal
or joined labels are one channel. It owns the bookkeeping (join, freeze, connected
components); what each primitive does to labels is decided in `channels.rules`, and what
values dead channels have in `channels.elementwise`.
"""

import dataclasses
import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from scipy.sparse import coo_array, csgraph

# A position that cannot be removed, whatever it is combined with.
FROZEN = 0
# A position that nothing depends on: a broadcast value, or padding. It joins whatever
# it is combined with.
UNIFORM = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What is known of one intermediate value.

    Attributes:
      labels: int64[size] per axis; at most FROZEN on axes of length 1.
      dead: Per axis, the value at positions whose channel is dead, and at those that
        are UNIFORM: a number, None for some finite number, nan for perhaps none.
        Weights are 0 there, since they are masked; what is made of them need not be.
      number: The value, if it has no axes and is known.
      is_given: Whether it does not depend on parameters. Then it is what it was before
        anything died, and as finite as it was.
      origin: What made the frozen axes, for explanations.
    """

    labels: tuple[np.ndarray, ...]
    dead: tuple[float | None, ...]
    number: float | None = None
    is_given: bool = False
    origin: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(len(axis) for axis in self.labels)


def frozen_value(shape: Sequence[int], origin: str = "") -> Traced:
    """A value none of whose positions can be removed."""
    labels = tuple(np.full(size, FROZEN, np.int64) for size in shape)
    return Traced(labels, (None,) * len(labels), origin=origin)


def uniform_value(shape: Sequence[int], number: float | None = None) -> Traced:
    """A value that is one number everywhere."""
    labels = tuple(np.full(size, UNIFORM, np.int64) for size in shape)
    return Traced(labels, (number,) * len(labels), None if shape else number)


def has_channels(labels: np.ndarray) -> bool:
    """Whether some position carries a label of its own."""
    return bool((labels > FROZEN).any())


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a channel cannot be removed.

    Attributes:
      primitive: The operation that ties it, or "" where none is involved.
      text: What about it.
      source: `file:line` of the caller's code, or "".
    """

    primitive: str
    text: str
    source: str = ""

    def __str__(self) -> str:
        """One line for people."""
        where = f" at {self.source}" if self.source else ""
        what = f"{self.primitive}: " if self.primitive else ""
        return f"{what}{self.text}{where}"


class LabelTable:
    """Hands out labels and records which are joined and which are frozen."""

    def __init__(self) -> None:
        self.num_labels = 1  # FROZEN
        self._left: list[np.ndarray] = []
        self._right: list[np.ndarray] = []
        self._frozen: list[tuple[np.ndarray, Reason]] = []

    def fresh(self, size: int) -> np.ndarray:
        """Makes int64[size] labels that nothing carries yet."""
        labels = np.arange(self.num_labels, self.num_labels + size, dtype=np.int64)
        self.num_labels += size
        return labels

    def freeze(self, labels: np.ndarray, reason: Reason) -> None:
        """Declares that these channels can never be removed."""
        labels = labels[labels > FROZEN]
        if len(labels):
            self._frozen.append((labels, reason))

    def join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Declares two axes of one length to be one, position by position.

        Args:
          left: int64[size] labels.
          right: int64[size] labels. Freezing what meets FROZEN is up to the caller.
        Returns:
          int64[size] labels of the joined axis.
        """
        both = (left > FROZEN) & (right > FROZEN) & (left != right)
        if both.any():
            self._left.append(left[both])
            self._right.append(right[both])
        is_frozen = (left == FROZEN) | (right == FROZEN)
        return np.where(is_frozen, FROZEN, np.maximum(left, right))

    def components(self) -> tuple[np.ndarray, np.ndarray, tuple[Reason, ...]]:
        """Finds what is joined.

        Returns:
          int32[num_labels] component of every label; int64[num_components] position of
          the first reason why a component is frozen, -1 if it is removable; the
          reasons.
        """
        left = np.concatenate([*self._left, np.zeros(0, np.int64)])
        right = np.concatenate([*self._right, np.zeros(0, np.int64)])
        size = self.num_labels
        graph = coo_array((np.ones(len(left), np.int8), (left, right)), (size, size))
        num_components, component = csgraph.connected_components(graph, directed=False)
        first_reason = np.full(num_components, -1, np.int64)
        for index in reversed(range(len(self._frozen))):
            first_reason[component[self._frozen[index][0]]] = index
        return component, first_reason, tuple(reason for _, reason in self._frozen)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a rule may use.

    Attributes:
      eqn: The equation.
      table: The table of labels.
      operands: What is known of the operands.
      site: The equation that stands in the caller's code; another one than `eqn` inside
        jax's own functions.
    """

    eqn: core.JaxprEqn
    table: LabelTable
    operands: tuple[Traced, ...]
    site: core.JaxprEqn

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def origin(self) -> str:
        """Where frozen axes of the operands come from; inputs are the last guess."""
        origins = [operand.origin for operand in self.operands if operand.origin]
        return min(origins, key=lambda origin: origin.startswith("input"), default="")

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of a result of this equation."""
        aval: Any = self.eqn.outvars[index].aval
        return tuple(aval.shape)

    def freeze(self, labels: np.ndarray, text: str) -> None:
        """Freezes labels because of this equation."""
        if has_channels(labels):
            self.table.freeze(labels, Reason(self.name, text, source_of(self.site)))

    def join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Joins two axes because of this equation; what meets FROZEN freezes."""
        joined = self.table.join(left, right)
        meets = np.concatenate([left[right == FROZEN], right[left == FROZEN]])
        if has_channels(meets):
            of = f" (of {self.origin})" if self.origin else ""
            self.freeze(meets, f"ties it to an axis of fixed size{of}")
        return joined


Rule = Callable[..., Sequence[Traced]]


def freeze_all(
    ctx: Context, *operands: Traced, text: str = "not known to keep channels apart"
) -> Sequence[Traced]:
    """The rule of everything unknown: what it touches stays.

    Args:
      ctx: The equation and the table.
      *operands: Its operands.
      text: What to tell people about it.
    Returns:
      Results that are frozen everywhere.
    """
    for operand in operands:
        for labels in operand.labels:
            ctx.freeze(labels, text)
    origin = f"a result of {ctx.name}"
    return [frozen_value(ctx.out_shape(i), origin) for i in range(len(ctx.eqn.outvars))]


def same_value(values: Sequence[float | None]) -> float | None:
    """What is known of a value that is one of several; see `Traced.dead`."""
    if not values:
        return None
    if all(value is not None and value == values[0] for value in values):
        return values[0]
    is_finite = all(value is None or math.isfinite(value) for value in values)
    return None if is_finite else math.nan


_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
_CHANNELS_FOLDER = os.path.dirname(__file__) + os.sep
_SITE_FOLDER = os.path.dirname(os.path.dirname(jax.__file__)) + os.sep
_STDLIB_FOLDER = sysconfig.get_path("stdlib") + os.sep


def source_of(eqn: core.JaxprEqn) -> str:
    """`file:line` in the caller's code that an equation comes from.

    The innermost frame that belongs to no installed package; if there is none, the
    innermost one outside jax and the standard library.
    """
    traceback = eqn.source_info.traceback
    frames: Sequence[Any] = traceback.frames if traceback is not None else ()
    installed = ""
    for frame in frames:
        name: str = frame.file_name
        if name.startswith(_CHANNELS_FOLDER):  # who asked for the trace
            break
        if name.startswith((_JAX_FOLDER, "<frozen", "<string")):
            continue
        if name.startswith(_SITE_FOLDER):
            installed = installed or f"{name}:{frame.line_num}"
        elif not name.startswith(_STDLIB_FOLDER):
            return f"{name}:{frame.line_num}"
    return installed


def is_of_jax(jaxpr: core.Jaxpr) -> bool:
    """Whether a program inside the program was written by jax, not by its caller.

    Such programs are cached, with the lines of whoever called them first.
    """
    info = getattr(jaxpr, "debug_info", None)
    return _JAX_FOLDER in str(getattr(info, "func_src_info", ""))
