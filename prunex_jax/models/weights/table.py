"""What a table of names is: where each tensor of a file goes, and how it is turned.

A row says it with two patterns. `{b}` in them stands for any key; on the side of the
file it may be written otherwise, as layers of a stage are. The axes of the tensor are
written as those of our leaf, in its order:

    Row('fc.weight', 'classifier/kernel', ((1,), (0,)))         transposed
    Row('conv1.weight', 'stem/kernel', ((3,), (2,), (0,), (1,)))  OIHW <- HWIO
    Row('q.weight', 'query', ((1, 2), (0,)))       heads and their features are one axis
    Row('pos', 'positions', ((), (0,), (1,)))      a first axis of length one

so that a row can be read in both directions, and the shape that the tensor must have
follows from that of the leaf.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prunex_jax.models.settings import ModelConfig

Shape = tuple[int, ...]
Axes = tuple[tuple[int, ...], ...]
# Of kernels, from ours to those of PyTorch; those of heads are (width, heads, features)
# in front of them, and (heads, features, width) behind them.
DENSE: Axes = ((1,), (0,))
CONV: Axes = ((3,), (2,), (0,), (1,))
TO_HEADS: Axes = ((1, 2), (0,))
FROM_HEADS: Axes = ((2,), (0, 1))
_KEY = r"[^/.]+"


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of a file, and what it is to us."""

    name: str  # Pattern of its name.
    # Pattern of the leaf that it becomes, or several that lie in it one after the
    # other, along its first axis or `along`.
    paths: str | tuple[str, ...]
    # Axes of the leaf that each axis of the tensor is made of; None where both are the
    # same.
    axes: Axes | None = None
    along: int = 0  # Axis of the tensor along which several leaves lie.
    # Whether it starts fresh where only the number of classes differs.
    is_head: bool = False
    # (array, wanted shape) -> array of this shape, or None if it cannot be made; for
    # leaves that depend on the size of images.
    resize: Callable[[np.ndarray, Shape], np.ndarray | None] | None = None

    @property
    def all_paths(self) -> tuple[str, ...]:
        """The patterns of paths as a tuple."""
        return (self.paths,) if isinstance(self.paths, str) else self.paths


def norm_rows(there: str, here: str) -> tuple[Row, ...]:
    """Scale and bias of a norm, which PyTorch calls weight and bias."""
    return Row(f"{there}.weight", f"{here}/scale"), Row(f"{there}.bias", f"{here}/bias")


def dense_rows(there: str, here: str, is_head: bool = False) -> tuple[Row, ...]:
    """Kernel and bias of an affine map, whose kernel PyTorch has transposed."""
    return (
        Row(f"{there}.weight", f"{here}/kernel", DENSE, is_head=is_head),
        Row(f"{there}.bias", f"{here}/bias", is_head=is_head),
    )


@dataclasses.dataclass(frozen=True)
class Fact:
    """What a network computes with, that its weights do not show."""

    entry: str  # Of config.json; `a.b` for entry b of a.
    value: object  # What it must be, if it is there.
    setting: str = ""  # Of ours, that decides it; empty if none does.

    def of(self, config: Mapping[str, Any]) -> Any:
        """What config.json says; `value` where it says nothing.

        Example:
          >>> Fact('rope.theta', 1.0).of({'rope': {'theta': 2.0}})
          2.0
        """
        found: Any = config
        for key in self.entry.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return self.value
            found = found[key]
        return self.value if found is None else found


