"""What `shard_map` knows of values along mesh axes, in every jax that is supported.

jax has renamed all of it since 0.7.
"""

from typing import Any

import jax

# Untyped: what type checkers know is one version of jax.
_lax: Any = jax.lax


def axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes along which a value differs, from its type (`jax.typeof`)."""
    # jax before 0.10 said `vma`.
    kind = getattr(aval, "manual_axis_type", None)
    return aval.vma if kind is None else kind.varying


def with_axes(aval: Any, axes: frozenset[str]) -> Any:
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
