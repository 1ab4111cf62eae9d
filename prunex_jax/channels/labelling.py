"""Traces a function and labels everything in its program.

It knows no framework: the function is `apply(params, *inputs)`, whoever wrote it.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from prunex_jax.base.errors import UserError
from prunex_jax.base.trees import PyTree, flatten_by_path
from prunex_jax.channels.context import Rule
from prunex_jax.channels.labelled import LabelledProgram
from prunex_jax.channels.labels import LabelTable, Reason, Traced, frozen_value
from prunex_jax.channels.rules import RULES
from prunex_jax.channels.walk import Walk

# A parameter axis: (path, axis). A path may hold wildcards where that is said.
AxisName = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How a function is traced; part of what `trace_channels` and `Cut` are told.

    Attributes:
      returns_statistics: Whether the function returns (outputs, new statistics).
      rules: More rules, or other ones, by primitive name.
      rebuilds: How such primitives are done on fewer channels, by name, where their
        parameters know sizes; see `shrink.rebuild`.
      freeze: Parameters whose channels stay, by path with wildcards (`stem/*`), or
        single axes as (path, axis).
      merge: Sets of axes that live or die together, position by position.
      renormalise: Whether means over channels become means over those that are kept,
        which is not the same function: see `trace_channels`.
    """

    returns_statistics: bool = False
    rules: Mapping[str, Rule] | None = None
    rebuilds: Mapping[str, Callable[..., Any]] | None = None
    freeze: Sequence[str | AxisName] = ()
    merge: Sequence[Sequence[AxisName]] = ()
    renormalise: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Labelled:
    """A function with labels: what `trace_channels` and `shrink` start from.

    Attributes:
      program: The program with labels.
      table: What is joined and frozen.
      weights: What is known of every parameter.
      running: What is known of every running statistic.
      first_use: When each of them is first read.
      outputs: Structure of what the function returns.
    """

    program: LabelledProgram
    table: LabelTable
    weights: Mapping[str, Traced]
    running: Mapping[str, Traced]
    first_use: Mapping[Traced, int]
    outputs: Any


def label_function(
    apply: Callable[..., Any],
    params: PyTree,
    inputs: Sequence[Any],
    statistics: PyTree | None = None,
    options: TraceOptions | None = None,
    with_jax_derivatives: bool = False,
) -> Labelled:
    """Traces a function and walks its program.

    Args:
      apply: As for `trace_channels`.
      params: Parameters or their shapes.
      inputs: Inputs or their shapes.
      statistics: As for `trace_channels`.
      options: How to trace.
      with_jax_derivatives: See `walk.Walk`.
    Returns:
      The program with labels, before it is concluded what they come to.
    Raises:
      UserError: As `trace_channels` does.
    """
    options = options or TraceOptions()
    trees = (params,) if statistics is None else (params, statistics)
    closed, outputs = jax.make_jaxpr(apply, return_shape=True)(*trees, *inputs)
    table = LabelTable()
    walk = Walk(
        {**RULES, **(options.rules or {})},
        table,
        options.renormalise,
        with_jax_derivatives,
    )
    weights = _parameters(table, params, is_masked=True)
    running = _parameters(table, statistics, is_masked=False)
    given = [
        dataclasses.replace(
            frozen_value(np.shape(leaf), f"input {path}"), is_given=True
        )
        for path, leaf in flatten_by_path(inputs).items()
    ]
    program = walk.run(closed, [*weights.values(), *running.values(), *given])
    _freeze_outputs(table, program.results, running, options.returns_statistics)
    _apply_wishes(table, weights, options)
    table.freeze_inexact_sums()
    return Labelled(
        program, table, weights, running, walk.first_use, jax.tree.structure(outputs)
    )


def _parameters(table: LabelTable, tree: PyTree, is_masked: bool) -> dict[str, Traced]:
    """Gives every position of every leaf a label of its own."""
    shapes = {path: np.shape(x) for path, x in flatten_by_path(tree).items()}
    if len(shapes) != len(jax.tree.leaves(tree)):
        raise UserError(
            "two leaves of the parameters have the same path, keys joined by '/'; "
            "rename one of them"
        )
    return {path: _parameter(table, s, is_masked) for path, s in shapes.items()}


def _parameter(table: LabelTable, shape: tuple[int, ...], is_masked: bool) -> Traced:
    labels = []
    for size in shape:
        own = table.fresh(size)
        if size == 1:
            table.freeze(own, Reason("", "has length 1"))
        labels.append(own)
    dead = (0.0 if is_masked else None,) * len(shape)
    return Traced(tuple(labels), dead, is_given=not is_masked)


def _freeze_outputs(
    table: LabelTable,
    outputs: Sequence[Traced],
    running: Mapping[str, Traced],
    returns_statistics: bool,
) -> None:
    """Outputs stay; new statistics are tied to the old ones."""
    count = len(running) if returns_statistics else 0
    new = outputs[len(outputs) - count :]
    for (path, before), after in zip(
        running.items() if count else (), new, strict=True
    ):
        if before.shape != after.shape:
            raise UserError(
                f"the function returns statistics of shape {after.shape} for {path}, "
                f"whose shape is {before.shape}; return (outputs, statistics) with "
                "statistics as they came in"
            )
        for own, other in zip(before.labels, after.labels, strict=True):
            table.join(own, other)
            reason = Reason("", "is tied to an output of the function")
            table.freeze(own[other == 0], reason)
    for output in outputs[: len(outputs) - count]:
        for labels in output.labels:
            table.freeze(labels, Reason("", "is an output of the function"))


def _apply_wishes(
    table: LabelTable, weights: Mapping[str, Traced], options: TraceOptions
) -> None:
    for wish in options.freeze:
        pattern, only = (wish, None) if isinstance(wish, str) else wish
        paths = fnmatch.filter(weights, pattern)
        if not paths:
            raise UserError(
                f"freeze names {pattern!r} and no parameter is called so; there are "
                f"{', '.join(weights)}"
            )
        for path in paths:
            every = range(len(weights[path].labels))
            for axis in every if only is None else [only]:
                own = _labels_of(weights, (path, axis), "freeze")
                table.freeze(own, Reason("", "is frozen by request"))
    for together in options.merge:
        parts = [_labels_of(weights, name, "merge") for name in together]
        for name, part in zip(together, parts, strict=True):
            if len(part) != len(parts[0]):
                raise UserError(
                    f"merge names axes of {len(parts[0])} and {len(part)} positions, "
                    f"{together[0]} and {name}; only axes of one length can be merged"
                )
            table.join(parts[0], part)


def _labels_of(weights: Mapping[str, Traced], name: AxisName, wish: str) -> np.ndarray:
    path, axis = name
    if path not in weights or not 0 <= axis < len(weights[path].labels):
        raise UserError(
            f"{wish} names axis {axis} of {path!r} and there is none; the parameters "
            f"are {', '.join(f'{p} {v.shape}' for p, v in weights.items())}"
        )
    return weights[path].labels[axis]
