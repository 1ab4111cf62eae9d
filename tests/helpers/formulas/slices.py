"""Closed formulas of what slices of parameters tell each other."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from prunex_jax.channels import Layouts
from prunex_jax.comm import Collective, Slicing
from prunex_jax.comm.slices import Shape, _is_large


def joining(slicing: Slicing, dtype: str = "float32") -> list[Collective]:
    """What `join` sends of arrays of some type."""
    sent = _messages(slicing, "gather", slicing.own_shapes.values())
    return [dataclasses.replace(each, dtype=dtype) for each in sent]


def averaging(slicing: Slicing) -> list[Collective]:
    """What `mean_of` sends."""
    return _messages(slicing, "scatter", slicing.own_shapes.values())


def taking(
    slicing: Slicing, layouts: Layouts, keep_counts: Mapping[str, int]
) -> list[Collective]:
    """What `take_kept` sends; layouts of whole arrays will do."""
    return _moving(slicing, "scatter", layouts, keep_counts)


def putting(
    slicing: Slicing, layouts: Layouts, keep_counts: Mapping[str, int]
) -> list[Collective]:
    """What `put_kept` sends; layouts of whole arrays will do."""
    return _moving(slicing, "gather", layouts, keep_counts)


def summing(slicing: Slicing, count: int) -> Collective:
    """What `sum_over_slices` sends for so many numbers."""
    return Collective("sum", (slicing.axis,), (slicing.parts,), count, "float32")


def _moving(
    slicing: Slicing, kind: str, layouts: Layouts, keep_counts: Mapping[str, int]
) -> list[Collective]:
    """Messages of the kept slices that do not stay where they are."""
    own = slicing.own_kept_shapes(layouts, keep_counts)
    mixed = slicing._mixed(slicing._that_lose(layouts, keep_counts))
    return _messages(slicing, kind, [own[path] for path in mixed])


def _messages(
    slicing: Slicing, kind: str, own_shapes: Iterable[Shape]
) -> list[Collective]:
    """What slices of these shapes are sent in, all of them float32."""
    sizes = [math.prod(shape) for shape in own_shapes]
    large = [size for size in sizes if _is_large(size * slicing.parts)]
    small = sum(size for size in sizes if not _is_large(size * slicing.parts))
    times = slicing.parts if kind == "scatter" else 1
    return [
        Collective(kind, (slicing.axis,), (slicing.parts,), size * times, "float32")
        for size in [*large, *([small] if small else [])]
    ]
