"""What `shard_map` knows of values along mesh axes, in every jax that is supported.

jax has renamed all of it since 0.7.
"""

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

# Untyped: what type checkers know is one version of jax.
_lax: Any = jax.lax


def axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes along which a value differs, from its type (`jax.typeof`)."""
    # jax before 0.10 said `vma`.
    kind = getattr(aval, "manual_axis_type", None)
    return aval.vma if kind is None else kind.varying


def _with_axes(aval: Any, axes: frozenset[str]) -> Any:
    """The type of a value that differs along exactly these axes."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is None:
        return aval.update(vma=axes)
    return aval.update(manual_axis_type=type(kind)(varying=axes))


def cast(value: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Types a value as differing along more axes; nothing moves."""
    if not names:
        return value
    if hasattr(_lax, "pcast"):
        return _lax.pcast(value, names, to="varying")
    return _lax.pvary(value, names)  # jax 0.7


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
