"""What `shard_map` knows of values along mesh axes."""

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir


def axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes along which a value differs, from its type (`jax.typeof`)."""
    found: frozenset[str] = aval.manual_axis_type.varying
    return found


def _with_axes(aval: Any, axes: frozenset[str]) -> Any:
    """The type of a value that differs along exactly these axes."""
    kind = type(aval.manual_axis_type)
    return aval.update(manual_axis_type=kind(varying=axes))


def cast(value: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Types a value as differing along more axes; nothing moves."""
    return jax.lax.pcast(value, names, to="varying") if names else value


# `shard_map` has no cast that says that a value is the same everywhere, where it cannot
# know. This operation says it, and does nothing else.
_agreed_p = core.Primitive("agreed")


def agreed(value: jax.Array, *names: str) -> jax.Array:
    """Types a value as equal along axes, which the caller knows it to be."""
    known = axes_of(jax.typeof(value)).intersection(names)
    return _agreed_p.bind(value, along=tuple(sorted(known))) if known else value


@_agreed_p.def_abstract_eval
def _(value: jax.core.ShapedArray, *, along: tuple[str, ...]) -> jax.core.ShapedArray:
    return _with_axes(value, axes_of(value).difference(along))


_agreed_p.def_impl(lambda value, *, along: value)
mlir.register_lowering(_agreed_p, lambda context, value, *, along: [value])
