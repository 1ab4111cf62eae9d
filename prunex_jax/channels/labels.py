"""Labels that say which positions of which axes are one and the same channel.

Every position of every axis of every intermediate value carries an integer label. Equal
or joined labels are one channel. A `LabelTable` records what is joined, frozen, split
and merged. A `LabelledProgram` is a traced program with what is known of every value.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

# A position that cannot be removed, whatever it is combined with.
FROZEN = 0
# A position that no parameter owns: a constant, a broadcast value, padding. It is there
# in full until it is combined with a channel, and is cut to fit then.
UNIFORM = -1
# A position that is not there; in `beside_axis` only.
GONE = -2


class Constant:
    """A value that depends on neither parameters nor inputs; computed when asked.

    Args:
      compute: Computes it.
      compute_small: Computes it with length 1 along axes that it is repeated along.
    """

    def __init__(
        self, compute: Callable[[], Any], compute_small: Callable[[], Any] | None = None
    ) -> None:
        self._compute = compute
        self._compute_small = compute_small or compute

    @functools.cached_property
    def value(self) -> Any:
        """The value."""
        return self._compute()

    @functools.cached_property
    def small(self) -> Any:
        """The value, of length 1 along some axes that it is repeated along."""
        return self._compute_small()


@dataclasses.dataclass(frozen=True, eq=False)
class MaximumOf:
    """Says that a value is the maximum of another one along some of its axes."""

    x: "Traced"
    gone: tuple[int, ...]  # The axes.
    own: tuple[int | None, ...]  # Which axis of `x` each axis of the maximum is.


@dataclasses.dataclass(frozen=True, eq=False)
class Transposed:
    """Says that a value is another one with its axes in another order."""

    x: "Traced"
    order: tuple[int, ...]  # Which axis of `x` each axis is.


@dataclasses.dataclass(frozen=True, eq=False)
class Filled:
    """Says that a value is another one, but -inf at positions known beforehand."""

    x: "Traced"
    where: np.ndarray  # bool; length 1 along axes that it is repeated along.


@dataclasses.dataclass(frozen=True, eq=False)
class Peaks:
    """Says that every row along some axes has an entry of at least 0, or holds nan.

    Or, of exp of it, one above zero, and none below 0.
    """

    axes: tuple[int, ...]
    is_exp: bool
    # bool; where that entry is not, of length 1 along axes that this is repeated along;
    # None where nothing is known.
    outside: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Masked:
    """Says where a value may be -inf, whatever lives or dies; it is not elsewhere."""

    where: np.ndarray  # bool; length 1 along axes that it is repeated along.
    is_finite: tuple[bool, ...]  # Per axis, whether dead channels are elsewhere.


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The one value that all dead channels of an axis have, known while running.

    After a layer norm has subtracted the mean, it is minus the mean. It has the axes of
    the value that it belongs to, with length 1 along this one, and is computed beside
    what is left where some operation reads it.
    """

    # For each operand of the equation that makes it, the axis that becomes this one;
    # None for an operand that is the same for all channels.
    axes: tuple[int | None, ...]
    # What dead channels of these axes share, where it is no number.
    sources: tuple["Shared", ...] = ()
    varies: bool = True  # Whether it is made of more than constants.


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
      constant: The value, if it depends on nothing.
      summed: Which channels it is a plain sum over, where that is of interest; see
        `trace_channels(renormalise=True)`.
      may_be_nan: Whether some of it may be nan at dead channels as at kept ones, as are
        rows made of inputs that are nan, or looked up where nothing is.
      is_positive: Whether all of it is known to be above zero, where it is not nan.
      at_least: A number that none of it is below, where it is not nan.
      causes: Why dead channels have perhaps no number ("broken"), or different ones
        ("different"), for explanations.
      below: If it is known to be whole numbers from 0 on, one more than the largest it
        may be, such as the length of an axis of which it counts positions.
      shared: Axis -> what `dead` does not say exactly, where it is one value for all
        positions that `dead` speaks of.
      is_fixed: Whether it does not depend on inputs, but on parameters, running
        statistics and constants alone.
      maximum_of, transposed, peaks, masked, filled, finite: What `softmax` goes by.
    """

    labels: tuple[np.ndarray, ...]
    dead: tuple[float | None, ...]
    number: float | None = None
    is_given: bool = False
    origin: str = ""
    constant: Constant | None = None
    summed: "Sum | None" = None
    may_be_nan: bool = False
    is_positive: bool = False
    below: int | None = None
    shared: Mapping[int, Shared] = dataclasses.field(default_factory=dict)
    is_fixed: bool = False
    maximum_of: MaximumOf | None = None
    transposed: Transposed | None = None
    peaks: Peaks | None = None
    masked: Masked | None = None
    filled: Filled | None = None
    finite: "Traced | None" = None  # Whose entries this says are finite.
    at_least: float = -math.inf
    causes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(len(axis) for axis in self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """A plain sum over channels, which a division may make their mean."""

    labels: np.ndarray
    total: int  # Number of terms, with those along other axes.
    # Why it is inexact without the dead ones; None if it is not.
    reason: "Reason | None"


def frozen_value(shape: Sequence[int], origin: str = "") -> Traced:
    """A value none of whose positions can be removed."""
    labels = tuple(frozen_axis(size) for size in shape)
    return Traced(labels, (None,) * len(labels), origin=origin)


def uniform_value(shape: Sequence[int], number: float | None = None) -> Traced:
    """A value whose positions no parameter owns; `number` if it is one everywhere."""
    labels = tuple(uniform_axis(size) for size in shape)
    return Traced(labels, (number,) * len(labels), None if shape else number)


@functools.lru_cache(maxsize=4096)
def _axis(size: int, label: int) -> np.ndarray:
    labels = np.full(size, label, np.int64)
    labels.flags.writeable = False
    return labels


def frozen_axis(size: int) -> np.ndarray:
    """int64[size] FROZEN, the same array every time, so that `is` finds it."""
    return _axis(size, FROZEN)


def uniform_axis(size: int) -> np.ndarray:
    """int64[size] UNIFORM, the same array every time, so that `is` finds it."""
    return _axis(size, UNIFORM)


@functools.lru_cache(maxsize=4096)
def beside_axis(size: int) -> np.ndarray:
    """int64[size] labels of which one position is left: that of a `Shared` value."""
    labels = np.full(size, GONE, np.int64)
    labels[:1] = FROZEN
    labels.flags.writeable = False
    return labels


def is_plain(labels: np.ndarray) -> bool:
    """Whether this is what `frozen_axis` or `uniform_axis` gave, without looking."""
    size = len(labels)
    return labels is _axis(size, FROZEN) or labels is _axis(size, UNIFORM)


def has_channels(labels: np.ndarray) -> bool:
    """Whether some position carries a label of its own."""
    return not is_plain(labels) and bool((labels > FROZEN).any())


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a channel cannot be removed.

    Attributes:
      primitive: The operation that ties it, or "" where none is involved.
      text: What about it.
      source: `file:line` of the caller's code, or "".
      is_inherent: Whether it holds in every network: for axes of inputs and outputs,
        windows of convolutions, rows of tables, stacks of layers, and what another
        factor of the same axis is cut instead of.
    """

    primitive: str
    text: str
    source: str = ""
    is_inherent: bool = False

    def __str__(self) -> str:
        """One line for people."""
        where = f" at {self.source}" if self.source else ""
        what = f"{self.primitive}: " if self.primitive else ""
        return f"{what}{self.text}{where}"


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """An axis made of several axes, or taken apart into them.

    A position of the flat axis can be dead for one of its factors only, since what is
    left must again be a full box: heads or the features of all heads, not both. Without
    a flat axis (UNIFORM), it only says that one of several axes can be cut. Of a loose
    factor, such as the filters of every group of a convolution, as many must be left
    for each position of the others, and not the same ones.
    """

    flat: np.ndarray  # int64[*sizes] labels of the flat axis, or UNIFORM.
    factors: tuple[np.ndarray, ...]  # int64[size] labels per factor.
    primitive: str
    source: str
    loose: int | None = None  # Which factor is loose.