@dataclasses.dataclass(frozen=True)
class Layout:
    """How someone names the parameters of one family of networks."""

    name: str  # What people call it.
    marks: tuple[str, ...]  # Names that all files of it have, and together no others.
    rows: tuple[Row, ...]  # The table.
    prefixes: tuple[str, ...] = ()  # What may stand in front of all names.
    # Patterns, regular expressions, of tensors that are no parameters, such as buffers,
    # or of parts that this package has no use for.
    ignored: tuple[str, ...] = ()
    # (regular expression, replacement) for names that have changed.
    renamed: tuple[tuple[str, str], ...] = ()
    # From the paths of our leaves to how `{b}` is written in the file; None where it is
    # written as here.
    keys: Callable[[Sequence[str]], Mapping[str, str]] | None = None
    # Pairs of names of one and the same tensor, of which a file has one or both, as the
    # embedding and a head that is tied to it.
    copies: tuple[tuple[str, str], ...] = ()
    # From settings to what a config.json beside the weights must say for what weights
    # do not show.
    facts: Callable[[ModelConfig], tuple[Fact, ...]] | None = None
    # (regular expression, what to do about it) of tensors that have a place with other
    # settings only.
    advice: tuple[tuple[str, str], ...] = ()

    def others_of(self, name: str) -> list[str]:
        """What the tensor of a name may be called as well."""
        pairs = (pair for pair in self.copies if name in pair)
        return [other for pair in pairs for other in pair if other != name]

    def clean_names(self, names: Sequence[str]) -> dict[str, str]:
        """Name in the file -> name in the table, without what is ignored.

        Example:
          >>> layout = Layout('x', (), (), prefixes=('net.',), ignored=('.*mask',))
          >>> layout.clean_names(['net.fc.weight', 'net.mask'])
          {'net.fc.weight': 'fc.weight'}
        """
        cleaned = {name: self._clean(name) for name in names}
        return {
            name: clean
            for name, clean in cleaned.items()
            if not any(re.fullmatch(pattern, clean) for pattern in self.ignored)
        }

    def is_of(self, names: Sequence[str]) -> bool:
        """Whether a file with these names is of this layout."""
        cleaned = set(self.clean_names(names).values())
        return set(self.marks) <= cleaned

    def places(self, leaves: Mapping[str, Shape]) -> list["Place"]:
        """The rows of a network, one for each tensor.

        Args:
          leaves: Path -> shape of its parameters and statistics.
        Returns:
          Places that together hold every leaf that the table knows, each once.
        """
        keys = self.keys(tuple(leaves)) if self.keys else {}
        found = []
        for row in self.rows:
            first, *others = row.all_paths
            pattern = re.compile(_as_expression(first))
            for match in filter(None, map(pattern.fullmatch, leaves)):
                here = match.groupdict()
                there = dict(here)
                if "b" in here:
                    there["b"] = keys.get(here["b"], here["b"])
                paths = [_filled(path, here) for path in (first, *others)]
                shapes = {path: leaves[path] for path in paths}
                found.append(Place(row, _filled(row.name, there), shapes))
        return found

    def _clean(self, name: str) -> str:
        for prefix in self.prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name


@dataclasses.dataclass(frozen=True)
class Place:
    """One tensor of a file, and the leaves of a network that it becomes."""

    row: Row  # What the table says.
    name: str  # Of the tensor.
    # Path -> shape of the leaves, in the order in which they lie.
    shapes: Mapping[str, Shape]

    @property
    def shape(self) -> Shape:
        """The shape that the tensor must have."""
        parts = [self._shape_of(shape) for shape in self.shapes.values()]
        total = sum(part[self.row.along] for part in parts) if len(parts) > 1 else 0
        return tuple(
            total if total and axis == self.row.along else length
            for axis, length in enumerate(parts[0])
        )

    def read(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """Turns the tensor, of `shape`, into leaves: path -> float32 of its shape."""
        along = self.row.along
        parts = [tensor]
        if len(self.shapes) > 1:
            lengths = [self._shape_of(shape)[along] for shape in self.shapes.values()]
            parts = np.split(tensor, np.cumsum(lengths[:-1]).tolist(), along)
        return {
            path: self._turned(part, shape).astype(np.float32)
            for (path, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _axes(self, shape: Shape) -> Axes:
        return self.row.axes or tuple((axis,) for axis in range(len(shape)))

    def _shape_of(self, shape: Shape) -> Shape:
        """The shape in the file of a leaf."""
        return tuple(math.prod(shape[i] for i in axis) for axis in self._axes(shape))

    def _turned(self, part: np.ndarray, shape: Shape) -> np.ndarray:
        order = [i for axis in self._axes(shape) for i in axis]
        spread = part.reshape([shape[i] for i in order])
        return np.transpose(spread, np.argsort(order))


def _as_expression(pattern: str) -> str:
    """A pattern of paths as a regular expression with named groups.

    Example:
      >>> _as_expression('blocks/{b}/scale')
      'blocks/(?P<b>[^/.]+)/scale'
    """
    pieces = re.split(r"\{(\w+)\}", pattern)
    return "".join(
        f"(?P<{piece}>{_KEY})" if number % 2 else re.escape(piece)
        for number, piece in enumerate(pieces)
    )


def _filled(pattern: str, keys: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: keys[match[1]], pattern)
