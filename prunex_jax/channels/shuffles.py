"""Finds where the positions of one axis only change places, as in a channel shuffle.

It is written as a division of the axis, a transposition and a merger, of which the
first alone would let only one of its factors be cut. Read together, every position goes
to one place, and each can be cut for itself.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from prunex_jax.base.jaxprs import constants_of, open_program

# Axes that become one, or that one becomes, on both sides of a reshape.
Block = tuple[list[int], list[int]]


class Shuffle(NamedTuple):
    """New positions of one axis, and then the order of all axes."""

    axis: int
    positions: np.ndarray  # int32[size]; what lies where, before.
    order: tuple[int, ...]


def reshape_blocks(old: Sequence[int], new: Sequence[int]) -> list[Block]:
    """Splits a reshape into the smallest runs of axes with equal products.

    Example:
      >>> reshape_blocks((2, 6), (2, 3, 2))
      [([0], [0]), ([1], [1, 2])]
    """
    blocks = []
    i = j = 0
    while i < len(old) or j < len(new):
        from_axes: list[int] = []
        to_axes: list[int] = []
        left = right = 1
        while True:
            if left <= right and i < len(old) and (left < right or not from_axes):
                left *= old[i]
                from_axes.append(i)
                i += 1
            elif j < len(new) and (right < left or not to_axes):
                right *= new[j]
                to_axes.append(j)
                j += 1
            else:
                break
        blocks.append((from_axes, to_axes))
    return blocks


def with_shuffles(program: Any) -> Any:
    """A program in which every shuffle is a lookup at known positions.

    Args:
      program: A traced program, with or without its constants.
    Returns:
      The same program if there is none, and one with its constants otherwise.
    Example:
      >>> def shuffled(x):
      ...     return x.reshape(3, 2, 4).swapaxes(1, 2).reshape(3, 8)
      >>> closed = with_shuffles(jax.make_jaxpr(shuffled)(np.ones((3, 8))))
      >>> [eqn.primitive.name for eqn in closed.eqns], closed.consts[0].tolist()
      (['gather'], [[0], [4], [1], [5], [2], [6], [3], [7]])
    """
    jaxpr = open_program(program)
    found = _found(jaxpr)
    if not found:
        return program
    gone = {id(eqn) for eqns, _ in found.values() for eqn in eqns}
    eqns, constvars, consts = [], [*jaxpr.constvars], [*constants_of(program)]
    for eqn in jaxpr.eqns:
        if id(eqn) in found:
            (divided, _), shuffle = found[id(eqn)]
            lookup, where = _lookup(divided.invars[0], shuffle, eqn)
            eqns += lookup
            constvars.append(where)
            consts.append(shuffle.positions[:, None])
        elif id(eqn) not in gone:
            eqns.append(eqn)
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns, constvars=constvars), consts)


def _found(jaxpr: core.Jaxpr) -> dict[int, tuple[list[core.JaxprEqn], Shuffle]]:
    """Mergers by identity -> the equations before them, and what all of them do."""
    makers = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name in ("reshape", "transpose")
    }

    def maker(eqn: core.JaxprEqn, name: str) -> core.JaxprEqn | None:
        atom = eqn.invars[0]
        made = None if isinstance(atom, core.Literal) else makers.get(atom)
        return made if made is not None and made.primitive.name == name else None

    found = {}
    for eqn in makers.values():
        moved = maker(eqn, "transpose") if eqn.primitive.name == "reshape" else None
        divided = maker(moved, "reshape") if moved is not None else None
        if moved is not None and divided is not None:
            shuffle = _shuffle(divided, moved, eqn)
            if shuffle is not None:
                found[id(eqn)] = [divided, moved], shuffle
    if not found:
        return {}
    uses = Counter(
        atom
        for atoms in (jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
        for atom in atoms
        if not isinstance(atom, core.Literal)
    )
    return {
        merged: (before, shuffle)
        for merged, (before, shuffle) in found.items()
        if all(uses[eqn.outvars[0]] == 1 for eqn in before)
    }


def _shuffle(
    divided: core.JaxprEqn, moved: core.JaxprEqn, merged: core.JaxprEqn
) -> Shuffle | None:
    """What the three do, if one axis comes apart and is put together again."""
    old, middle = _shape(divided.invars[0]), _shape(divided.outvars[0])
    turn = moved.params["permutation"]
    turned, new = _shape(moved.outvars[0]), _shape(merged.outvars[0])
    if divided.params["dimensions"] or merged.params["dimensions"]:
        return None
    apart = _only_one(reshape_blocks(old, middle), many=1)
    together = _only_one(reshape_blocks(turned, new), many=0)
    if apart is None or together is None:
        return None
    (axis,), parts = apart
    sources = [turn[i] for i in together[0]]
    if sorted(sources) != parts:
        return None
    numbers = np.arange(old[axis], dtype=np.int32).reshape([middle[i] for i in parts])
    positions = numbers.transpose([parts.index(i) for i in sources]).ravel()
    # Axes of the middle, of which the parts count as the axis that they are parts of.
    before = [i if i < parts[0] else i - len(parts) + 1 for i in range(len(middle))]
    kept = [turn[i] for i in range(len(turned)) if i not in together[0][1:]]
    order = tuple(axis if i in parts else before[i] for i in kept)
    return Shuffle(axis, positions, order)


def _only_one(blocks: Sequence[Block], many: int) -> Block | None:
    """The only block that is more than an axis, which has several on one side."""
    wide = [block for block in blocks if list(map(len, block)) != [1, 1]]
    if len(wide) != 1 or len(wide[0][many]) < 2 or len(wide[0][1 - many]) != 1:
        return None
    return wide[0]


def _shape(atom: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape


def _lookup(
    x: Any, shuffle: Shuffle, merged: core.JaxprEqn
) -> tuple[list[core.JaxprEqn], core.Var]:
    """Equations that do a shuffle, and the variable of the positions."""
    where = jax.ShapeDtypeStruct((len(shuffle.positions), 1), np.int32)
    is_moved = bool((np.diff(shuffle.positions) != 1).any())
    axis = shuffle.axis if is_moved else None
    do = functools.partial(_taken, axis=axis, order=shuffle.order)
    plain = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
    made = jax.make_jaxpr(do)(plain, where).jaxpr
    names: dict[Any, Any] = {made.invars[0]: x, made.outvars[0]: merged.outvars[0]}
    eqns = [
        eqn.replace(
            invars=[names.get(atom, atom) for atom in eqn.invars],
            outvars=[names.get(atom, atom) for atom in eqn.outvars],
            source_info=merged.source_info,
            ctx=merged.ctx,
        )
        for eqn in made.eqns
    ]
    return eqns, made.invars[1]


def _taken(x: Any, where: Any, axis: int | None, order: tuple[int, ...]) -> Any:
    if axis is not None:
        numbers = lax.GatherDimensionNumbers(
            offset_dims=tuple(i for i in range(x.ndim) if i != axis),
            collapsed_slice_dims=(axis,),
            start_index_map=(axis,),
        )
        sizes = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        x = lax.gather(x, where, numbers, sizes, mode="promise_in_bounds")
    return x if order == tuple(range(x.ndim)) else lax.transpose(x, order)
