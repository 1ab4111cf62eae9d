"""What a network of the zoo is, and how its numbers are drawn.

A `Network` is a row of the table: where it comes from and how to build it. Building
gives a `Case`: plain JAX, `apply(params, [statistics,] *inputs)`, and its trees.
"""

import dataclasses
import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prunex_jax.base.trees import map_with_path
from prunex_jax.channels import ChannelTrace, trace_channels

TINY, PUBLISHED = "tiny", "published"

_OFFSETS = re.compile(r"(^|/)(b|beta|bias|offset|mean|mean_ema)(/|$)|[a-z]_bias$")
_VARIANCES = re.compile("var")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A network as a function and its trees; leaves are arrays, or shapes only.

    Attributes:
      apply: `apply(params, *inputs)`, or `apply(params, statistics, *inputs)` where
        there are statistics. Returns outputs, and new statistics if `returns_...`.
      params: Every parameter, float32.
      inputs: Example inputs.
      statistics: Running statistics, if any.
      returns_statistics: Whether `apply` returns (outputs, statistics).
      kernel_out: Axis of a kernel that makes channels: -1, or 0 in Equinox.
    """

    apply: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    statistics: Any = None
    returns_statistics: bool = False
    kernel_out: int = -1

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `apply` is called with."""
        trees = (self.params,) if self.statistics is None else self.trees
        return (*trees, *self.inputs)

    @property
    def trees(self) -> tuple[Any, Any]:
        return self.params, self.statistics

    def trace(self) -> ChannelTrace:
        """The channels of the network."""
        return trace_channels(
            self.apply,
            self.params,
            *self.inputs,
            statistics=self.statistics,
            returns_statistics=self.returns_statistics,
        )


@dataclasses.dataclass(frozen=True)
class Network:
    """One row of the zoo.

    Attributes:
      name: Unique.
      framework: Flax NNX, Flax Linen, Equinox, Haiku or plain.
      source: Who wrote the network: a package with its version, or `tests`.
      builder: `module:function` in this package; called with the size.
      floor: Least share of the parameters in prunable groups, published size.
      floor_tiny: The same for the tiny size, where classifiers weigh more.
      needs: Packages outside this project that it imports.
      is_quick: Whether it runs in `make test`.
      why: Why the floors are lower than usual, if they are.
    """

    name: str
    framework: str
    source: str
    builder: str
    floor: float = 0.95
    floor_tiny: float = 0.9
    needs: tuple[str, ...] = ()
    is_quick: bool = False
    why: str = ""

    def build(self, size: str = TINY, seed: int = 0) -> Case:
        """Builds the network; arrays in the tiny size, shapes only in the published."""
        module, function = self.builder.split(":")
        with foreign_code():
            make = getattr(importlib.import_module(f".{module}", __package__), function)
            case = make(size)
        case = dataclasses.replace(case, apply=_forgiving(case.apply))
        return case if size == PUBLISHED else with_random_numbers(case, seed)


class foreign_code:
    """Other people's code may warn, and may add arrays of different ranks."""

    def __enter__(self) -> None:
        self._ranks = jax.numpy_rank_promotion("allow")
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        self._ranks.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: Any) -> None:
        self._ranks.__exit__(*error)
        self._warnings.__exit__(*error)


def _forgiving(apply: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with foreign_code():
            return apply(*arguments)

    return call


def with_random_numbers(case: Case, seed: int = 0) -> Case:
    """Gives every leaf numbers under which no wrong equivalence can hide.

    What networks start at zero or one (biases, scales, zero-initialised residual
    branches, layer scales) is drawn at random too; variances are positive. Whole
    numbers and keys stay as they are.
    """
    rng = np.random.default_rng(seed)

    def draw(path: str, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.full(leaf.shape, 3, leaf.dtype) if _is_shape(leaf) else leaf
        return jnp.asarray(_numbers(rng, path, leaf.shape, case.kernel_out), leaf.dtype)

    def input_of(leaf: Any) -> Any:
        if not _is_shape(leaf):
            return leaf
        # Every example has a level and a contrast of its own, which pooling keeps.
        one_each = (leaf.shape[0], *(1 for _ in leaf.shape[1:]))
        level, contrast = rng.normal(size=one_each), rng.uniform(0.5, 1.5, one_each)
        return jnp.asarray(level + contrast * rng.normal(size=leaf.shape), leaf.dtype)

    return dataclasses.replace(
        case,
        params=map_with_path(draw, case.params),
        statistics=map_with_path(draw, case.statistics),
        inputs=jax.tree.map(input_of, case.inputs),
    )


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _numbers(
    rng: np.random.Generator, path: str, shape: tuple[int, ...], kernel_out: int
) -> np.ndarray:
    if _VARIANCES.search(path):
        return rng.uniform(0.5, 2.0, shape)
    if len(shape) < 2 or _OFFSETS.search(path):
        if _OFFSETS.search(path):
            return rng.normal(0.0, 0.3, shape)
        return rng.uniform(0.5, 1.5, shape)
    fan_in = np.prod(shape) / shape[kernel_out]
    gain = 2.0 if len(shape) == 4 else 1.0  # convolutions stand before rectifiers
    return rng.normal(0.0, (gain / fan_in) ** 0.5, shape)


def images(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of some images."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int, vocabulary: int) -> jax.Array:
    """Token numbers below `vocabulary`."""
    numbers = np.random.default_rng(1).integers(0, vocabulary, shape)
    return jnp.asarray(numbers, jnp.int32)
