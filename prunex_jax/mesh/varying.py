"""What `shard_map` knows of values along mesh axes."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from prunex_jax.base.jaxprs import OWN_CASTS


def axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes along which a value differs, from its type (`jax.typeof`)."""
    found: frozenset[str] = aval.manual_axis_type.varying
    return found


def _with_axes(aval: Any, axes: frozenset[str]) -> Any:
    """The type of a value that differs along exactly these axes."""
    kind = type(aval.manual_axis_type)
    return aval.update(manual_axis_type=kind(varying=axes))


def cast(value: jax.Array, names: Iterable[str]) -> jax.Array:
    """Types a value as differing along these axes, too; nothing moves."""
    known = axes_of(jax.typeof(value))
    missing = tuple(name for name in names if name not in known)
    return jax.lax.pcast(value, missing, to="varying") if missing else value


# `shard_map` has no cast that says that a value is the same everywhere, where it cannot
# know. This operation says it, and does nothing else. The other one takes it back: each
# is the transpose of the other, where that of jax's own cast is a sum over the axes.
_agreed_p, _differing_p = map(core.Primitive, OWN_CASTS)


def agreed(value: jax.Array, *names: str) -> jax.Array:
    """Types a value as equal along axes, which the caller knows it to be."""
    known = axes_of(jax.typeof(value)).intersection(names)
    return _agreed_p.bind(value, along=tuple(sorted(known))) if known else value


def differs(tree: Any) -> frozenset[str]:
    """The mesh axes along which some value of a tree differs, by its type."""
    every = (axes_of(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree))
    return frozenset().union(*every)


def untyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function that does not communicate know nothing of mesh axes.

    Inside of `shard_map` a loop that starts from zeros, as a recurrent layer does, is
    refused: by their type the zeros are the same on all devices, and what the loop
    makes of them is not. The function is traced without these types, and its results
    differ along all axes along which some argument does. Gradients are as without it.

    Args:
      function: Any trees of arrays -> any tree of arrays.
    Example:
      >>> import jax.numpy as jnp
      >>> def total(x):
      ...     return jax.lax.scan(lambda sum, row: (sum + row, None), 0.0, x)[0]
      >>> mesh = jax.make_mesh((1,), ('host',), (jax.sharding.AxisType.Auto,))
      >>> specs = {'in_specs': jax.P('host'), 'out_specs': jax.P('host')}
      >>> on_mesh = jax.shard_map(lambda x: untyped(total)(x)[None], mesh=mesh, **specs)
      >>> on_mesh(jnp.arange(4.0)).tolist()
      [6.0]
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        names = tuple(sorted(differs(args)))
        if not names:
            return function(*args)
        plain = jax.tree.map(lambda x: agreed(cast(x, names), *names), args)
        results = function(*plain)
        return jax.tree.map(lambda x: _differing_p.bind(x, along=names), results)

    return call


@_agreed_p.def_abstract_eval
def _(value: jax.core.ShapedArray, *, along: tuple[str, ...]) -> jax.core.ShapedArray:
    return _with_axes(value, axes_of(value).difference(along))


@_differing_p.def_abstract_eval
def _(value: jax.core.ShapedArray, *, along: tuple[str, ...]) -> jax.core.ShapedArray:
    return _with_axes(value, axes_of(value).union(along))


def _define(operation: Any, transpose: Any) -> None:
    """Says of an operation that it gives its operand."""
    operation.def_impl(lambda value, *, along: value)
    mlir.register_lowering(operation, lambda context, value, *, along: [value])
    batching.defvectorized(operation)
    ad.deflinear2(
        operation, lambda change, value, *, along: [transpose.bind(change, along=along)]
    )


_define(_agreed_p, _differing_p)
_define(_differing_p, _agreed_p)
