"""A network that is given as functions, whatever they were written with.

What is left of it after a cut is found by tracing the functions and doing their
operations with fewer channels, so that nothing has to be known of its layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from prunex_jax.base.trees import PyTree
from prunex_jax.models.base import mean_with

# What settings call networks that were given, with their names behind it.
_OWN = "own "
# Channel group -> positions that are left, as a value that can be compared.
_Kept = tuple[tuple[str, tuple[int, ...]], ...]


def is_own(name: str) -> bool:
    """Whether settings call a network by this name that was given.

    Example:
      >>> is_own('own Network'), is_own('resnet20')
      (True, False)
    """
    return name.startswith(_OWN)


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """What a network is made of.

    Attributes:
      name: What people call it.
      init: key -> (parameters, statistics).
      apply: (parameters, statistics, inputs) -> answers, every example alone.
      apply_train: (parameters, statistics, inputs, key) -> (answers, statistics).
      is_random: Whether `apply_train` needs the key, which is None otherwise.
      example: Shapes and types of what a batch of one example is to the network.
      in_float32: Makes those of the same network with activations in float32; None
        where they are as they are.
    """

    name: str
    init: Callable[[jax.Array], tuple[PyTree, PyTree]]
    apply: Callable[[PyTree, PyTree, PyTree], PyTree]
    apply_train: Callable[..., tuple[PyTree, PyTree]]
    is_random: bool
    example: PyTree
    in_float32: Callable[[], "Functions"] | None = None


@dataclasses.dataclass(frozen=True)
class FunctionModel:
    """An `AnyModel` of functions.

    Attributes:
      functions: Those of the full network.
      kept: What every cut has left, for comparison.
      cuts: The cuts, `shrink.Cut`, first one first.
    """

    functions: Functions
    kept: tuple[_Kept, ...] = ()
    cuts: tuple[Any, ...] = dataclasses.field(default=(), compare=False)

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{_OWN}{self.functions.name}"

    @property
    def is_random(self) -> bool:
        """Whether training draws numbers."""
        return self.functions.is_random

    def example(self, count: int = 1) -> PyTree:
        """Shapes and types of so many examples."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype),
            self.functions.example,
        )

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Draws parameters, and makes fresh statistics, without what was cut out."""
        params, statistics = self.functions.init(key)
        for cut in self.cuts:
            params, statistics = cut.take(params), cut.take_statistics(statistics)
        return params, statistics

    def apply(self, params: PyTree, statistics: PyTree, inputs: PyTree) -> PyTree:
        """Answers in evaluation."""
        return self._reduced(self.functions.apply)(params, statistics, inputs)

    def apply_train(
        self,
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        axis_name: str | None = None,
        key: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Answers in training, and the statistics after them.

        Statistics are those of the examples at hand, and `axis_name` must be None.
        """
        assert axis_name is None, "the statistics of these functions stay on a device"
        train = self._reduced(self.functions.apply_train, returns_statistics=True)
        answered: tuple[PyTree, PyTree] = train(params, statistics, inputs, key)
        return answered

    def reestimate(
        self,
        params: PyTree,
        statistics: PyTree,
        inputs: PyTree,
        num_seen: jax.Array,
        axis_name: str | None = None,
    ) -> PyTree:
        """Adds one batch to statistics that are a plain mean over batches.

        Running statistics are taken to be s <- m s + (1 - m) b, with the batch's own b
        and any m for each of them. Starting from 0 and from 1 shows both.
        """
        key = jax.random.key(0) if self.is_random else None

        def moved(start: float) -> PyTree:
            from_there = jax.tree.map(lambda x: jnp.full_like(x, start), statistics)
            return self.apply_train(params, from_there, inputs, axis_name, key)[1]

        def own(old: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
            share = 1 - (high - low)
            return jnp.where(share > 0, low / jnp.where(share > 0, share, 1), old)

        fresh = jax.tree.map(own, statistics, moved(0.0), moved(1.0))
        return mean_with(statistics, fresh, num_seen)

    def after(self, cut: Any) -> "FunctionModel":
        """The network that is left after a `shrink.Cut`."""
        kept = tuple((n, tuple(at.tolist())) for n, at in cut.keep_indices.items())
        return dataclasses.replace(
            self, kept=(*self.kept, kept), cuts=(*self.cuts, cut)
        )

    def in_float32(self) -> "FunctionModel":
        """The network with activations in float32, where it is known how."""
        make = self.functions.in_float32
        return self if make is None else dataclasses.replace(self, functions=make())

    def _reduced(
        self, function: Callable[..., Any], **options: Any
    ) -> Callable[..., Any]:
        for cut in self.cuts:
            function = cut.function(function, **options)
        return function
