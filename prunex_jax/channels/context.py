"""What a rule is given: one equation, its operands and the table of labels."""

import dataclasses
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from prunex_jax.channels.labels import (
    FROZEN,
    UNIFORM,
    LabelledProgram,
    LabelTable,
    Product,
    Reason,
    Shared,
    Traced,
    frozen_axis,
    frozen_value,
    has_channels,
    is_plain,
    uniform_axis,
)
from prunex_jax.channels.numbers import is_nan

_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
_CHANNELS_FOLDER = os.path.dirname(__file__) + os.sep
_SITE_FOLDER = os.path.dirname(os.path.dirname(jax.__file__)) + os.sep
_STDLIB_FOLDER = sysconfig.get_path("stdlib") + os.sep
# (program, arguments) -> the program with labels
Walk = Callable[[Any, Sequence[Traced]], LabelledProgram]


@dataclasses.dataclass(eq=False)
class Context:
    """What a rule may use.

    Attributes:
      eqn: The equation.
      table: The table of labels.
      operands: What is known of the operands.
      site: The equation that stands in the caller's code; another one than `eqn` inside
        jax's own functions.
      walk: Walks a program that the equation calls.
      renormalise: Whether sums over channels that are not zero may be cut.
      fits: (operand, axis) -> int64[size] labels that the operand is cut to before the
        operation is done on less.
      inner: Programs that the equation calls, walked.
      notes: What the rule tells those who do the operation on less.
      freezes: Whether it keeps channels for a reason of its own.
    """

    eqn: core.JaxprEqn
    table: LabelTable
    operands: tuple[Traced, ...]
    site: core.JaxprEqn
    walk: Walk
    renormalise: bool
    fits: dict[tuple[int, int], np.ndarray] = dataclasses.field(default_factory=dict)
    inner: tuple[LabelledProgram, ...] = ()
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    freezes: bool = False

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def origin(self) -> str:
        """Where frozen axes of the operands come from; inputs are the last guess."""
        if self.freezes:
            return f"a result of {self.name}"
        origins = [operand.origin for operand in self.operands if operand.origin]
        return min(origins, key=lambda origin: origin.startswith("input"), default="")

    @property
    def at(self) -> str:
        """Where this equation comes from, for sentences; "" if that is not known."""
        source = source_of(self.site)
        return f" at {source}" if source else ""

    def because(self, text: str, kind: str) -> str:
        """Adds to why channels stay what made it so; `kind` is one of `causes`."""
        causes = [x.causes[kind] for x in self.operands if kind in x.causes]
        return f"{text} ({causes[0]})" if causes else text

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of a result of this equation."""
        aval: Any = self.eqn.outvars[index].aval
        return tuple(aval.shape)

    def reason(self, text: str, is_inherent: bool = False) -> Reason:
        """A reason that names this equation."""
        return Reason(self.name, text, source_of(self.site), is_inherent)

    def freeze(self, labels: np.ndarray, text: str, is_inherent: bool = False) -> None:
        """Freezes labels because of this equation; see `Reason`."""
        if has_channels(labels):
            self.table.freeze(labels, self.reason(text, is_inherent))
            self.freezes = self.freezes or not is_inherent

    def join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Joins two axes because of this equation; what meets FROZEN freezes."""
        if left is right:
            return left
        joined = self.table.join(left, right)
        if (is_plain(left) and is_plain(right)) or joined is left or joined is right:
            return joined  # no channel meets a frozen one
        meets = np.concatenate([left[right == FROZEN], right[left == FROZEN]])
        if has_channels(meets):
            of = f" (of {self.origin})" if self.origin else ""
            text = f"ties it to an axis of fixed size{of}"
            reason = self.reason(text, self.origin.startswith("input"))
            self.table.freeze(meets, reason)
        return joined

    def join_axes(self, *axes: tuple[int, int]) -> np.ndarray:
        """Joins axes of operands, which are cut alike when channels are removed.

        Takes (operand, axis) pairs, all of one length, and gives the labels of the
        joined axis.
        """
        joined = self.operands[axes[0][0]].labels[axes[0][1]]
        for operand, axis in axes[1:]:
            joined = self.join(joined, self.operands[operand].labels[axis])
        for operand, axis in axes:
            if self.operands[operand].labels[axis] is not joined:
                self.fits[operand, axis] = joined
        return joined

    def own(self, operand: int, axis: int) -> np.ndarray:
        """Labels of an axis, with new ones where nobody owns a position.

        So such a position is cut, before the operation, like what it becomes part of.
        """
        labels = self.operands[operand].labels[axis]
        if (labels != UNIFORM).all():
            return labels
        own = self.table.fresh(len(labels))
        if labels is not uniform_axis(len(labels)):
            own = np.where(labels == UNIFORM, own, labels)
        self.fits[operand, axis] = own
        return own

    def share(self, *axes: int | None) -> Shared | None:
        """What dead channels of a result share, if it is one value for all of them.

        Args:
          *axes: For each operand, the axis that becomes that of the result; None if the
            operand is the same for all its channels.
        """
        sources = []
        varies = False
        for operand, axis in zip(self.operands, axes, strict=True):
            if axis is None:
                varies = varies or operand.constant is None
            elif axis in operand.shared:
                sources.append(operand.shared[axis])
            elif operand.dead[axis] is None or is_nan(operand.dead[axis]):
                return None
        varies = varies or any(source.varies for source in sources)
        return Shared(axes, tuple(sources), varies)

    def share_axes(self, axes: Mapping[int, Sequence[int | None]]) -> dict[int, Shared]:
        """What dead channels share, by axis of the result; see `share`."""
        found = {axis: self.share(*own) for axis, own in axes.items()}
        return {axis: shared for axis, shared in found.items() if shared is not None}

    def carry(self, result: Traced, axes: Sequence[int | None]) -> Traced:
        """The result of moving axes about, with what dead channels share.

        `axes` has, for each axis of the only result, the one of the first operand that
        it is.
        """
        (x, *rest) = self.operands
        alone = (None,) * len(rest)
        shared = {
            axis: Shared((source, *alone), (found,), found.varies)
            for axis, source in enumerate(axes)
            if source is not None and (found := x.shared.get(source)) is not None
        }
        return dataclasses.replace(result, shared=shared)

    def multiply(
        self,
        flat: np.ndarray,
        factors: Sequence[np.ndarray],
        loose: int | None = None,
    ) -> None:
        """Declares a flat axis to consist of several; see `Product`.

        Args:
          flat: int64[*sizes] labels of the flat axis; UNIFORM if there is none.
          factors: int64[size] labels per factor.
          loose: Which factor is a loose one, if any.
        """
        self.table.products.append(
            Product(flat, tuple(factors), self.name, source_of(self.site), loose)
        )

    def cut_one_of(self, axes: Sequence[np.ndarray]) -> None:
        """Declares that of several axes, int64[size] labels each, one can be cut."""
        if len(axes) > 1:
            flat = np.broadcast_to(np.int64(UNIFORM), [len(labels) for labels in axes])
            self.multiply(flat, axes)

    def merge(self, axes: Sequence[np.ndarray]) -> np.ndarray:
        """Labels of the positions of several axes taken together, flattened."""
        with_channels = sum(has_channels(labels) for labels in axes)
        sizes = [len(labels) for labels in axes]
        if with_channels > 1:
            flat = self.table.fresh(int(np.prod(sizes)))
            self.multiply(flat.reshape(sizes), axes)
            return flat
        flat = axes[0]
        for labels in axes[1:]:
            # A position of one channel and frozen or uniform ones is that channel's.
            rows, columns = np.repeat(flat, len(labels)), np.tile(labels, len(flat))
            flat = np.maximum(rows, columns)
        return flat

    def split(self, flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        """Labels of the axes, each above 1, that a flat axis is taken apart into."""
        if (flat == UNIFORM).all():
            return [uniform_axis(size) for size in sizes]
        split = [frozen_axis(size) for size in sizes]
        if not has_channels(flat):
            return split
        block = flat.reshape(sizes)
        for axis, size in enumerate(sizes):
            rows = np.moveaxis(block, axis, 0).reshape(size, -1)
            if (rows == rows[:, :1]).all():
                split[axis] = rows[:, 0].copy()
                return split
        factors = [self.table.fresh(size) for size in sizes]
        self.multiply(block, factors)
        return factors


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
    for index, operand in enumerate(operands):
        for axis, labels in enumerate(operand.labels):
            ctx.freeze(labels, text)
            ctx.fits[index, axis] = labels
    origin = f"a result of {ctx.name}"
    return [frozen_value(ctx.out_shape(i), origin) for i in range(len(ctx.eqn.outvars))]


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


def is_of_jax(program: Any) -> bool:
    """Whether a program or function inside was written by jax, not by its caller.

    Such programs are cached, with the lines of whoever called them first.
    """
    info = getattr(program, "debug_info", None)
    return _JAX_FOLDER in str(getattr(info, "func_src_info", ""))
