"""A traced program together with the labels of everything in it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from prunex_jax.channels.labels import Traced


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledEquation:
    """One equation.

    Attributes:
      eqn: The equation.
      operands: What is known of its operands.
      results: What is known of its results.
      fits: (operand, axis) -> int64[size] labels that the operand is cut to first.
      inner: Programs that it calls.
      notes: What its rule noted.
    """

    eqn: core.JaxprEqn
    operands: Sequence[Traced]
    results: Sequence[Traced]
    fits: Mapping[tuple[int, int], np.ndarray]
    inner: Sequence["LabelledProgram"]
    notes: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledProgram:
    """A program.

    Attributes:
      jaxpr: The program.
      consts: Its constants.
      arguments: What is known of its arguments.
      equations: Its equations.
      results: What is known of its results.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    arguments: Sequence[Traced]
    equations: Sequence[LabelledEquation]
    results: Sequence[Traced]