class LabelTable:
    """Hands out labels and records what is joined, frozen, split and merged."""

    def __init__(self) -> None:
        self.num_labels = 1  # the first is FROZEN
        # Axes with labels of their own, which are blocks of successive labels, by the
        # identity of their arrays; and where each block starts.
        self.blocks: dict[int, tuple[int, np.ndarray]] = {}
        self.starts = [FROZEN]
        self.products: list[Product] = []
        self.edges: list[tuple[np.ndarray, np.ndarray]] = []
        self.frozen: list[tuple[np.ndarray, Reason]] = []
        # Labels of parameters, and how many entries lie at each of their positions.
        self.entries: list[tuple[np.ndarray, int]] = []
        # Sums over channels, and those of them that became means.
        self.sums: list[Sum] = []
        self.means: list[Sum] = []
        # Pairs of labels, position by position: of values that are added up, and of
        # what is fixed, such as a scale, with what it is applied to.
        self.added: list[tuple[np.ndarray, np.ndarray]] = []
        self.applied: list[tuple[np.ndarray, np.ndarray]] = []
        # Labels of what is made of inputs, or of two parameters, by identity: others
        # are positions of parameters that nothing is computed at.
        self.moving: dict[int, np.ndarray] = {}
        # What is computed beside the channels that are left.
        self.read: set[Shared] = set()

    def fresh(self, size: int) -> np.ndarray:
        """Makes int64[size] labels that nothing carries yet; not to be written to."""
        labels = np.arange(self.num_labels, self.num_labels + size, dtype=np.int64)
        labels.flags.writeable = False
        if size:
            self.blocks[id(labels)] = (len(self.starts), labels)
            self.starts.append(self.num_labels)
            self.num_labels += size
        return labels

    def block_of(self, labels: np.ndarray) -> int | None:
        """Index among `starts` of an array that `fresh` gave; None for other arrays."""
        found = self.blocks.get(id(labels))
        return None if found is None else found[0]

    def freeze(self, labels: np.ndarray, reason: Reason) -> None:
        """Declares that these channels can never be removed."""
        labels = labels[labels > FROZEN]
        if len(labels):
            self.frozen.append((labels, reason))

    def move(self, labels: np.ndarray) -> None:
        """Declares that something is computed at these positions."""
        if has_channels(labels):
            self.moving[id(labels)] = labels

    def moving_labels(self) -> np.ndarray:
        """int64[n] labels that `move` was told of."""
        found = np.concatenate([np.zeros(0, np.int64), *self.moving.values()])
        return np.unique(found[found > FROZEN])

    def read_shared(self, shared: Shared) -> None:
        """Declares that a shared value is read, and with it all it is made of."""
        if shared not in self.read:
            self.read.add(shared)
            for source in shared.sources:
                self.read_shared(source)

    def mark(self) -> tuple[int, ...]:
        """Where the table stands; see `forget`."""
        return tuple(len(some) for some in self._books())

    def forget(self, mark: tuple[int, ...]) -> None:
        """Forgets everything since a mark but the labels that were handed out."""
        for some, count in zip(self._books(), mark, strict=True):
            del some[count:]

    def _books(self) -> tuple[list[Any], ...]:
        ties = self.edges, self.added, self.applied
        return *ties, self.frozen, self.products, self.sums, self.means

    def note(
        self,
        book: list[tuple[np.ndarray, np.ndarray]],
        left: np.ndarray,
        right: np.ndarray,
    ) -> None:
        """Writes down, in `added` or `applied`, which channels of two axes meet."""
        if left is right or is_plain(left) or is_plain(right):
            return
        both = (left > FROZEN) & (right > FROZEN) & (left != right)
        if both.any():
            book.append((left[both], right[both]))

    def freeze_inexact_sums(self) -> None:
        """Freezes what is summed inexactly and did not become a mean."""
        for summed in self.sums:
            is_mean = any(summed is mean for mean in self.means)
            if summed.reason is not None and not is_mean:
                self.freeze(summed.labels, summed.reason)

    def join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Declares two axes of one length to be one, and gives the labels of that.

        Freezing what meets FROZEN is up to the caller.
        """
        if left is right:
            return left
        if is_plain(left) and is_plain(right):
            return frozen_axis(len(left))
        if right is uniform_axis(len(right)):
            return left
        if left is uniform_axis(len(left)):
            return right
        one, other = self.block_of(left), self.block_of(right)
        if one is not None and other is not None:
            self.edges.append((left, right))
            return left if one > other else right
        both = (left > FROZEN) & (right > FROZEN) & (left != right)
        if both.any():
            self.edges.append((left[both], right[both]))
        is_frozen = (left == FROZEN) | (right == FROZEN)
        return np.where(is_frozen, FROZEN, np.maximum(left, right))


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledEquation:
    """One equation, with what is known of its operands and results."""

    eqn: core.JaxprEqn
    operands: Sequence[Traced]
    results: Sequence[Traced]
    # (operand, axis) -> int64[size] labels that the operand is cut to first.
    fits: Mapping[tuple[int, int], np.ndarray]
    inner: Sequence["LabelledProgram"]  # Programs that it calls.
    notes: Mapping[str, Any]  # What its rule noted.


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledProgram:
    """A program, with what is known of its equations and results."""

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    equations: Sequence[LabelledEquation]
    results: Sequence[Traced]
