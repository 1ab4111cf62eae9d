"""Labels that say which positions of which axes are one and the same channel.

Every position of every axis of every intermediate value carries an integer label. Equal
or joined labels are one channel. It owns the bookkeeping (join, freeze, connected
components); what each primitive does to labels is decided in `channels.rules`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core
from scipy.sparse import coo_array, csgraph

# A position that cannot be removed, whatever it is combined with.
FROZEN = 0
# A position at which the value is the same as at every other one of its axis, such as
# a scalar broadcast over channels: it ties nothing to anything.
UNIFORM = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What is known of one intermediate value.

    Attributes:
      labels: int64[size] per axis.
      is_zero: Per axis, whether the value is exactly zero at positions whose channel is
        dead. Weights are (they are masked); what is computed from them may not be.
      path: Path of the parameter, where the value is one, else None.
    """

    labels: tuple[np.ndarray, ...]
    is_zero: tuple[bool, ...]
    path: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(len(axis) for axis in self.labels)


def frozen_value(shape: Sequence[int]) -> Traced:
    """A value none of whose positions can be removed."""
    labels = tuple(np.full(size, FROZEN, np.int64) for size in shape)
    return Traced(labels, (False,) * len(labels))


def uniform_value(shape: Sequence[int], is_zero: bool) -> Traced:
    """A value that is one number everywhere."""
    labels = tuple(np.full(size, UNIFORM, np.int64) for size in shape)
    return Traced(labels, (is_zero,) * len(labels))


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
    source: str

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

    def join(self, left: np.ndarray, right: np.ndarray, reason: Reason) -> np.ndarray:
        """Declares two axes of one length to be one, position by position.

        A channel joined with a frozen position becomes frozen, for `reason`.

        Returns:
          int64 labels of the joined axis.
        """
        both = (left > FROZEN) & (right > FROZEN) & (left != right)
        if both.any():
            self._left.append(left[both])
            self._right.append(right[both])
        self.freeze(left[right == FROZEN], reason)
        self.freeze(right[left == FROZEN], reason)
        is_frozen = (left == FROZEN) | (right == FROZEN)
        return np.where(is_frozen, FROZEN, np.maximum(left, right))

    def components(self) -> tuple[np.ndarray, dict[int, Reason]]:
        """Finds what is joined.

        Returns:
          int32[num_labels] component of every label, and component -> the first reason
          why it is frozen. Components without a reason are removable.
        """
        left = np.concatenate([*self._left, np.zeros(0, np.int64)])
        right = np.concatenate([*self._right, np.zeros(0, np.int64)])
        size = self.num_labels
        graph = coo_array((np.ones(len(left), np.int8), (left, right)), (size, size))
        _, component = csgraph.connected_components(graph, directed=False)
        reasons: dict[int, Reason] = {}
        for labels, reason in self._frozen:
            for item in np.unique(component[labels]):
                reasons.setdefault(int(item), reason)
        return component, reasons


def source_of(eqn: core.JaxprEqn) -> str:
    """`file:line` of the innermost frame of an equation that is not jax's own."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    jax_folder = jax.__file__.rpartition("/")[0]
    for frame in traceback.frames:
        if not frame.file_name.startswith(jax_folder):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
