"""Lists the collectives of a traced program and converts them to bytes per axis.

Nothing is estimated: the list comes from the program that runs, and the bytes are those
of the standard ring algorithms, which are the least that any algorithm must send.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend import core

from prunex_jax.base.jaxprs import MESH_CASTS, inner_programs, mesh_axes_of

# Primitives that communicate, and the kind of `Collective` they are.
_KINDS = {
    **dict.fromkeys(("psum", "psum_invariant", "psum2", "pmax", "pmin"), "sum"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "gather"),
    "reduce_scatter": "scatter",
    "all_to_all": "exchange",
    "ppermute": "shift",
}
# Name mesh axes but move nothing.
_FREE = MESH_CASTS | {"axis_index"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program, as every device issues it.

    Attributes:
      kind: sum | gather | scatter | exchange (each device sends every other its part)
        | shift (each device sends all it has to one other).
      axes: Mesh axes it runs over, and their sizes.
      axis_sizes: Sizes of those axes, in the same order.
      num_elements: Elements each device puts in.
      dtype: Their type.
      count: How often one call of the program issues it.
    """

    kind: str
    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    num_elements: int
    dtype: str
    count: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes each device puts in, per call of the program."""
        return self.count * self.num_elements * np.dtype(self.dtype).itemsize


def ring_bytes(kind: str, payload_bytes: int, size: int) -> float:
    """Bytes one device sends in a ring of `size` devices.

    sum: 2 (size-1)/size * payload;  scatter: (size-1)/size * payload;
    gather: (size-1) * payload, each device passing on every share but one;
    exchange: (size-1)/size * payload;  shift: payload.

    Args:
      kind: As `Collective.kind`.
      payload_bytes: What each device puts in.
      size: Devices on the axis; 1 sends nothing.
    Example:
      >>> ring_bytes('sum', 100, 4), ring_bytes('gather', 100, 4)
      (150.0, 300.0)
    """
    if kind == "sum":
        return 2 * (size - 1) * payload_bytes / size
    if kind in ("scatter", "exchange"):
        return (size - 1) * payload_bytes / size
    if kind == "shift":
        return float(payload_bytes if size > 1 else 0)
    if kind == "gather":
        return float((size - 1) * payload_bytes)
    raise ValueError(f"unknown kind of collective {kind!r}")


def list_collectives(program: core.ClosedJaxpr) -> list[Collective]:
    """Lists what a traced program sends, in program order.

    Args:
      program: From `jax.make_jaxpr(fn)(*args)` or `jax.jit(fn).trace(*args).jaxpr`,
        with the `shard_map` inside.
    Returns:
      One entry per collective and type; loops of known length multiply its count.
      What the compiler adds outside `shard_map` is not in the program, so not listed.
    Raises:
      ValueError: The program communicates in a way whose bytes cannot be known from the
        program alone (inside a `while`, or differently in the branches of a `cond`), or
        by a primitive that is not counted here.
    """
    return list(_walk(program.jaxpr, {}, 1))


def _walk(
    jaxpr: core.Jaxpr, sizes: Mapping[str, int], count: int
) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if mesh_axes_of(eqn) and name not in _FREE:
            yield from _entries(eqn, sizes, count)
        elif name == "shard_map":
            inner_sizes = {**sizes, **dict(eqn.params["mesh"].shape)}
            for program in inner_programs(eqn):
                yield from _walk(program, inner_sizes, count)
        elif name == "cond":
            yield from _branches(eqn, sizes, count)
        elif name == "while":
            for program in inner_programs(eqn):
                if any(True for _ in _walk(program, sizes, count)):
                    raise ValueError("a while loop communicates: its length is unknown")
        else:
            times = eqn.params["length"] if name == "scan" else 1
            for program in inner_programs(eqn):
                yield from _walk(program, sizes, count * times)


def _branches(
    eqn: core.JaxprEqn, sizes: Mapping[str, int], count: int
) -> list[Collective]:
    branches = [list(_walk(b.jaxpr, sizes, count)) for b in eqn.params["branches"]]
    if any(branch != branches[0] for branch in branches):
        raise ValueError(
            "the branches of a cond communicate differently; trace the program with "
            "the branch chosen beforehand (hsadmm: sync=True or sync=False)"
        )
    return branches[0]


def _entries(
    eqn: core.JaxprEqn, sizes: Mapping[str, int], count: int
) -> Iterator[Collective]:
    name, axes = eqn.primitive.name, mesh_axes_of(eqn)
    if name not in _KINDS:
        raise ValueError(f"the bytes of {name} over {axes} are not counted yet")
    if eqn.params.get("axis_index_groups") is not None:
        raise ValueError(f"{name} over groups of positions of {axes} is not counted")
    by_dtype: collections.Counter[str] = collections.Counter()
    for atom in eqn.invars:
        aval: Any = atom.aval
        by_dtype[str(aval.dtype)] += math.prod(aval.shape)
    for dtype, num_elements in by_dtype.items():
        axis_sizes = tuple(sizes[axis] for axis in axes)
        yield Collective(_KINDS[name], axes, axis_sizes, num_elements, dtype, count)


def count_hops(listed: Iterable[Collective], axis: str) -> int:
    """Counts the messages that one device sends over an axis, whatever their size.

    Args:
      listed: From `list_collectives`.
      axis: Its name. Collectives over it and another count with the size of both.
    Returns:
      How often, all collectives added up, a message has to reach a neighbour before the
      next can leave. A ring of n sums in 2 (n-1) hops, scatters, gathers or exchanges
      in n-1, and shifts in one.
    Example:
      >>> one = Collective('sum', ('host',), (4,), 100, 'float32', count=2)
      >>> count_hops([one], 'host')
      12
    """
    hops = 0
    for item in listed:
        size = math.prod(item.axis_sizes)
        if axis not in item.axes or size == 1:
            continue
        per_call = {"sum": 2 * (size - 1), "shift": 1}
        hops += item.count * per_call.get(item.kind, size - 1)
    return hops


def wire_bytes(
    listed: Iterable[Collective], mesh_shape: Mapping[str, int]
) -> dict[str, float]:
    """Adds up what one host sends over each mesh axis in one call of a program.

    Args:
      listed: From `list_collectives`.
      mesh_shape: Axis name -> size of the two axes, slow axis first, as `mesh.shape`
        gives it.
    Returns:
      Axis name -> bytes that the devices of one host together send over it. A
      collective over both axes at once counts as one ring in mesh order, in which one
      device per host sends to the next host; an exchange goes to its destinations
      directly.
    Example:
      >>> mesh_shape = {'host': 2, 'device': 4}
      >>> one = Collective('sum', ('host',), (2,), 100, 'float32')
      >>> wire_bytes([one], mesh_shape)
      {'host': 1600.0, 'device': 0.0}
    """
    slow, fast = mesh_shape
    devices_per_host = mesh_shape[fast]
    totals = {slow: 0.0, fast: 0.0}
    for item in listed:
        sent = ring_bytes(item.kind, item.payload_bytes, math.prod(item.axis_sizes))
        if item.axes == (slow,):
            totals[slow] += devices_per_host * sent
        elif item.axes == (fast,):
            totals[fast] += devices_per_host * sent
        elif item.kind == "exchange":
            part = item.payload_bytes / math.prod(item.axis_sizes)
            to_each_host = devices_per_host * devices_per_host * part
            totals[slow] += (mesh_shape[slow] - 1) * to_each_host
            totals[fast] += to_each_host - devices_per_host * part
        else:
            leaving = 1 if mesh_shape[slow] > 1 else 0
            totals[slow] += leaving * sent
            totals[fast] += (devices_per_host - leaving) * sent
    return totals
